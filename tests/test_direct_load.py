"""Loads by plain copies: the plan is what the model's own loader did, and exists only when that is all it did."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from streamrl.weight_sync.direct_load import DirectLoad, device_views
from streamrl.weight_sync.layout import Layout


class Stacked(nn.Module):
    """Stacks q, k and v as an engine does, and ties its head to its embedding."""

    def __init__(self, *, fault: str = "") -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(12, 4, dtype=torch.bfloat16))  # padded from 10 rows
        self.qkv = nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.head = self.embed
        self.fault = fault

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
        for name, weight in weights:
            if name in rows:
                begin, count = rows[name]
                self.qkv.data.narrow(0, begin, count).copy_(weight)
            elif name == "embed":
                self.embed.data[:10].copy_(weight)
            elif self.fault == "converts":
                self.norm.data.copy_(weight + 1)
            elif self.fault == "drops":
                pass
            elif self.fault == "halves":
                self.norm.data[:2].copy_(weight[:2])
            else:
                self.norm.data.copy_(weight)


def fresh(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (10, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def fill(layout: Layout, payload: Tensor, weights: dict[str, Tensor]) -> None:
    for name, view in device_views(layout, payload):
        view.copy_(weights[name])


def test_a_plan_does_what_the_loader_does() -> None:
    layout = Layout.of(fresh(0))
    payload = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    model, loaded = Stacked(), Stacked()
    fill(layout, payload, fresh(0))
    plan = DirectLoad.watch(model, layout, payload)
    assert plan is not None
    memory = {name: p.data_ptr() for name, p in model.named_parameters()}
    for seed in (0, 1, 2):
        fill(layout, payload, fresh(seed))
        plan()
        loaded.load_weights(fresh(seed).items())
        for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
            assert torch.equal(ours, theirs), (seed, name)
            assert ours.data_ptr() == memory[name], "a captured graph reads the old place"
    assert torch.equal(model.head[:10], fresh(2)["embed"])


@pytest.mark.parametrize("fault", ["converts", "drops", "halves"])
def test_there_is_no_plan_for_a_loader_that_does_more_or_less_than_copy(fault: str) -> None:
    layout = Layout.of(fresh(0))
    payload = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    assert DirectLoad.watch(Stacked(fault=fault), layout, payload) is None


def test_there_is_no_plan_for_another_dtype() -> None:
    weights = {name: w.float() for name, w in fresh(0).items()}
    layout = Layout.of(weights)
    assert DirectLoad.watch(Stacked(), layout, torch.zeros(layout.num_bytes, dtype=torch.uint8)) is None
