"""GAE, V-trace and returns-to-go against float64 references written from their papers, one response at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.token_advantages import ResponseRows, gae, returns_to_go, vtrace


@dataclass
class Packed:
    """Sequences of prompt and response tokens; a token outside the mask holds nonsense."""

    mask: list[list[bool]]
    rewards: list[list[float]]
    values: list[list[float]]
    log_ratios: list[list[float]]

    def flat(self, name: str) -> Tensor:
        return torch.tensor([x for sequence in getattr(self, name) for x in sequence], dtype=torch.float64)

    @property
    def responses(self) -> ResponseRows:
        index = [7 * i + 2 for i, sequence in enumerate(self.mask) for _ in sequence]
        mask = [float(m) for sequence in self.mask for m in sequence]
        return ResponseRows(torch.tensor(mask), torch.tensor(index, dtype=torch.int64))

    def only(self, name: str, sequence: int) -> list[float]:
        """The response tokens of one sequence."""
        numbers: list[float] = getattr(self, name)[sequence]
        return [x for x, inside in zip(numbers, self.mask[sequence], strict=True) if inside]

    def back(self, of_responses: list[list[float]]) -> list[float]:
        """Numbers of response tokens at their places, 0 elsewhere."""
        flat = []
        for mask, numbers in zip(self.mask, of_responses, strict=True):
            left = iter(numbers)
            flat += [next(left) if inside else 0.0 for inside in mask]
        return flat


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    """Any number of sequences; responses of no token, of one, with holes in the mask; ratios beyond their bound."""
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), max_size=5))
    number = st.floats(-3, 3, width=32)
    ratio = st.one_of(number, st.sampled_from([-50.0, -20.0, 20.0, 50.0]))

    def like(element: st.SearchStrategy[float]) -> list[list[float]]:
        return [draw(st.lists(element, min_size=len(m), max_size=len(m))) for m in masks]

    return Packed(mask=masks, rewards=like(number), values=like(number), log_ratios=like(ratio))


def reference_gae(r: list[float], v: list[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2016: A_t = sum over l of (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}), last V = 0."""
    v = [*v, 0.0]
    deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    return [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]


def reference_vtrace(
    r: list[float], v: list[float], x: list[float], gamma: float, lam: float, rho_bar: float, c_bar: float
) -> tuple[list[float], list[float]]:
    """Espeholt et al. 2018, eq. 1, as the sum it is written as, and the advantage of section 4.2."""
    v = [*v, 0.0]
    ratios = [math.exp(max(-20.0, min(20.0, number))) for number in x]
    deltas = [min(rho_bar, ratios[t]) * (r[t] + gamma * v[t + 1] - v[t]) for t in range(len(r))]
    targets = []
    for s in range(len(r)):
        total = v[s]
        for t in range(s, len(r)):
            traces = math.prod(lam * min(c_bar, ratios[i]) for i in range(s, t))
            total += gamma ** (t - s) * traces * deltas[t]
        targets.append(total)
    after = [*targets[1:], 0.0]
    return [r[s] + gamma * after[s] - v[s] for s in range(len(r))], targets


@settings(max_examples=60, deadline=None)
@given(batch=packed(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_equals_the_sum_of_its_paper(batch: Packed, gamma: float, lam: float) -> None:
    advantages, targets = gae(batch.flat("rewards"), batch.flat("values"), batch.responses, gamma=gamma, lam=lam)
    expected = [
        reference_gae(batch.only("rewards", i), batch.only("values", i), gamma, lam) for i in range(len(batch.mask))
    ]
    assert advantages.tolist() == pytest.approx(batch.back(expected), rel=1e-6, abs=1e-6)
    inside = torch.tensor([float(m) for mask in batch.mask for m in mask], dtype=torch.float64)
    assert torch.allclose(targets, (advantages + batch.flat("values")) * inside, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    batch=packed(),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.7]),
    bounds=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (4.0, 4.0)]),
)
def test_vtrace_equals_the_sum_of_its_paper(
    batch: Packed, gamma: float, lam: float, bounds: tuple[float, float]
) -> None:
    advantages, targets = vtrace(
        batch.flat("rewards"),
        batch.flat("values"),
        batch.flat("log_ratios"),
        batch.responses,
        gamma=gamma,
        lam=lam,
        rho_bar=bounds[0],
        c_bar=bounds[1],
    )
    expected = [
        reference_vtrace(*(batch.only(name, i) for name in ("rewards", "values", "log_ratios")), gamma, lam, *bounds)
        for i in range(len(batch.mask))
    ]
    assert advantages.tolist() == pytest.approx(batch.back([a for a, _ in expected]), rel=1e-6, abs=1e-6)
    assert targets.tolist() == pytest.approx(batch.back([v for _, v in expected]), rel=1e-6, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(batch=packed())
def test_returns_to_go_are_the_sums_of_what_follows(batch: Packed) -> None:
    ours = returns_to_go(batch.flat("rewards"), batch.responses)
    rewards = [batch.only("rewards", i) for i in range(len(batch.mask))]
    assert ours.tolist() == pytest.approx(batch.back([[math.fsum(r[t:]) for t in range(len(r))] for r in rewards]))


@settings(max_examples=40, deadline=None)
@given(batch=packed(), lam=st.sampled_from([0.3, 1.0]))
def test_vtrace_of_fresh_tokens_is_gae_whose_advantage_looks_one_step_ahead(batch: Packed, lam: float) -> None:
    """Where pi = mu the targets are those of GAE (remark 1 of the paper), and with lam = 1 so are the advantages."""
    rewards, values, responses = batch.flat("rewards"), batch.flat("values"), batch.responses
    ours, targets = vtrace(
        rewards, values, torch.zeros_like(values), responses, gamma=0.9, lam=lam, rho_bar=1.0, c_bar=1.0
    )
    theirs, expected = gae(rewards, values, responses, gamma=0.9, lam=lam)
    assert torch.allclose(targets, expected, atol=1e-12)
    if lam == 1.0:
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_reward_of_a_response_is_at_its_last_token() -> None:
    responses = ResponseRows(torch.tensor([0.0, 1, 1, 0, 1, 0, 0]), torch.tensor([0, 0, 0, 1, 1, 2, 2]))
    assert responses.last(torch.tensor([5.0, 5, 5, 7, 7, 9, 9])).tolist() == [0, 0, 5, 0, 7, 0, 0]
