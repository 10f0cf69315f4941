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
    interpolated_proximal,
    kept_rollouts,
    off_policy_metrics,
    off_policy_sums,
    off_policy_warning,
    second_moment_cutoff,
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


def reference_stays(rollouts: list[list[float]], config: AlgorithmConfig) -> list[bool]:
    """Of each rollout, whether it is kept; `rollouts[i][t]` is the log-ratio of a response token."""
    stays = []
    for log_ratios in rollouts:
        ratios = [math.exp(max(-20.0, min(20.0, x))) for x in log_ratios]
        n = max(len(log_ratios), 1)
        if config.rejection == "geometric":
            mean = math.exp(max(-20.0, min(20.0, math.fsum(log_ratios) / n)))
            good = config.rejection_floor <= mean <= (config.rejection_cap or 1.01)
        elif config.rejection == "k2":
            good = math.fsum(x * x / 2 for x in log_ratios) / n <= (config.rejection_cap or 2.0)
        elif config.rejection == "k3":
            k3 = math.fsum(r - 1 - x for r, x in zip(ratios, log_ratios, strict=True)) / n
            good = k3 <= (config.rejection_cap or 0.01)
        else:
            good = True
        outliers = [r for r in ratios if r < config.veto_floor or (config.veto_cap and r > config.veto_cap)]
        stays.append(good and not outliers)
    return stays


def reference_cutoff(log_ratios: list[float], threshold: float) -> float:
    """Drop the largest squares, equal ones together, until the mean is small enough; the largest that is left."""
    left = [x * x for x in log_ratios]
    while left and math.fsum(left) / len(left) > threshold:
        left = [x for x in left if x < max(left)]
    return max(left, default=-1.0)


@pytest.mark.parametrize("rejection", ["none", "geometric", "k2", "k3"])
@settings(max_examples=80, deadline=None)
@given(
    rollouts=st.lists(st.lists(st.floats(-40, 40) | st.floats(-0.03, 0.03), max_size=5), min_size=1, max_size=5),
    cap=st.sampled_from([0.0, 1.5]),
    veto_floor=st.sampled_from([0.0, 1e-4]),
    veto_cap=st.sampled_from([0.0, 100.0]),
)
def test_every_rejection_equals_its_reference(
    rejection: str, rollouts: list[list[float]], cap: float, veto_floor: float, veto_cap: float
) -> None:
    config = AlgorithmConfig(rejection=rejection, rejection_cap=cap, veto_floor=veto_floor, veto_cap=veto_cap)
    kept = kept_rollouts(
        torch.tensor([x for row in rollouts for x in (99.0, *row)], dtype=torch.float64),
        torch.tensor([x for row in rollouts for x in (0.0, *[1.0] * len(row))], dtype=torch.float64),
        Sequences(torch.tensor([i for i, row in enumerate(rollouts) for _ in range(1 + len(row))])),
        config,
    )
    stays = reference_stays(rollouts, config)
    assert kept.tolist() == [
        float(good) for good, row in zip(stays, rollouts, strict=True) for _ in range(1 + len(row))
    ]


def test_each_bound_rejects_what_is_just_beyond_it() -> None:
    """One-token and longer rollouts, in float32 as the learner has them, with the usual bounds."""
    cases = [
        ({"rejection": "geometric"}, [math.log(1.0099)], [math.log(1.0101)]),
        ({"rejection": "geometric"}, [math.log(0.9901)], [math.log(0.9899)]),
        ({"rejection": "geometric"}, [1.0, -1.0], [1.0, 1.0]),  # token ratios may differ, their mean counts
        ({"rejection": "k2"}, [1.99], [2.01]),
        ({"rejection": "k2"}, [2.8, 0.0], [2.9, 0.0]),
        ({"rejection": "k3"}, [0.137], [0.14]),
        ({"rejection": "k3"}, [-0.14], [-0.15]),
        ({"veto_floor": 1e-4}, [0.0, math.log(1.1e-4)], [0.0, math.log(0.9e-4)]),
        ({"veto_cap": 100.0}, [0.0, math.log(99.0)], [0.0, math.log(101.0)]),
        ({"veto_floor": 1e-4, "veto_cap": 100.0}, [0.0], [-1e4]),
    ]
    for setting, good, bad in cases:
        index = torch.tensor([0] * len(good) + [1] * len(bad))
        kept = kept_rollouts(
            torch.tensor([*good, *bad]), torch.ones(len(index)), Sequences(index), AlgorithmConfig(**setting)
        )
        assert kept.tolist() == [1.0] * len(good) + [0.0] * len(bad), setting


@given(log_ratios=st.lists(st.floats(-3, 3) | st.sampled_from([-0.5, 0.25, 0.5]), max_size=12))
def test_the_second_moment_cut_keeps_what_its_reference_keeps(log_ratios: list[float]) -> None:
    cutoff = second_moment_cutoff(torch.tensor(log_ratios, dtype=torch.float64), 0.3)
    expected = reference_cutoff(log_ratios, 0.3)
    kept = [x for x in log_ratios if x * x <= cutoff]
    assert kept == [x for x in log_ratios if x * x <= expected]
    assert math.fsum(x * x for x in kept) <= 0.3 * len(kept) + 1e-9


def test_the_interpolated_policy_stands_for_the_version_before() -> None:
    p, mu = torch.tensor([-1.0] * 5, requires_grad=True), torch.tensor([-3.0] * 5)
    proximal = interpolated_proximal(p, mu, torch.tensor([10, 9, 8, 6, 0]), 10)
    assert not proximal.requires_grad
    # A-3PO: alpha mu + (1 - alpha) p with alpha = 1 for fresh data, else 1 / lag
    alpha = torch.tensor([1.0, 1.0, 1 / 2, 1 / 4, 1 / 10])
    assert torch.allclose(proximal, alpha * mu + (1 - alpha) * p.detach())


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
    def metrics(ess: float, mean: float, masked: float = 0.5) -> dict[str, float]:
        return {"offpolicy/ess": ess, "offpolicy/weight_mean": mean, "offpolicy/masked_fraction": masked}

    assert off_policy_warning(metrics(0.31, 0.51)) == "" == off_policy_warning(metrics(1.0, 1.99))
    assert "offpolicy/ess is 0.29" in off_policy_warning(metrics(0.29, 1.0))
    for mean in (0.49, 2.01):
        assert f"offpolicy/weight_mean is {mean}" in off_policy_warning(metrics(1.0, mean))
    assert "offpolicy/masked_fraction is 0.51" in off_policy_warning(metrics(1.0, 1.0, 0.51))
