"""Losses and gradients against float64 references written from the papers, token by token in plain Python.

A reference returns the loss and, by the chain rule done by hand, its derivative for each response token.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_correction import reference_cutoff, reference_stays, reference_weights

from streamrl.config import AlgorithmConfig
from streamrl.correction import second_moment_cutoff
from streamrl.losses import policy_loss, policy_metrics

LOSSES = ("ppo_clip", "reinforce_is", "cispo", "gspo", "topr", "m2po")
POLICY_VERSION = 9
CORRECTIONS = ("none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")


@dataclass
class Case:
    """Rollouts of response tokens; lists of one number a token."""

    p: list[list[float]]
    mu: list[list[float]]
    o: list[list[float]] | None
    advantages: list[float]
    entropy: list[list[float]]
    ref: list[list[float]]
    versions: list[list[int]]


def bounded(x: float) -> float:
    return max(-20.0, min(20.0, x))


def slope(x: float) -> float:
    """Derivative of exp(bounded(x))."""
    return math.exp(x) if -20.0 <= x <= 20.0 else 0.0


def ppo_token(ratio: float, advantage: float, config: AlgorithmConfig) -> tuple[float, float]:
    """Loss of one token and its derivative for the ratio (Schulman et al. 2017 eq. 7; dual clip: Ye et al. eq. 5)."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    surrogate = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    active = ratio * advantage <= min(max(ratio, low), high) * advantage
    if config.dual_clip and advantage < 0 and surrogate < config.dual_clip * advantage:
        return -config.dual_clip * advantage, 0.0
    return -surrogate, -advantage if active else 0.0


def reference(case: Case, config: AlgorithmConfig) -> tuple[float, list[list[float]]]:
    losses: list[list[float]] = []
    slopes: list[list[float]] = []
    proximal = case.p if case.o is None else case.o
    if config.proximal == "bypass":
        proximal = case.mu
    elif config.proximal == "interpolate":  # A-3PO: alpha mu + (1 - alpha) p, alpha = 1 / lag, 1 for fresh data
        lags = [[max(POLICY_VERSION - version, 1) for version in row] for row in case.versions]
        proximal = [
            [m / d + (1 - 1 / d) * p for p, m, d in zip(*rows, strict=True)]
            for rows in zip(case.p, case.mu, lags, strict=True)
        ]
    without_proximal = config.loss in ("reinforce_is", "cispo", "topr", "m2po")

    def minus_mu(values: list[list[float]]) -> list[list[float]]:
        return [[a - m for a, m in zip(*rows, strict=True)] for rows in zip(values, case.mu, strict=True)]

    drift = minus_mu(case.p if without_proximal or config.proximal == "bypass" else proximal)
    weights = reference_weights(drift if config.loss == "reinforce_is" else minus_mu(proximal), config)
    if config.loss in ("cispo", "topr"):
        weights = [[1.0] * len(row) for row in case.p]
    elif config.loss == "m2po":
        cutoff = reference_cutoff([x for row in drift for x in row], config.m2_threshold)
        weights = [[1.0 if x * x <= cutoff else 0.0 for x in row] for row in drift]
    stays = reference_stays(drift, config)
    weights = [[w if good else 0.0 for w in row] for row, good in zip(weights, stays, strict=True)]
    for i, advantage in enumerate(case.advantages):
        row_loss, row_slope = [], []
        n = len(case.p[i])
        mean_log_ratio = sum(p - o for p, o in zip(case.p[i], proximal[i], strict=True)) / n if n else 0.0
        for t in range(n):
            p, mu, o, w = case.p[i][t], case.mu[i][t], proximal[i][t], weights[i][t]
            if config.loss == "cispo":
                clipped = min(max(math.exp(bounded(p - mu)), 1 - config.clip_low), 1 + config.clip_high)
                row_loss.append(-clipped * advantage * p)
                row_slope.append(-clipped * advantage)
            elif config.loss == "topr":  # Le Roux et al. 2025, eq. 8: [ratio of the whole response] in [0, 1]
                of_response = math.exp(bounded(math.fsum(drift[i])))
                taper = 1.0 if advantage >= 0 else min(of_response, 1.0)
                row_loss.append(-taper * advantage * p)
                row_slope.append(-taper * advantage)
            elif config.loss == "m2po":  # Zheng et al. 2025: M r A
                row_loss.append(-w * advantage * math.exp(bounded(p - mu)))
                row_slope.append(-w * advantage * slope(p - mu))
            elif config.loss == "reinforce_is":
                row_loss.append(-w * advantage * p)
                row_slope.append(-w * advantage)
            elif config.loss == "ppo_clip":
                loss, per_ratio = ppo_token(math.exp(bounded(p - o)), advantage, config)
                row_loss.append(w * loss)
                row_slope.append(w * per_ratio * slope(p - o))
            else:  # GSPO's token form, eq. 14: value of the sequence ratio, gradient of each token's own log-prob
                loss, per_ratio = ppo_token(math.exp(bounded(mean_log_ratio)), advantage, config)
                row_loss.append(w * loss)
                row_slope.append(w * per_ratio * slope(mean_log_ratio))
            row_loss[-1] -= config.entropy_coef * case.entropy[i][t]
            q = case.ref[i][t]
            divergence, per_p = {
                "k1": (p - q, 1.0),
                "k2": (0.5 * (p - q) ** 2, p - q),
                "k3": (math.exp(bounded(q - p)) - (q - p) - 1, 1 - slope(q - p)),
            }[config.kl_estimator]
            row_loss[-1] += config.kl_coef * divergence
            row_slope[-1] += config.kl_coef * per_p
            if w == 0.0:
                row_loss[-1] = row_slope[-1] = 0.0
        losses.append(row_loss)
        slopes.append(row_slope)

    only_kept = config.masked_denominator == "kept"
    counts = [sum(1 for w in row if w > 0 or not only_kept) for row in weights]
    if config.aggregation == "token_mean":
        scale = [1.0 / max(sum(counts), 1)] * len(counts)
    else:
        sequences = max(sum(1 for c in counts if c), 1)
        by_mean = config.aggregation == "sequence_mean_token_mean"
        scale = [1.0 / (max(c, 1) if by_mean else config.length_divisor) / sequences for c in counts]
    total = math.fsum(s * math.fsum(row) for s, row in zip(scale, losses, strict=True))
    return total, [[s * g for g in row] for s, row in zip(scale, slopes, strict=True)]


def pack(rows: list[list[float]], prompt_value: float) -> list[float]:
    """Before each rollout stands a prompt token with a value that must not matter."""
    return [x for row in rows for x in (prompt_value, *row)]


def ours(case: Case, config: AlgorithmConfig) -> tuple[float, list[list[float]]]:
    log_probs = torch.tensor(pack(case.p, -math.inf), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(pack([[1.0] * len(row) for row in case.p], 0.0), dtype=torch.float64)
    index = torch.tensor([i for i, row in enumerate(case.p) for _ in range(1 + len(row))]) * 5 + 2
    advantages = [[a] * len(row) for a, row in zip(case.advantages, case.p, strict=True)]
    loss, _ = policy_loss(
        log_probs,
        torch.tensor(pack(case.mu, 7.0), dtype=torch.float64),
        torch.tensor(pack(advantages, 9.0), dtype=torch.float64),
        mask,
        index,
        config,
        prox_log_probs=None if case.o is None else torch.tensor(pack(case.o, 3.0), dtype=torch.float64),
        ref_log_probs=torch.tensor(pack(case.ref, math.inf), dtype=torch.float64),
        entropy=torch.tensor(pack(case.entropy, math.nan), dtype=torch.float64),
        versions=torch.tensor([v for row in case.versions for v in (0, *row)]),
        policy_version=POLICY_VERSION,
    )
    loss.backward()
    gradients, rows, start = log_probs.grad, [], 0
    assert gradients is not None
    for row in case.p:
        assert gradients[start] == 0.0  # the prompt
        rows.append(gradients[start + 1 : start + 1 + len(row)].tolist())
        start += 1 + len(row)
    return float(loss.detach()), rows


log_prob = st.floats(-30, 0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))  # empty and one-token rollouts among them
    rows = st.tuples(*(st.lists(log_prob, min_size=n, max_size=n) for n in lengths)).map(list)
    mu = draw(rows)
    near = st.floats(-1, 1)
    p = [[m + draw(near) for m in row] for row in mu] if draw(st.booleans()) else draw(rows)
    return Case(
        p=p,
        mu=mu,
        o=[[x + draw(near) for x in row] for row in p] if draw(st.booleans()) else None,
        advantages=draw(st.lists(st.floats(-3, 3), min_size=len(lengths), max_size=len(lengths))),
        entropy=draw(rows),
        ref=[[x + draw(near) for x in row] for row in p] if draw(st.booleans()) else draw(rows),
        versions=[draw(st.lists(st.integers(0, POLICY_VERSION), min_size=n, max_size=n)) for n in lengths],
    )


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=150, deadline=None)
@given(
    case=cases(),
    correction=st.sampled_from(CORRECTIONS),
    aggregation=st.sampled_from(AGGREGATIONS),
    denominator=st.sampled_from(["original", "kept"]),
    proximal=st.sampled_from(["recompute", "bypass", "interpolate"]),
    rejection=st.sampled_from(["none", "none", "geometric", "k2", "k3"]),
    veto=st.booleans(),
    dual_clip=st.sampled_from([0.0, 1.5, 3.0]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    kl_coef=st.sampled_from([0.0, 0.05]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
)
def test_losses_and_gradients_equal_the_reference(
    loss: str,
    case: Case,
    correction: str,
    aggregation: str,
    denominator: str,
    proximal: str,
    rejection: str,
    veto: bool,
    dual_clip: float,
    entropy_coef: float,
    kl_coef: float,
    kl_estimator: str,
) -> None:
    config = AlgorithmConfig(
        loss=loss,
        correction=correction,
        aggregation=aggregation,
        masked_denominator=denominator,
        proximal=proximal,
        rejection=rejection,
        rejection_cap=1.2 if rejection != "none" else 0.0,
        rejection_floor=0.8,
        veto_floor=1e-4 if veto else 0.0,
        veto_cap=100.0 if veto else 0.0,
        m2_threshold=0.2,
        dual_clip=dual_clip,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        clip_low=0.2,
        clip_high=0.28,
        length_divisor=7,
    )
    value, gradients = ours(case, config)
    expected, expected_gradients = reference(case, config)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for row, expected_row in zip(gradients, expected_gradients, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "aggregation", "denominator"), list(itertools.product(LOSSES, AGGREGATIONS, ["original", "kept"]))
)
def test_micro_batches_add_up_to_the_global_batch(loss: str, aggregation: str, denominator: str) -> None:
    """With the global count as denominator, and for `kept` the rescaling by the kept count that the trainer does."""
    torch.manual_seed(3)
    config = AlgorithmConfig(
        loss=loss,
        aggregation=aggregation,
        masked_denominator=denominator,
        correction="sequence_mask",
        rejection="k3",
        rejection_cap=0.03,
        entropy_coef=0.01,
    )
    index = torch.repeat_interleave(torch.arange(6), torch.tensor([3, 1, 5, 2, 4, 6]))
    mask = (torch.arange(len(index)) % 4 != 0).float()
    mask[index == 1] = 1.0
    mu, advantages = -torch.rand(len(index)), torch.randn(len(index))
    p, entropy = mu + 0.2 * torch.randn(len(index)), torch.rand(len(index))

    cutoff = second_moment_cutoff((p - mu)[mask.bool()], config.m2_threshold)

    def run(chosen: torch.Tensor, count: float | None) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        current = p[chosen].clone().requires_grad_()
        loss, sums = policy_loss(
            current, mu[chosen], advantages[chosen], mask[chosen], index[chosen], config, entropy=entropy[chosen],
            denominator=count, m2_cutoff=cutoff,
        )  # fmt: skip
        loss.backward()
        assert current.grad is not None
        return loss.detach(), current.grad, sums

    whole, whole_gradient, whole_sums = run(index >= 0, None)
    count = float(mask.sum()) if aggregation == "token_mean" else 6.0
    parts = [run((index >= low) & (index < high), count) for low, high in ((0, 2), (2, 3), (3, 6))]
    factor = count / sum(float(sums["kept_denominator"]) for *_, sums in parts) if denominator == "kept" else 1.0
    assert sum(float(part) for part, *_ in parts) * factor == pytest.approx(float(whole), abs=1e-6)
    assert torch.allclose(torch.cat([g for _, g, _ in parts]) * factor, whole_gradient, atol=1e-7)
    for name, total in whole_sums.items():
        assert sum(float(sums[name]) for *_, sums in parts) == pytest.approx(float(total), rel=1e-6), name


def test_a_term_that_the_config_asks_for_is_never_left_out() -> None:
    zeros, index = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    for config, missing in (
        (AlgorithmConfig(entropy_coef=0.1), "entropy"),
        (AlgorithmConfig(kl_coef=0.1), "ref_log_probs"),
        (AlgorithmConfig(proximal="interpolate"), "versions"),
    ):
        with pytest.raises(ValueError, match=missing):
            policy_loss(zeros, zeros, zeros, torch.ones(2), index, config)


def test_masking_keeps_the_original_denominator_unless_told_otherwise() -> None:
    p = torch.tensor([0.0, 0.0, 3.0, 0.0]).double().requires_grad_()
    mu, ones = torch.zeros(4).double(), torch.ones(4).double()
    gradients = {}
    for denominator in ("original", "kept"):
        p.grad = None
        config = AlgorithmConfig(loss="reinforce_is", correction="token_mask", masked_denominator=denominator)
        loss, _ = policy_loss(p, mu, ones, ones, torch.zeros(4, dtype=torch.int64), config)
        loss.backward()
        assert p.grad is not None
        gradients[denominator] = p.grad.tolist()
    assert gradients["original"] == pytest.approx([-0.25, -0.25, 0.0, -0.25])
    assert gradients["kept"] == pytest.approx([-1 / 3, -1 / 3, 0.0, -1 / 3])


def test_at_the_only_step_of_a_batch_recompute_is_truncated_importance_sampling() -> None:
    """T32: the ratio is 1 there, so all of the correction must come from the weight, and it does."""
    torch.manual_seed(0)
    mu, advantages, ones = -torch.rand(40).double(), torch.randn(40).double(), torch.ones(40).double()
    start = (mu + torch.randn(40)).detach()
    gradients = []
    for loss in ("ppo_clip", "reinforce_is"):
        p = start.clone().requires_grad_()
        value, sums = policy_loss(p, mu, advantages, ones, torch.arange(40) // 8, AlgorithmConfig(loss=loss))
        value.backward()
        assert policy_metrics({k: float(v) for k, v in sums.items()})["policy/clip_fraction"] == 0.0
        gradients.append(p.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-12)
    assert torch.allclose(gradients[0], -(start - mu).exp().clamp(max=2.0) * advantages / 40, atol=1e-12)


def test_bypass_clips_what_has_moved_already_and_counts_it() -> None:
    mu, ones = torch.zeros(4), torch.ones(4)
    p = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)  # ratios 1.65 and 0.61, outside [0.8, 1.2]
    config = AlgorithmConfig(proximal="bypass", correction="none")
    loss, sums = policy_loss(p, mu, torch.tensor([1.0, 1.0, -1.0, -1.0]), ones, torch.arange(4), config)
    loss.backward()
    assert p.grad is not None
    assert (p.grad != 0).tolist() == [False, True, True, False]
    assert policy_metrics({k: float(v) for k, v in sums.items()})["policy/clip_fraction"] == 0.5


def test_the_metrics_count_masked_and_truncated_tokens() -> None:
    p, mu, ones = torch.tensor([2.0, 0.0, -2.0]), torch.zeros(3), torch.ones(3)
    index = torch.zeros(3, dtype=torch.int64)
    for correction, masked, truncated in (("token_mask", 2 / 3, 0.0), ("token_truncate", 0.0, 1 / 3)):
        config = AlgorithmConfig(correction=correction)
        _, sums = policy_loss(p, mu, ones, ones, index, config, entropy=torch.tensor([1.0, 2.0, 3.0]))
        metrics = policy_metrics({k: float(v) for k, v in sums.items()})
        assert metrics["offpolicy/masked_fraction"] == pytest.approx(masked)
        assert metrics["offpolicy/truncated_fraction"] == pytest.approx(truncated)
        assert metrics["policy/entropy"] == pytest.approx(2.0)


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_ratios_give_finite_gradients_in_float32(loss: str) -> None:
    p = torch.tensor([-1e4, 0.0, -50.0], requires_grad=True)
    mu = torch.tensor([0.0, -1e4, -50.0])
    config = AlgorithmConfig(loss=loss)
    value, _ = policy_loss(p, mu, torch.tensor([1.0, -1.0, 1.0]), torch.ones(3), torch.arange(3), config)
    value.backward()
    assert p.grad is not None and torch.isfinite(p.grad).all() and torch.isfinite(value)
