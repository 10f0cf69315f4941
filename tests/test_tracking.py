"""Tracking: the files are written at once, and MLflow gets everything whatever happens to it. Always a real MLflow."""

from __future__ import annotations

import json
import math
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from streamrl.config import Config, flatten_config, load_config
from streamrl.errors import ConfigError, ProcessDiedError
from streamrl.mlflow_server import MlflowServer, check_port_free
from streamrl.run_directory import create_run_dir, read_lines
from streamrl.tracking import Tracker, deliver

START_S = 120.0


def config_for(uri: str = "", *overrides: str) -> Config:
    return load_config(None, [f"tracking.mlflow_uri={uri}", "run.name=tracked", *overrides])


def make_run(tmp_path: pathlib.Path, config: Config) -> pathlib.Path:
    run_dir = tmp_path / "runs" / "tracked"
    create_run_dir(run_dir, config)
    return run_dir


def step_metrics(step: int) -> dict[str, float]:
    return {"learner/loss": step / 7, "rollout/reward/mean": step / 100, "offpolicy/staleness/max": 3.0}


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def the_run(uri: str) -> Any:
    """The only run of the store."""
    store = client(uri)
    experiment = store.get_experiment_by_name("streamrl")
    (run,) = store.search_runs([experiment.experiment_id])
    return run


def history(uri: str, name: str) -> dict[int, float]:
    """Value by step; fails on a step that arrived twice."""
    metrics = client(uri).get_metric_history(the_run(uri).info.run_id, name)
    values = {metric.step: metric.value for metric in metrics}
    assert len(values) == len(metrics), "a metric arrived twice"
    return values


def wait_until(condition: Any, *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_finished_run_is_whole_in_mlflow(tmp_path: pathlib.Path) -> None:
    config = config_for()
    run_dir = make_run(tmp_path, config)
    tracker = Tracker(config, run_dir, tags={"host": "here"})
    for step in range(1, 41):
        tracker.log_step(step, step_metrics(step))
    tracker.log_eval(40, {"eval/reward": 0.9})
    (run_dir / "ledger.json").write_text("{}")
    assert tracker.close(end="FINISHED", timeout_s=60) == ""

    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    run = the_run(uri)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tracked"
    assert run.data.tags["host"] == "here" and run.data.tags["streamrl.version"]
    assert run.data.tags["streamrl.run_dir"] == str(run_dir)
    assert history(uri, "learner/loss") == pytest.approx({step: step / 7 for step in range(1, 41)})
    assert history(uri, "eval/reward") == {40: 0.9}
    assert run.data.params == {key: str(value) for key, value in flatten_config(config).items()}
    artifacts = {artifact.path for artifact in client(uri).list_artifacts(run.info.run_id)}
    assert artifacts == {"config.yaml", "plot.png", "ledger.json", "metrics.jsonl", "evals.jsonl", "events.jsonl"}


def test_the_files_hold_everything_at_once_even_while_mlflow_is_silent(
    tmp_path: pathlib.Path, silent_server: str
) -> None:
    config = config_for(silent_server)
    run_dir = make_run(tmp_path, config)
    tracker = Tracker(config, run_dir)
    slowest = 0.0
    for step in range(1, 201):
        begun = time.perf_counter()
        tracker.log_step(step, {**step_metrics(step), "policy/nothing": math.nan})
        tracker.log_event("sync", step=step)
        slowest = max(slowest, time.perf_counter() - begun)
        assert [record["step"] for record, _ in read_lines(run_dir / "metrics.jsonl")][-1] == step
    assert slowest < 0.5, "logging waited for MLflow"
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["learner/loss"] == 200 / 7 and last["policy/nothing"] is None
    begun = time.monotonic()
    leftover = tracker.close(end="KILLED", timeout_s=1.0)
    assert time.monotonic() - begun < 6.0
    assert "200 of 200 rows" in leftover and f"streamrl deliver {run_dir}" in leftover and silent_server in leftover


def test_a_full_disk_ends_neither_the_training_nor_the_run(tmp_path: pathlib.Path) -> None:
    config = config_for()
    run_dir = make_run(tmp_path, config)
    tracker = Tracker(config, run_dir)
    tracker.log_step(1, step_metrics(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = (run_dir / "metrics.jsonl").stat().st_size + 20  # for a part of the next line
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        tracker.log_step(2, step_metrics(2))
        tracker.log_step(3, step_metrics(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "2 lines of metrics.jsonl could not be written" in tracker.problem
    tracker.log_step(4, step_metrics(4))
    assert [record["step"] for record, _ in read_lines(run_dir / "metrics.jsonl")] == [1, 4]
    assert tracker.close(end="FINISHED", timeout_s=60) == ""
    assert sorted(history(f"sqlite:///{tmp_path}/runs/mlflow.db", "learner/loss")) == [1, 4]


def test_what_was_left_over_is_delivered_later_and_only_once(tmp_path: pathlib.Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    config = config_for(nowhere)
    run_dir = make_run(tmp_path, config)
    tracker = Tracker(config, run_dir)
    for step in range(1, 1201):  # several requests' worth
        tracker.log_step(step, step_metrics(step))
    wait_until(lambda: tracker.problem, timeout_s=60, what="a problem is reported")
    assert tracker.close(end="FAILED", timeout_s=0.5)
    assert any(event["kind"] == "mlflow_unreachable" for event, _ in read_lines(run_dir / "events.jsonl"))

    uri = f"sqlite:///{tmp_path}/later.db"
    assert deliver(run_dir, uri=uri) == 1200
    assert deliver(run_dir, uri=uri) == 0
    assert sorted(history(uri, "learner/loss")) == list(range(1, 1201))
    assert the_run(uri).info.status == "FAILED"

    # The answer to create_run was lost: the run is found again instead of made twice.
    state = json.loads((run_dir / "mlflow.json").read_text())
    (run_dir / "mlflow.json").write_text(json.dumps({**state, "run_id": "", "offsets": {}, "end_sent": False}))
    assert deliver(run_dir) == 1200
    assert sorted(history(uri, "learner/loss")) == list(range(1, 1201))


def test_every_metric_arrives_although_the_server_is_killed_and_restarted_in_the_middle(tmp_path: pathlib.Path) -> None:
    database, port = f"sqlite:///{tmp_path}/server.db", free_port()
    artifacts = (tmp_path / "artifacts").as_uri()
    config = config_for(f"http://127.0.0.1:{port}")
    run_dir = make_run(tmp_path, config)

    server = MlflowServer(database, artifact_root=artifacts, port=port, log_path=tmp_path / "server.log")
    server.start(timeout_s=START_S)
    tracker = Tracker(config, run_dir)
    restarted = MlflowServer(database, artifact_root=artifacts, port=port, log_path=tmp_path / "server2.log")
    try:
        for step in range(1, 101):
            tracker.log_step(step, step_metrics(step))
            time.sleep(0.002)
        wait_until(lambda: tracker.run_url, timeout_s=60, what="the run is in MLflow")
        for step in range(101, 201):
            tracker.log_step(step, step_metrics(step))
            if step == 150:
                os.killpg(server.pid, signal.SIGKILL)
        wait_until(lambda: tracker.problem, timeout_s=60, what="the death of the server is noticed")
        restarted.start(timeout_s=START_S)
        for step in range(201, 301):
            tracker.log_step(step, step_metrics(step))
        assert tracker.close(end="FINISHED", timeout_s=60) == ""
        uri = restarted.url
        assert sorted(history(uri, "learner/loss")) == list(range(1, 301))
        assert the_run(uri).info.status == "FINISHED"
        assert tracker.run_url.startswith(f"{uri}/#/experiments/")
        kinds = [event["kind"] for event, _ in read_lines(run_dir / "events.jsonl")]
        assert kinds.index("mlflow_unreachable") < kinds.index("mlflow_back")
    finally:
        server.stop()
        restarted.stop()


def test_the_ui_serves_the_run_and_is_gone_when_the_run_is(tmp_path: pathlib.Path) -> None:
    config = config_for("", "tracking.mlflow_ui=true")
    run_dir = make_run(tmp_path, config)
    tracker = Tracker(config, run_dir)
    tracker.log_step(1, step_metrics(1))
    wait_until(lambda: tracker.run_url, timeout_s=START_S, what="the run has an address")
    (event,) = [event for event, _ in read_lines(run_dir / "events.jsonl") if event["kind"] == "mlflow_ui"]
    page = urllib.request.urlopen(tracker.run_url.split("#")[0], timeout=10)
    assert page.status == 200
    run_id = tracker.run_url.rsplit("/", 1)[-1]
    answer = urllib.request.urlopen(
        f"{tracker.run_url.split('/#')[0]}/api/2.0/mlflow/runs/get?run_id={run_id}", timeout=10
    )
    assert json.load(answer)["run"]["info"]["run_name"] == "tracked"
    family = psutil.Process(event["pid"]).children(recursive=True)
    listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) == {"127.0.0.1"}
    assert tracker.close(end="FINISHED", timeout_s=60) == ""
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_the_ui_does_not_outlive_a_driver_that_was_killed(tmp_path: pathlib.Path) -> None:
    script = (
        "import pathlib, sys, time; from streamrl.mlflow_server import MlflowServer\n"
        f"s = MlflowServer('sqlite:///{tmp_path}/k.db', artifact_root='file://{tmp_path}/a', port=0,"
        f" log_path=pathlib.Path('{tmp_path}/k.log'))\n"
        f"s.start(timeout_s={START_S}); print(s.pid, flush=True); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        leader = psutil.Process(int(driver.stdout.readline()))
        family = [leader, *leader.children(recursive=True)]
        assert len(family) > 2
    finally:
        driver.kill()
        driver.wait(10)
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []


def test_a_server_that_cannot_start_says_why_and_training_goes_on(tmp_path: pathlib.Path) -> None:
    server = MlflowServer("nonsense://x", artifact_root="file:///tmp", port=0, log_path=tmp_path / "log")
    with pytest.raises(ProcessDiedError, match="mlflow server ended while it started: .*nonsense"):
        server.start(timeout_s=START_S)
    server.stop()


def test_a_port_in_use_is_refused_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"tracking\.mlflow_ui_port \({port}\).*Set another, or 0"):
            check_port_free(port)
    check_port_free(port)
    check_port_free(0)


def test_deliver_refuses_a_living_run_and_a_directory_without_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="Name the directory of a run"):
        deliver(tmp_path)
    config = config_for()
    run_dir = make_run(tmp_path, config)
    tracker = Tracker(config, run_dir)
    try:
        with pytest.raises(ConfigError, match="still going"):
            deliver(run_dir)
    finally:
        assert tracker.close(end="KILLED", timeout_s=60) == ""


def test_a_row_with_too_many_metrics_or_a_name_that_mlflow_refuses_still_arrives(tmp_path: pathlib.Path) -> None:
    config = config_for()
    run_dir = make_run(tmp_path, config)
    tracker = Tracker(config, run_dir)
    tracker.log_step(1, {f"many/m{i}": float(i) for i in range(2500)} | {"buffer/discarded/what?!": 1.0})
    assert tracker.close(end="FINISHED", timeout_s=60) == ""
    metrics = the_run(f"sqlite:///{tmp_path}/runs/mlflow.db").data.metrics
    assert metrics == {f"many/m{i}": float(i) for i in range(2500)} | {"buffer/discarded/what__": 1.0}
