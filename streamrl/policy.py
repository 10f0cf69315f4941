"""The trained model: a Hugging Face causal language model under FSDP2, and the log-probs it gives packed tokens.

Attention over packed sequences is the one thing that is not per token. It is registered with transformers under the
name `streamrl_packed`, so that every model that supports attention backends runs unchanged:

- on a GPU in bfloat16 it is `torch.nn.attention.varlen` (flash attention over sequence boundaries);
- else queries, keys and values are spread to [sequences, longest] and go through causal attention without a mask: the
  padding stands on the right, where no real token looks. Everything else stays padding-free. For 128 sequences of 18
  to 32 tokens and a 0.8M model this takes 0.22 s forward and backward on one core; padding everything takes 0.25 s,
  and the [tokens, tokens] block mask that transformers makes from position_ids 1.00 s.

Logits are never held for all tokens of a large vocabulary: beyond `MAX_LOGITS` numbers the head runs in chunks that
are computed again in the backward pass. Weights and optimizer state are float32 for every `dtype`; `bfloat16` is the
dtype of the computation. Log-probs and entropy are float32 always.

`compile` compiles the repeated layers and the scoring of a chunk, for any number of tokens; attention stays outside.
`activation_checkpointing` keeps only the input of each layer and computes the layer again in the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from streamrl.errors import ConfigError
from streamrl.packing import MicroBatch, pack_prompts

MAX_LOGITS = 1 << 24  # numbers (64 MB in float32) held at once
ATTENTION = "streamrl_packed"


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
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == "float32" else getattr(torch, dtype), reduce_dtype=torch.float32
        )
        if compile:
            self._module.score_chunk = torch.compile(self._module.score_chunk, dynamic=True)
        for block in _blocks(model):
            if compile:
                block.forward = torch.compile(block.forward, dynamic=True)
            if activation_checkpointing:
                block.forward = _checkpointed(block.forward)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self._module, mesh=mesh, mp_policy=policy)

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, a tied one once."""
        return list(self._module.parameters())

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
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

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
            context = _attention_context([4], self.device)
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
        output = trunk(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            **_attention_context(lengths, input_ids.device),
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

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


def _blocks(model: Any) -> list[nn.Module]:
    """The repeated layers, which FSDP gathers one after the other."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that keeps its inputs only; inside FSDP's hooks, so that weights are gathered for both runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _attention_context(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What `packed_attention` needs to know about the packing, as keyword arguments of the model."""
    longest = max(lengths)
    slots = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)])
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"slots": slots.to(device), "boundaries": boundaries.to(device), "longest": longest}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    slots: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed sequence, with the signature of a transformers attention function.

    Args:
        query: [1, heads, T, D]. key, value: [1, key-value heads, T, D].
        slots: [T] int64, the place of each token in a padded layout [N * longest].
        boundaries: [N + 1] int32 cumulative lengths.
        longest: tokens of the longest sequence.
        scaling: factor of the scores.
        sliding_window: of the layer; refused if shorter than the longest sequence.

    Returns:
        [1, T, heads, D], and None for the attention weights.
    """
    if sliding_window is not None and longest > sliding_window:
        raise ConfigError(
            f"model.max_length: a sequence of {longest} tokens is longer than the model's sliding attention window "
            f"({sliding_window}), which packed attention does not apply. Set model.max_length<={sliding_window}."
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn  # the module loads CUDA kernels

        if grouped:  # torch 2.11 has no grouped heads here
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        out = varlen_attn(
            query, key, value, boundaries, boundaries, longest, longest, scale=scaling, window_size=(-1, 0)
        )
        assert isinstance(out, Tensor)
        return out[None], None
    num_sequences = len(boundaries) - 1

    def pad(x: Tensor) -> Tensor:  # [T, heads, D] -> [N, heads, longest, D]
        padded = x.new_zeros(num_sequences * longest, *x.shape[1:]).index_copy(0, slots, x)
        return padded.view(num_sequences, longest, *x.shape[1:]).transpose(1, 2)

    padded = F.scaled_dot_product_attention(
        pad(query), pad(key), pad(value), is_causal=True, scale=scaling, enable_gqa=grouped
    )
    flat = padded.transpose(1, 2).reshape(num_sequences * longest, *query.shape[1:])
    return flat.index_select(0, slots)[None], None


# Never compiled: a handful of kernels whose shapes change with every batch.
AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
