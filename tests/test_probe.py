"""When an engine counts as computing the learner's function."""

from __future__ import annotations

import math

import pytest

from streamrl.weight_sync.probe import TOLERANCE, probe_difference


def test_float32_goes_by_the_worst_token_and_bfloat16_by_the_mean() -> None:
    learner = [-1.0, -2.0, -3.0, -4.0]
    engine = [-1.0, -2.0, -3.0, -4.8]
    assert probe_difference(engine, learner, dtype="float32") == pytest.approx(0.8)
    assert probe_difference(engine, learner, dtype="bfloat16") == pytest.approx(0.2)


@pytest.mark.parametrize("engine", [[-1.0], [-1.0, math.nan], [-1.0, -math.inf]])
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_a_missing_or_infinite_log_prob_is_never_accepted(engine: list[float], dtype: str) -> None:
    assert probe_difference(engine, [-1.0, -2.0], dtype=dtype) == math.inf


def test_constant_logits_are_refused_in_every_dtype() -> None:
    """What another system's sync once left: every log-prob is -ln(vocabulary)."""
    learner = [-15.0 - i % 7 for i in range(60)]
    for dtype, tolerance in TOLERANCE.items():
        assert probe_difference([-math.log(49152)] * 60, learner, dtype=dtype) > tolerance
