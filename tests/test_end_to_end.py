"""The main job: `streamrl launch --generators 3 --learner 1` on the quickstart. One real run, many assertions."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from conftest import LaunchedRun, still_running

from streamrl.config import load_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RUN_LIMIT_S = 780.0


class FinishedRun:
    """The quickstart, run to its end, with what was seen while it ran."""

    def __init__(self, run: LaunchedRun) -> None:
        self.run = run
        self.peak_memory_bytes = 0
        self.niceness: set[int] = set()
        self.family: dict[int, psutil.Process] = {}
        self.segments_seen: set[str] = set()
        while run.process.poll() is None:
            self._look()
            try:
                run.process.wait(2)
            except subprocess.TimeoutExpired:
                continue
        self.exit_code = run.process.returncode
        self.metrics = run.lines("metrics.jsonl")
        self.config = load_config(run.run_dir / "config.yaml")

    def _look(self) -> None:
        total = 0
        self.segments_seen.update(self.run.segments())
        for process in self.run.family():
            self.family[process.pid] = process
            try:
                self.niceness.add(process.nice())
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.peak_memory_bytes = max(self.peak_memory_bytes, total)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, model_cache: pathlib.Path) -> Iterator[FinishedRun]:
    folder = tmp_path_factory.mktemp("quickstart")
    run = LaunchedRun(
        folder / "run",
        "--generators",
        "3",
        "--learner",
        "1",
        "--mlflow-uri",
        f"sqlite:///{folder}/mlflow.db",
        f"model.cache_dir={model_cache}",
    )
    try:
        finished = FinishedRun(run)
        assert finished.exit_code == 0, run.tail()
        yield finished
    finally:
        run.kill()


def test_held_out_reward_rises_from_below_half_to_nine_tenths(quickstart: FinishedRun) -> None:
    evals = quickstart.run.lines("evals.jsonl")
    assert evals[0]["step"] == 0 and evals[0]["eval/max_version"] == 0
    assert evals[0]["eval/reward"] <= 0.5
    assert evals[-1]["eval/reward"] >= 0.9
    assert evals[-1]["eval/min_version"] == evals[-1]["step"], "the last version answered"


def test_it_reaches_nine_tenths_within_six_minutes_of_the_engines_being_up(quickstart: FinishedRun) -> None:
    ready = quickstart.run.events("ready")[0]["time"]
    reached = next(e["time"] for e in quickstart.run.lines("evals.jsonl") if e["eval/reward"] >= 0.9)
    assert reached - ready <= 360


def test_every_generator_advances_through_versions_that_its_probe_proved(quickstart: FinishedRun) -> None:
    syncs = quickstart.run.events("weight_sync")
    for name in ("generator-0", "generator-1", "generator-2"):
        versions = [s["policy_version"] for s in syncs if s["generator"] == name]
        assert len(set(versions)) > 5
        assert versions == sorted(versions)
    assert all(s["ok"] and s["probe_difference"] <= 1e-3 for s in syncs)


def test_no_group_beyond_the_bound_is_trained_and_the_run_is_really_asynchronous(quickstart: FinishedRun) -> None:
    bound = quickstart.config.buffer.max_staleness
    assert bound == 4
    assert all(m["offpolicy/staleness/max"] <= bound for m in quickstart.metrics)
    later = [m["offpolicy/staleness/mean"] for m in quickstart.metrics[10:]]
    assert sum(later) / len(later) > 0


def test_generator_and_learner_compute_the_same_log_probs(quickstart: FinishedRun) -> None:
    mismatches = [m["offpolicy/logprob_mismatch"] for m in quickstart.metrics if "offpolicy/logprob_mismatch" in m]
    assert mismatches, "some tokens were sampled with the learner's current version"
    assert max(mismatches) <= 1e-4


def test_every_step_has_its_line_of_metrics_with_the_documented_names(quickstart: FinishedRun) -> None:
    assert [m["step"] for m in quickstart.metrics] == list(range(1, len(quickstart.metrics) + 1))
    assert len(quickstart.metrics) == quickstart.config.run.max_steps
    names = """learner/loss learner/grad_norm learner/lr learner/tokens_per_s learner/step_time_s policy/entropy
        policy/clip_fraction offpolicy/staleness/mean offpolicy/staleness/max offpolicy/ess offpolicy/kl_k1
        offpolicy/kl_k3 offpolicy/chi2 offpolicy/weight_mean rollout/reward/mean rollout/reward/std
        rollout/length/mean rollout/truncated_fraction rollout/latency_s generator/tokens_per_s generator/running
        buffer/groups buffer/bytes buffer/inserted buffer/trained weight_sync/pause_s weight_sync/transfer_s
        weight_sync/total_s weight_sync/bytes time/wait_for_batch time/train time/publish""".split()
    missing = [name for name in names if name not in quickstart.metrics[20]]
    assert missing == []


def test_the_ledger_balances_and_agrees_with_the_steps(quickstart: FinishedRun) -> None:
    ledger = quickstart.run.ledger()
    assert ledger["final"] and ledger["in_flight"] == 0
    assert ledger["issued"] == ledger["buffered"] + ledger["trained"] + sum(ledger["discarded"].values())
    assert ledger["trained"] == quickstart.config.run.max_steps * quickstart.config.learner.groups_per_step


def test_mlflow_holds_the_run_as_its_client_reads_it(quickstart: FinishedRun) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(quickstart.config.tracking.mlflow_uri)
    experiment = client.get_experiment_by_name(quickstart.config.tracking.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "rollout/reward/mean")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [
        (m["step"], pytest.approx(m["rollout/reward/mean"])) for m in quickstart.metrics
    ]
    assert run.data.params["buffer.max_staleness"] == "4"
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert "config.yaml" in names
    assert any(name.endswith(".png") for name in names)
    assert client.get_metric_history(run.info.run_id, "eval/reward")


def test_the_whole_run_fits_in_12_gb(quickstart: FinishedRun) -> None:
    assert 0 < quickstart.peak_memory_bytes <= 12e9


def test_no_process_of_the_run_yields_to_everything_else_on_the_machine(quickstart: FinishedRun) -> None:
    assert quickstart.niceness == {os.nice(0)}


def test_the_summary_says_which_side_was_the_slower_and_how_busy_both_were(quickstart: FinishedRun) -> None:
    """How busy, and how soon, is bench/bench_quickstart.py's to say: a busy neighbour changes it."""
    end = quickstart.run.events("end")[0]
    learner, generators = end["learner_busy"], end["generator_busy"]
    assert 0 < learner <= 1 and 0 < generators <= 1
    (line,) = [x for x in quickstart.run.output.read_text().splitlines() if x.startswith("slower ")]
    assert line.split()[1].startswith("learner" if learner > generators else "generators")
    said = [int(number) for number in re.findall(r"(\d+)%", line)]
    assert said == pytest.approx([100 * generators, 100 * learner], abs=1)


def test_what_was_left_out_of_the_data_is_counted_where_a_user_sees_it(quickstart: FinishedRun) -> None:
    (data,) = quickstart.run.events("data")
    assert data["duplicates"] > 0 and data["leaked"] > 0
    summary = quickstart.run.output.read_text().splitlines()[-8:]
    assert any(line.startswith("data ") and f"{data['duplicates']:,} duplicates" in line for line in summary)


def test_no_progress_bar_is_drawn_where_nobody_watches(quickstart: FinishedRun) -> None:
    for file in (quickstart.run.output, *(quickstart.run.run_dir / "logs").glob("*.log")):
        assert "it/s]" not in file.read_text(errors="replace"), file


def test_nothing_is_left_after_the_end(quickstart: FinishedRun) -> None:
    assert quickstart.segments_seen, "the run used a shared segment"
    assert still_running(list(quickstart.family.values())) == []
    assert quickstart.run.segments() == []
