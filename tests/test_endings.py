"""How a run ends: done, interrupted, or broken by the death of one of its processes. Real engines, real signals."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest
from conftest import LaunchedRun, still_running

from streamrl.config import load_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

READY_S = 200.0


def assert_ledger_balances(run: LaunchedRun) -> None:
    ledger = run.ledger()
    discarded = sum(ledger["discarded"].values())
    assert ledger["issued"] == ledger["in_flight"] + ledger["buffered"] + ledger["trained"] + discarded
    assert ledger["issued"] > 0


def assert_nothing_is_left(run: LaunchedRun, family: list[psutil.Process]) -> None:
    assert still_running(family) == []
    assert run.segments() == []


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_an_interrupted_run_ends_within_15_s_with_a_balanced_ledger(
    small_run: Any, signum: int, exit_code: int
) -> None:
    run = small_run("--max-steps", "100000")
    run.wait_for_step(3, timeout_s=READY_S)
    family = run.family()
    assert run.segments(), "the run uses a shared segment"
    begun = time.monotonic()
    if signum == signal.SIGINT:
        run.interrupt()
    else:
        os.kill(run.process.pid, signum)
    assert run.wait(timeout_s=30) == exit_code, run.tail()
    assert time.monotonic() - begun <= 15
    assert_nothing_is_left(run, family)
    assert_ledger_balances(run)
    ledger = run.ledger()
    assert ledger["final"] and ledger["in_flight"] == 0
    steps = run.events("end")[0]["policy_version"]
    assert ledger["trained"] == steps * load_config(run.run_dir / "config.yaml").learner.groups_per_step
    assert [m["step"] for m in run.lines("metrics.jsonl")] == list(range(1, steps + 1)), "the last step is recorded too"
    assert ", interrupted" in run.output.read_text() or signum == signal.SIGTERM


def test_ctrl_c_during_start_up_leaves_nothing_behind(small_run: Any) -> None:
    run = small_run()
    run.wait_for_events("start", timeout_s=READY_S)
    time.sleep(3)  # in the middle of the engine's start
    family = run.family()
    run.interrupt()
    assert run.wait(timeout_s=30) == 130, run.tail()
    assert_nothing_is_left(run, family)


def engine_core(run: LaunchedRun) -> int:
    children = psutil.Process(run.pid_of("generator-0")).children(recursive=True)
    return next(c.pid for c in children if "EngineCore" in "".join(c.cmdline()) or "EngineCore" in c.name())


@pytest.mark.parametrize(
    ("victim", "ranks"),
    [("buffer", 1), ("learner-0", 1), ("learner-1", 2), ("generator-0", 1), ("engine", 1)],
)
def test_the_death_of_any_process_ends_the_run_and_is_named_on_the_last_line(
    small_run: Any, victim: str, ranks: int
) -> None:
    run = small_run("--max-steps", "100000", "--learner", str(ranks))
    run.wait_for_step(2, timeout_s=READY_S)
    family = run.family()
    assert run.segments(), "the run uses a shared segment"
    pid = engine_core(run) if victim == "engine" else run.pid_of(victim)
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert run.wait(timeout_s=60) == 1, run.tail()
    assert time.monotonic() - begun <= 60
    name = "generator-0" if victim == "engine" else victim
    assert name in run.last_line(), run.tail()
    assert_nothing_is_left(run, family)


def test_a_process_that_dies_during_start_up_ends_the_run(small_run: Any) -> None:
    run = small_run()
    run.wait_for_events("start", count=3, timeout_s=READY_S)
    os.kill(run.pid_of("generator-0"), signal.SIGKILL)
    assert run.wait(timeout_s=60) == 1, run.tail()
    assert "generator-0" in run.last_line(), run.tail()
