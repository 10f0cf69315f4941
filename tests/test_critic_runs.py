"""PPO with a critic, and V-trace, end to end: real engines, buffer and learner learn the quickstart task."""

from __future__ import annotations

import pathlib

import pytest
from conftest import ROOT, LaunchedRun

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS = 30  # in-process, at a constant staleness of 2, twenty are enough


@pytest.mark.parametrize("name", ["ppo", "vtrace"])
def test_a_run_with_a_critic_reaches_nine_tenths(name: str, tmp_path: pathlib.Path, model_cache: pathlib.Path) -> None:
    run = LaunchedRun(
        tmp_path / "run",
        "--generators",
        "1",
        "--learner",
        "1",
        "--mlflow-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        f"model.cache_dir={model_cache}",
        f"run.max_steps={STEPS}",
        "eval.interval_steps=0",
        config=ROOT / "configs" / f"{name}.yaml",
    )
    try:
        assert run.wait(timeout_s=500) == 0, run.tail()
    finally:
        run.kill()
    evals, metrics = run.lines("evals.jsonl"), run.lines("metrics.jsonl")
    assert evals[0]["eval/reward"] <= 0.5 and evals[-1]["eval/reward"] >= 0.9
    assert len(metrics) == STEPS and metrics[0]["critic/value_mean"] == 0.0
    last = metrics[-1]
    assert abs(last["critic/value_mean"] - last["critic/return_mean"]) < 0.2
    assert last["critic/loss"] < 0.5 * metrics[0]["critic/loss"]
