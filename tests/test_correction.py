"""Importance weights and diagnostics against float64 references, rollout by rollout in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import AlgorithmConfig
from streamrl.correction import (
    Sequences,
    importance_weights,
    off_policy_metrics,
    off_policy_sums,
    off_policy_warning,
)

CORRECTIONS = ("none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask")


def reference_weights(rollouts: list[list[float]], config: AlgorithmConfig) -> list[list[float]]:
    """`rollouts[i][t]` is o - mu of a response token."""

    def bounded_exp(x: float) -> float:
        return math.exp(max(-20.0, min(20.0, x)))

    weights = []
    for log_ratios in rollouts:
        if config.correction == "none":
            weights.append([1.0] * len(log_ratios))
            continue
        over_tokens = config.correction.startswith("token")
        raw = [bounded_exp(x) if over_tokens else bounded_exp(math.fsum(log_ratios)) for x in log_ratios]
        if config.correction.endswith("truncate"):
            weights.append([min(w, config.correction_cap) for w in raw])
        else:
            weights.append([w if config.correction_floor <= w <= config.correction_cap else 0.0 for w in raw])
    return weights


@pytest.mark.parametrize("correction", CORRECTIONS)
@settings(max_examples=40, deadline=None)
@given(rollouts=st.lists(st.lists(st.floats(-40, 40), max_size=5), min_size=1, max_size=5))
def test_every_weight_equals_its_reference(correction: str, rollouts: list[list[float]]) -> None:
    config = AlgorithmConfig(correction=correction, correction_cap=2.5, correction_floor=0.4)
    log_ratio, mask, index = [], [], []
    for i, tokens in enumerate(rollouts):  # each has a prompt token, whose value must not matter
        log_ratio += [99.0, *tokens]
        mask += [0.0, *[1.0] * len(tokens)]
        index += [i] * (1 + len(tokens))
    weights = importance_weights(
        torch.tensor(log_ratio, dtype=torch.float64),
        torch.tensor(mask).double(),
        Sequences(torch.tensor(index)),
        config,
    )
    ours = weights[torch.tensor(mask).bool()].tolist()
    assert ours == pytest.approx([w for row in reference_weights(rollouts, config) for w in row], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_fresh_data_has_weight_one(correction: str) -> None:
    zeros = torch.zeros(6)
    weights = importance_weights(
        zeros, torch.ones(6), Sequences(torch.tensor([0, 0, 1, 1, 1, 2])), AlgorithmConfig(correction=correction)
    )
    assert torch.equal(weights, torch.ones(6))


def test_no_weight_carries_a_gradient() -> None:
    log_ratio = torch.zeros(3, requires_grad=True)
    weights = importance_weights(
        log_ratio, torch.ones(3), Sequences(torch.zeros(3, dtype=torch.int64)), AlgorithmConfig()
    )
    assert not weights.requires_grad


def test_diagnostics_equal_their_definitions() -> None:
    torch.manual_seed(0)
    log_probs, old = torch.randn(50).double(), torch.randn(50).double()
    mask = (torch.rand(50) < 0.6).double()
    metrics = off_policy_metrics({k: float(v) for k, v in off_policy_sums(log_probs, old, mask).items()})
    ratios = [math.exp(p - q) for p, q, m in zip(log_probs.tolist(), old.tolist(), mask.tolist(), strict=True) if m]
    n = len(ratios)
    assert metrics["offpolicy/ess"] == pytest.approx(sum(ratios) ** 2 / (n * sum(r * r for r in ratios)))
    assert metrics["offpolicy/weight_mean"] == pytest.approx(sum(ratios) / n)
    assert metrics["offpolicy/chi2"] == pytest.approx(sum(r * r for r in ratios) / n - 1)
    assert metrics["offpolicy/kl_k1"] == pytest.approx(sum(-math.log(r) for r in ratios) / n)
    assert metrics["offpolicy/kl_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / n)


def test_diagnostics_of_fresh_data_are_exact() -> None:
    values = torch.randn(20)
    metrics = off_policy_metrics({k: float(v) for k, v in off_policy_sums(values, values, torch.ones(20)).items()})
    assert metrics == {
        "offpolicy/ess": 1.0,
        "offpolicy/weight_mean": 1.0,
        "offpolicy/chi2": 0.0,
        "offpolicy/kl_k1": 0.0,
        "offpolicy/kl_k3": 0.0,
    }


def test_sums_of_two_halves_add_up_to_the_whole() -> None:
    p, mu, mask = torch.randn(30), torch.randn(30), torch.ones(30)
    whole = off_policy_sums(p, mu, mask)
    halves = [off_policy_sums(p[s], mu[s], mask[s]) for s in (slice(0, 11), slice(11, 30))]
    for name, value in whole.items():
        assert float(halves[0][name] + halves[1][name]) == pytest.approx(float(value))


def test_extreme_ratios_stay_finite_in_float32() -> None:
    sums = off_policy_sums(torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0]), torch.ones(2))
    assert all(math.isfinite(float(v)) for v in sums.values())


def test_the_warning_names_what_is_out_of_range() -> None:
    def metrics(ess: float, mean: float) -> dict[str, float]:
        return {"offpolicy/ess": ess, "offpolicy/weight_mean": mean}

    assert off_policy_warning(metrics(0.31, 0.51)) == "" == off_policy_warning(metrics(1.0, 1.99))
    assert "offpolicy/ess is 0.29" in off_policy_warning(metrics(0.29, 1.0))
    for mean in (0.49, 2.01):
        assert f"offpolicy/weight_mean is {mean}" in off_policy_warning(metrics(1.0, mean))
