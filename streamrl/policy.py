"""The trained model: a Hugging Face causal language model under FSDP2, and the log-probs it gives packed tokens.

Logits are never held for all tokens of a large vocabulary: beyond `MAX_LOGITS` numbers the head runs in chunks that
are computed again in the backward pass. Weights and optimizer state are float32 for every `dtype`; `bfloat16` is the
dtype of the computation. Log-probs and entropy are float32 always.

`compile` compiles the repeated layers and the scoring of a chunk, for any number of tokens; attention stays outside.
`activation_checkpointing` keeps only the input of each layer and computes the layer again in the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from streamrl.errors import ConfigError
from streamrl.packed_trunk import (
    ATTENTION,
    attention_context,
    clip_grad_norm,
    mixed_precision_of,
    packed_hidden,
    shard_blocks,
)
from streamrl.packing import MicroBatch, pack_prompts

MAX_LOGITS = 1 << 24  # numbers (64 MB in float32) held at once


class Policy:
    """A causal language model that gives the log-probs of packed tokens, sharded over the ranks of a mesh.

    All ranks construct it and make the same calls in the same order: each call is a collective. Gradients are averaged
    over the ranks.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        mesh: DeviceMesh,
        temperature: float,
        dtype: str = "float32",
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        """Load a folder of Hugging Face weights.

        Args:
            model_path: a folder with config.json and weights.
            mesh: one-dimensional, over the ranks.
            temperature: of the sampling, by which logits are divided.
            dtype: `float32` or `bfloat16`, of the computation.
            compile: use `torch.compile`; the first step then takes longer.
            activation_checkpointing: keep less for the backward pass and compute it again there.

        Raises:
            ConfigError: the model does more to its logits than its head does, so its log-probs would be wrong here.
        """
        self.temperature = temperature
        self.device = torch.device(mesh.device_type)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=ATTENTION)
        model = model.to(self.device).eval()  # dropout would make the log-probs differ from the generator's
        model.requires_grad_(True)
        self.model: Any = model
        self._module = _PackedModel(model)
        self._check_head(str(model_path))
        mixed_precision = mixed_precision_of(dtype)
        if compile:
            self._module.score_chunk = torch.compile(self._module.score_chunk, dynamic=True)
        shard_blocks(
            model,
            mesh=mesh,
            mixed_precision=mixed_precision,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
        )
        fully_shard(self._module, mesh=mesh, mp_policy=mixed_precision)
        # Kept from here: after a forward without a backward FSDP shows the gathered ones in their place.
        self._parameters = list(self._module.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, a tied one once."""
        return self._parameters

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and sharded parameters (DTensor), a tied one once."""
        yield from self.model.named_parameters()

    def token_log_probs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every response token at the sampling temperature.

        Args:
            batch: on any device.
            entropy_grad: whether the entropy carries a gradient.

        Returns:
            log_probs [T] and entropy [T], float32, 0 outside the response mask.
        """
        log_probs, entropy = self._module(batch.to(self.device), self.temperature, entropy_grad)
        return log_probs, entropy

    @torch.no_grad()
    def probe_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Log-probs at temperature 1 of all tokens but the first of each sequence, in order."""
        batch = pack_prompts(sequences).to(self.device)
        log_probs, _ = self._module(batch, 1.0, False)
        return [float(value) for value in log_probs[batch.tokens["response_mask"].bool()]]

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most `max_norm`; returns the norm before."""
        return clip_grad_norm(self.parameters(), max_norm)

    def state_dict(self) -> dict[str, Any]:
        """This rank's sharded state, for `torch.distributed.checkpoint`."""
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, on the same mesh."""
        set_model_state_dict(self.model, state)

    def save_pretrained(self, folder: str | os.PathLike[str], *, is_main: bool) -> None:
        """Write a Hugging Face folder; all ranks call, the main one writes."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if is_main:
            self.model.save_pretrained(folder, state_dict=state)

    def _check_head(self, name: str) -> None:
        ids = torch.arange(4, device=self.device) % self.model.config.vocab_size
        with torch.no_grad():
            context = attention_context([4], self.device)
            positions = torch.arange(4, device=self.device)[None]
            whole = self.model(input_ids=ids[None], position_ids=positions, use_cache=False, **context).logits[0]
            ours = self._module.head(self._module.hidden(ids, positions[0], [4]))
        if not torch.allclose(whole.float(), ours.float(), atol=1e-3, rtol=1e-3):
            raise ConfigError(
                f"model.path ({name}): {type(self.model).__name__} changes its logits after the output head "
                "(soft-capping or scaling), which the learner's chunked log-probs do not. Choose a model that does not."
            )


class _PackedModel(nn.Module):
    """Trunk and head in one forward, so that FSDP gathers the head's weight for every chunk of it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.score_chunk: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]] = self._score_chunk

    def forward(self, batch: MicroBatch, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        tokens = batch.tokens
        hidden = self.hidden(tokens["input_ids"], tokens["position_ids"], batch.lengths)
        places = tokens["response_mask"].nonzero().squeeze(1)  # [K]
        hidden = hidden.index_select(0, places - 1)  # the token before predicts; a response never begins a sequence
        targets = tokens["input_ids"].index_select(0, places)
        log_probs, entropy = self._score(hidden, targets, temperature, entropy_grad)
        zeros = log_probs.new_zeros(batch.num_tokens)
        return zeros.index_copy(0, places, log_probs), zeros.index_copy(0, places, entropy)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T], [T] -> [T, H]."""
        trunk = getattr(self.model, self.model.base_model_prefix)
        return packed_hidden(trunk, input_ids, position_ids, lengths)

    def head(self, hidden: Tensor) -> Tensor:
        """[K, H] -> [K, V]."""
        return self.model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]

    def _score(self, hidden: Tensor, targets: Tensor, temperature: float, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        chunk = max(1, MAX_LOGITS // int(self.model.config.vocab_size))
        if len(hidden) <= chunk:
            return self.score_chunk(hidden, targets, temperature, entropy_grad)
        parts = [
            checkpoint(self.score_chunk, h, t, temperature, entropy_grad, use_reentrant=False)
            for h, t in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
        ]
        return torch.cat([log_probs for log_probs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _score_chunk(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        all_log_probs = F.log_softmax(self.head(hidden).float() / temperature, dim=-1)  # [K, V]
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return all_log_probs.gather(1, targets[:, None]).squeeze(1), entropy
