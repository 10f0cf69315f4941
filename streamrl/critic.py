"""The critic: a value for the state before every response token, for GAE and V-trace.

A Hugging Face trunk of its own, started from the policy's weights, with a scalar head that is 0 at first, so that every
value is. It is sharded and packed as the policy is (packed_trunk.py), has an AdamW of its own, and is computed with no
gradient for advantages (`values`) and trained on their targets (`fit`) once a step, after all advantages are known.

The value of a token stands at the token's own place and is read from the token before it, where the policy's log-prob
of it is read too. Blocking: every call is a chain of collectives, which all ranks make in the same order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from streamrl.config import Config
from streamrl.optimizer import warmed_up_adamw
from streamrl.packed_trunk import ATTENTION, clip_grad_norm, mixed_precision_of, packed_hidden, shard_blocks
from streamrl.packing import MicroBatch
from streamrl.step import all_reduce


class Critic:
    """A value model and its optimizer. All ranks construct it and make the same calls in the same order."""

    def __init__(self, model_path: str | os.PathLike[str], config: Config, *, mesh: DeviceMesh) -> None:
        """Load the trunk of a folder of Hugging Face weights; how it computes is as `config.learner` has it for the
        policy.

        Args:
            model_path: a folder with config.json and weights.
            config: the section `critic`, and `learner` for all that the two share.
            mesh: one-dimensional, over the ranks.
        """
        self._config = config.critic
        learner = config.learner
        self.device = torch.device(mesh.device_type)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=ATTENTION)
        trunk = getattr(model, model.base_model_prefix).to(self.device).eval()
        trunk.requires_grad_(True)
        self._module = _ValueModel(trunk, hidden_size=int(model.config.get_text_config().hidden_size))
        self._module.head.to(self.device)
        mixed_precision = mixed_precision_of(config.model.dtype)
        shard_blocks(
            trunk,
            mesh=mesh,
            mixed_precision=mixed_precision,
            compile=learner.compile,
            activation_checkpointing=learner.activation_checkpointing,
        )
        fully_shard(self._module.head, mesh=mesh, mp_policy=mixed_precision_of("float32"))
        fully_shard(self._module, mesh=mesh, mp_policy=mixed_precision)
        # Kept from here: after a forward without a backward FSDP shows the gathered ones in their place.
        self._parameters = list(self._module.parameters())
        self.optimizer, self.scheduler = warmed_up_adamw(self.parameters(), learner, lr=self._config.lr)

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return self._parameters

    def __call__(self, batch: MicroBatch) -> Tensor:
        """[T] float32 values with gradient, 0 outside the response mask; `batch` on any device."""
        values: Tensor = self._module(batch.to(self.device))
        return values

    @torch.no_grad()
    def values(self, batch: MicroBatch) -> Tensor:
        """[T] float32 values on the CPU, 0 outside the response mask."""
        return self(batch).cpu()

    def fit(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Train on one batch: `critic.epochs` optimizer steps, each over all of it.

        Args:
            micro_batches: this rank's, as many as every other rank has, with the columns `values` (before the first
                step) and `returns` (what they should have been).

        Returns:
            The metrics `critic/...`, the same on every rank.

        Raises:
            RuntimeError: the gradient is not finite; that step was not taken.
        """
        of_batch = [_batch_sums(micro_batch) for micro_batch in micro_batches]
        totals = all_reduce({name: sum(sums[name] for sums in of_batch) for name in of_batch[0]})
        count = max(totals["tokens"], 1.0)
        lr = float(self.scheduler.get_last_lr()[0])
        fits = [self._step(micro_batches, count) for _ in range(self._config.epochs)]
        self.scheduler.step()
        mean_error = totals["error"] / count
        mean_return = totals["return"] / count
        unexplained = totals["error_squared"] / count - mean_error**2
        variance = totals["return_squared"] / count - mean_return**2
        return {
            "critic/loss": fits[0]["loss"],
            "critic/grad_norm": fits[0]["grad_norm"],
            "critic/lr": lr,
            "critic/value_mean": totals["value"] / count,
            "critic/return_mean": mean_return,
            "critic/explained_variance": 1.0 - unexplained / variance if variance > 1e-12 else 0.0,
            "critic/clip_fraction": fits[-1]["clipped"] / count,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's sharded weights and optimizer state, for `torch.distributed.checkpoint`, and the scheduler's."""
        model, optimizer = get_state_dict(self._module, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, on the same mesh."""
        set_state_dict(
            self._module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.scheduler.load_state_dict(state["scheduler"])

    def _step(self, micro_batches: Sequence[MicroBatch], count: float) -> dict[str, float]:
        """One optimizer step; the loss, the gradient's norm before clipping and the number of clipped tokens."""
        self.optimizer.zero_grad(set_to_none=True)
        sums = {"loss": 0.0, "clipped": 0.0}
        for micro_batch in micro_batches:
            tokens = micro_batch.to(self.device).tokens
            loss, clipped = value_loss(
                self(micro_batch),
                tokens["values"],
                tokens["returns"],
                tokens["response_mask"],
                clip=self._config.value_clip,
            )
            # Divided by a count of all ranks, so gradients are to be summed over ranks, where FSDP averages them.
            (loss * (dist.get_world_size() / count)).backward()  # type: ignore[no-untyped-call]
            sums["loss"] += float(loss.detach()) / count
            sums["clipped"] += float(clipped.sum())
        grad_norm = clip_grad_norm(self.parameters(), self._config.max_grad_norm)
        totals = all_reduce(sums)
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"the gradient of the critic is not finite (norm {grad_norm}, loss {totals['loss']}); its step was not "
                "taken"
            )
        self.optimizer.step()
        return {**totals, "grad_norm": grad_norm}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """The sum over response tokens of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.

    The value may move by c a batch; further is not rewarded (the clipped value loss of PPO's reference implementation;
    Huang et al. 2022, "The 37 implementation details of PPO", number 9). c = 0 leaves (V - R)^2 / 2.

    Args:
        values: [T] V, with gradient.
        old_values: [T] V_old, those that the advantages were computed from.
        returns: [T] R.
        response_mask: [T]; the other tokens have no effect whatever their values.
        clip: c.

    Returns:
        The scalar sum, and [T] bool, where the clip took the gradient away.
    """
    chosen = response_mask.bool()
    values = torch.where(chosen, values, 0.0)
    old_values = torch.where(chosen, old_values, 0.0)
    returns = torch.where(chosen, returns, 0.0)
    errors = (values - returns) ** 2
    if clip == 0:
        return errors.sum() / 2, torch.zeros_like(chosen)
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
    clipped = bounded > errors
    return torch.where(clipped, bounded, errors).sum() / 2, clipped


class _ValueModel(nn.Module):
    """Trunk and scalar head in one forward. The head computes in float32 always: a bfloat16 value has three digits."""

    def __init__(self, trunk: nn.Module, *, hidden_size: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        tokens = batch.tokens
        hidden = packed_hidden(self.trunk, tokens["input_ids"], tokens["position_ids"], batch.lengths)
        places = tokens["response_mask"].nonzero().squeeze(1)  # [K]; a response never begins a sequence
        values: Tensor = self.head(hidden.index_select(0, places - 1).float()).squeeze(1)
        return values.new_zeros(batch.num_tokens).index_copy(0, places, values)


def _batch_sums(micro_batch: MicroBatch) -> dict[str, float]:
    """Of response tokens, from which the metrics are computed."""
    tokens = micro_batch.tokens
    chosen = tokens["response_mask"].bool()
    values, returns = tokens["values"][chosen].double(), tokens["returns"][chosen].double()
    errors = returns - values
    return {
        "tokens": float(chosen.sum()),
        "value": float(values.sum()),
        "return": float(returns.sum()),
        "return_squared": float((returns**2).sum()),
        "error": float(errors.sum()),
        "error_squared": float((errors**2).sum()),
    }
