"""Metrics and events of a run: JSONL files written at once, and MLflow fed from those files by a thread of its own.

The only file that imports mlflow, and only inside that thread.

Invariants
- `log_step`, `log_eval` and `log_event` append one line to a local file and return; they never wait for MLflow.
- `metrics.jsonl` and `evals.jsonl` are the spool: the thread reads them from the offsets kept in `mlflow.json`, one
  request's worth at a time, and moves an offset only after MLflow has accepted what was before it. Memory is bounded by
  one request, and what MLflow has not accepted, even after a crash, is still there: `deliver(run_dir)` sends the rest.
- Sending twice is harmless: the run is found again by its key, and MLflow keeps one of equal (key, step, time, value).

Waits: the thread waits for new lines (ended by `log_step`, `log_eval`, `log_artifact`, `close`) and, after a failure,
for the next try (ended by the back-off or by `close`); each request to MLflow has a time limit; `close` waits at most
its `timeout_s`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import pathlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from streamrl.config import Config, flatten_config, load_config
from streamrl.errors import ConfigError, StreamrlError
from streamrl.mlflow_server import MlflowServer
from streamrl.run_directory import (
    CONFIG_FILE,
    DELIVERY_FILE,
    EVALS_FILE,
    EVENTS_FILE,
    LEDGER_FILE,
    LOGS_DIR,
    METRICS_FILE,
    PLOT_FILE,
    lock_run_dir,
    read_lines,
    write_json,
)
from streamrl.run_log import RunLog
from streamrl.run_plot import plot_run

_METRICS_PER_REQUEST = 900  # MLflow takes at most 1000 in one log_batch
_PARAMS_PER_REQUEST = 100
_PARAM_LENGTH = 500  # longest value that every supported store takes
_REQUEST_TIMEOUT_S = 10
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 15.0
_SERVER_START_S = 90.0

_SPOOL_FILES = (METRICS_FILE, EVALS_FILE)
_LAST_ARTIFACTS = (PLOT_FILE, LEDGER_FILE, METRICS_FILE, EVALS_FILE, EVENTS_FILE)

RunEnd = Literal["FINISHED", "FAILED", "KILLED"]


class _DeliveryState(msgspec.Struct, kw_only=True):
    """What `mlflow.json` holds: enough to go on with the delivery from any process."""

    uri: str
    experiment: str
    artifact_root: str  # of a new experiment; empty leaves it to the server
    run_name: str
    run_key: str  # tag by which the run is found again if the answer to create_run was lost
    tags: dict[str, str] = {}
    start_time_ms: int = 0
    experiment_id: str = ""
    run_id: str = ""
    params_sent: bool = False
    offsets: dict[str, int] = {}  # by file: the bytes that MLflow has accepted
    rows_sent: int = 0
    artifacts_sent: list[str] = []
    end: str = ""  # FINISHED, FAILED or KILLED once the run is over
    end_time_ms: int = 0
    end_sent: bool = False


class _MlflowDelivery:
    """Brings one run directory's records to MLflow, a bounded request at a time. One thread calls `deliver`."""

    def __init__(self, run_dir: pathlib.Path, state: _DeliveryState, params: Mapping[str, Any]) -> None:
        self.state = state
        self._run_dir = run_dir
        self._params = params
        self._client: Any = None
        self._save_lock = threading.Lock()

    def deliver(self, artifacts: Iterable[str], *, give_up: threading.Event) -> None:
        """Send everything that is there. Raises whatever MLflow raises; what was accepted until then is recorded.

        Args:
            artifacts: names of files in the run directory; those sent already are left out.
            give_up: return early when it is set.
        """
        state = self.state
        if self._client is None:
            self._client = _mlflow_client(state.uri)
        if not state.run_id:
            self._find_or_create_run()
        if not state.params_sent:
            self._send_params()
        for file in _SPOOL_FILES:
            while not give_up.is_set() and self._send_rows(file):
                pass
        for name in artifacts:
            if give_up.is_set():
                return
            if name not in state.artifacts_sent and (self._run_dir / name).exists():
                self._client.log_artifact(state.run_id, str(self._run_dir / name))
                state.artifacts_sent.append(name)
                self.save()
        if state.end and not state.end_sent and not give_up.is_set():
            self._client.set_terminated(state.run_id, status=state.end, end_time=state.end_time_ms)
            state.end_sent = True
            self.save()

    def rows_left(self) -> int:
        """Optimizer steps and evaluations in the files that MLflow has not accepted."""
        offsets = self.state.offsets
        return sum(1 for file in _SPOOL_FILES for _ in read_lines(self._run_dir / file, offset=offsets.get(file, 0)))

    def save(self) -> None:
        """Record the state in `mlflow.json`."""
        with self._save_lock:
            write_json(self._run_dir / DELIVERY_FILE, self.state)

    def _find_or_create_run(self) -> None:
        state, client = self.state, self._client
        experiment = client.get_experiment_by_name(state.experiment)
        if experiment is None:
            experiment_id = client.create_experiment(state.experiment, artifact_location=state.artifact_root or None)
        else:
            experiment_id = experiment.experiment_id
        found = client.search_runs([experiment_id], filter_string=f"tags.`streamrl.run_key` = '{state.run_key}'")
        if found:
            run = found[0]
        else:
            tags = {**state.tags, "streamrl.run_key": state.run_key}
            start = state.start_time_ms or None
            run = client.create_run(experiment_id, run_name=state.run_name, tags=tags, start_time=start)
        state.experiment_id, state.run_id = experiment_id, run.info.run_id
        self.save()

    def _send_params(self) -> None:
        from mlflow.entities import Param

        params = [Param(_accepted_name(key), str(value)[:_PARAM_LENGTH]) for key, value in self._params.items()]
        for start in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(self.state.run_id, params=params[start : start + _PARAMS_PER_REQUEST])
        self.state.params_sent = True
        self.save()

    def _send_rows(self, file: str) -> bool:
        """One request of whole lines; False if there was nothing to send."""
        from mlflow.entities import Metric

        metrics: list[Any] = []
        begin = end = self.state.offsets.get(file, 0)
        rows = 0
        for record, next_offset in read_lines(self._run_dir / file, offset=begin):
            step, time_ms = int(record.get("step", 0)), int(1000 * record.get("time", 0))
            row = [
                Metric(_accepted_name(name), float("nan") if value is None else float(value), time_ms, step)
                for name, value in record.items()
                if name not in ("step", "time") and (value is None or isinstance(value, int | float))
            ]
            if rows and len(metrics) + len(row) > _METRICS_PER_REQUEST:
                break
            metrics, end, rows = metrics + row, next_offset, rows + 1
        if not rows:
            return False
        for start in range(0, len(metrics), _METRICS_PER_REQUEST):
            self._client.log_batch(self.state.run_id, metrics=metrics[start : start + _METRICS_PER_REQUEST])
        self.state.offsets[file] = end
        self.state.rows_sent += rows
        self.save()
        return True


class Tracker:
    """Where the driver puts what happens in a run.

    Example: tracker = Tracker(config, run_dir); tracker.log_step(3, {"learner/loss": 0.1}); tracker.log_event("sync",
    generator="generator-0"); leftover = tracker.close(end="FINISHED", timeout_s=5.0).
    """

    def __init__(self, config: Config, run_dir: pathlib.Path, *, tags: Mapping[str, str] | None = None) -> None:
        """Opens the files and starts the MLflow thread, which also starts the `mlflow server` that was asked for.

        Raises:
            ConfigError: if a living run has the directory.
        """
        self._run_dir = run_dir
        self._log = RunLog(run_dir)
        self._server = _server_for(config, run_dir) if config.tracking.mlflow_ui else None
        self._delivery = _MlflowDelivery(run_dir, _new_state(config, run_dir, tags or {}), flatten_config(config))
        self._delivery.save()
        self._wake = threading.Condition()
        self._news = True
        self._artifacts = [CONFIG_FILE]
        self._ended = False
        self._give_up = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._serve, name="mlflow-delivery", daemon=True)
        self._thread.start()

    @property
    def run_url(self) -> str:
        """Where a browser shows the run; empty until MLflow knows it, or if no server serves it."""
        state = self._delivery.state
        base = self._server.url if self._server is not None and self._server.healthy else state.uri
        if not state.run_id or not base.startswith(("http://", "https://")):
            return ""
        return f"{base.rstrip('/')}/#/experiments/{state.experiment_id}/runs/{state.run_id}"

    @property
    def viewing_command(self) -> str:
        """What shows the run when no server does; empty if `tracking.mlflow_uri` is a server."""
        uri = self._delivery.state.uri
        return "" if uri.startswith(("http://", "https://")) else f"mlflow server --backend-store-uri {uri}"

    @property
    def problem(self) -> str:
        """Why metrics are not taken at the moment, by the disk or by MLflow, in one line; empty while they are."""
        return self._log.problem or self._problem

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimizer step. `metrics` are `area/name[/stat]` to number; nan and inf are written as null."""
        self._log.append(METRICS_FILE, {"step": step, "time": time.time(), **metrics})
        self._notify()

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """One evaluation of the policy of optimizer step `step`, under `eval/...`; it may end some steps later."""
        self._log.append(EVALS_FILE, {"step": step, "time": time.time(), **metrics})
        self._notify()

    def log_event(self, kind: str, **fields: Any) -> None:
        """Something that happened once: a start, a death, a restart, a sync."""
        self._log.append(EVENTS_FILE, {"time": time.time(), "kind": kind, **fields})

    def log_artifact(self, name: str) -> None:
        """Upload a file of the run directory, by its name there, when MLflow has time."""
        with self._wake:
            self._artifacts.append(name)
        self._notify()

    def close(self, *, timeout_s: float, end: RunEnd = "FINISHED") -> str:
        """Draw the plot, deliver the rest within the limit, stop the server.

        Returns one line saying what MLflow has not got and how to deliver it; empty if it has everything.
        """
        deadline = time.monotonic() + timeout_s
        try:
            plot_run(self._run_dir)
        except Exception as error:  # whatever matplotlib raises: a missing picture is no reason to fail
            self.log_event("plot_failed", reason=_one_line(error))
        with self._wake:
            self._artifacts += _LAST_ARTIFACTS
            self._delivery.state.end, self._delivery.state.end_time_ms = end, int(1000 * time.time())
            self._ended = True
        with contextlib.suppress(OSError):  # a full disk: then it is recorded with the first delivery that works
            self._delivery.save()
        self._notify()
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._give_up.set()
        self._notify()
        state, leftover = self._delivery.state, ""
        if not state.end_sent:
            left = self._delivery.rows_left()
            why = f" ({self._problem})" if self._problem else ""
            leftover = (
                f"MLflow at {state.uri} has not got {left} of {left + state.rows_sent} rows of metrics{why}; "
                f"deliver them with: streamrl deliver {self._run_dir}"
            )
        if self._server is not None:
            self._server.stop()
        self._log.close()
        return leftover

    def _notify(self) -> None:
        with self._wake:
            self._news = True
            self._wake.notify()

    def _serve(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        server_due = self._server is not None
        while not self._give_up.is_set():
            with self._wake:
                self._wake.wait_for(lambda: self._news)
                self._news = False
                artifacts, ended = list(self._artifacts), self._ended
            try:
                self._delivery.deliver(artifacts, give_up=self._give_up)
            except Exception as error:  # whatever MLflow raises must stay in this thread
                first, self._problem = not self._problem, _one_line(error)
                if first:
                    self._note("mlflow_unreachable", reason=self._problem)
                self._wait_for_next_try(backoff_s, ended=ended)
                backoff_s = _FIRST_BACKOFF_S if ended else min(2 * backoff_s, _LONGEST_BACKOFF_S)
            else:
                backoff_s = _FIRST_BACKOFF_S
                if self._problem:
                    self._problem = ""
                    self._note("mlflow_back", rows_sent=self._delivery.state.rows_sent)
                if ended:
                    return
            if server_due:  # after the first delivery: two processes must not create the database at once
                server_due = False
                self._start_server()

    def _wait_for_next_try(self, backoff_s: float, *, ended: bool) -> None:
        """The back-off, cut short when the run ends meanwhile."""
        with self._wake:
            self._wake.wait_for(lambda: self._give_up.is_set() or self._ended != ended, timeout=backoff_s)
            self._news = True

    def _start_server(self) -> None:
        assert self._server is not None
        try:
            self._server.start(timeout_s=_SERVER_START_S)
        except (StreamrlError, OSError) as error:
            self._note("mlflow_ui_failed", reason=_one_line(error))
        else:
            self._note("mlflow_ui", url=self.run_url or self._server.url, pid=self._server.pid)

    def _note(self, kind: str, **fields: Any) -> None:
        """An event of the thread's; it may come when the files are closed already."""
        if not self._give_up.is_set():
            self.log_event(kind, **fields)


def deliver(run_dir: pathlib.Path, *, uri: str = "") -> int:
    """Send to MLflow what it has not got from a run that is over; returns the number of rows it took.

    Args:
        uri: another MLflow than the run's own; it gets everything.
    Raises:
        ConfigError: if `run_dir` holds no run, or a living one, which delivers by itself.
        Exception: whatever MLflow raises.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise ConfigError(f"RUN ({run_dir}): no {CONFIG_FILE} is there. Name the directory of a run.")
    with lock_run_dir(run_dir):
        config = load_config(run_dir / CONFIG_FILE)
        try:
            state = msgspec.json.decode((run_dir / DELIVERY_FILE).read_bytes(), type=_DeliveryState)
        except FileNotFoundError:
            state = _new_state(config, run_dir, {})
        if uri and uri != state.uri:
            state = msgspec.structs.replace(
                state,
                uri=uri,
                artifact_root=_artifact_root(uri, run_dir),
                run_id="",
                params_sent=False,
                offsets={},
                rows_sent=0,
                artifacts_sent=[],
                end_sent=False,
            )
        if not state.end:  # it was killed before it could say how it ended
            state.end, state.end_time_ms = "KILLED", int(1000 * (run_dir / EVENTS_FILE).stat().st_mtime)
        before = state.rows_sent
        delivery = _MlflowDelivery(run_dir, state, flatten_config(config))
        delivery.deliver([CONFIG_FILE, *_LAST_ARTIFACTS], give_up=threading.Event())
        return state.rows_sent - before


def check_store(config: Config, run_dir: pathlib.Path) -> None:
    """Make a run in the store that a run of this config would use, write a metric, read it back, delete the run.

    Waits for the store, within MLflow's limits of one request each.

    Raises:
        ConfigError: it does not take it, or gives back something else.
    """
    uri = store_uri(config, run_dir)
    remedy = "Start that server, or correct tracking.mlflow_uri. A run would go on without it, and deliver later"
    if uri.startswith("sqlite:///"):
        pathlib.Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    try:
        client = _mlflow_client(uri)
        name = _accepted_name(f"{config.tracking.experiment}-doctor")
        experiment = client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment is not None else client.create_experiment(name)
        run_id = client.create_run(place, run_name="doctor").info.run_id
        try:
            client.log_metric(run_id, "doctor", 1.0)
            found = client.get_run(run_id).data.metrics
        finally:
            client.delete_run(run_id)
    except Exception as error:  # MLflow has many ways to fail
        raise ConfigError(f"tracking.mlflow_uri ({uri}): {_one_line(error)}. {remedy}.") from None
    if found != {"doctor": 1.0}:
        raise ConfigError(f"tracking.mlflow_uri ({uri}): gave back {found} for a metric of 1. {remedy}.")


def store_uri(config: Config, run_dir: pathlib.Path) -> str:
    """`tracking.mlflow_uri`, or a SQLite store in the run directory's parent, shared by the runs in it."""
    uri = config.tracking.mlflow_uri or f"sqlite:///{run_dir.absolute().parent / 'mlflow.db'}"
    scheme, separator, path = uri.partition(":///")
    if scheme == "sqlite" and separator:  # the same file, wherever `streamrl deliver` is called later
        return f"sqlite:///{pathlib.Path(path).absolute()}"
    return uri


def _artifact_root(uri: str, run_dir: pathlib.Path) -> str:
    """A server knows where its artifacts go (empty); a plain database does not."""
    if not uri.startswith(("sqlite", "postgresql", "mysql", "mssql")):
        return ""
    return (run_dir.absolute().parent / "mlartifacts").as_uri()


def _accepted_name(name: str) -> str:
    """MLflow refuses a whole request for one name with another character, and would do so for ever."""
    return re.sub(r"[^\w/. :-]", "_", name, flags=re.ASCII)


def _new_state(config: Config, run_dir: pathlib.Path, tags: Mapping[str, str]) -> _DeliveryState:
    uri = store_uri(config, run_dir)
    return _DeliveryState(
        uri=uri,
        experiment=config.tracking.experiment,
        artifact_root=_artifact_root(uri, run_dir),
        run_name=config.run.name,
        run_key=uuid.uuid4().hex,
        tags={
            "streamrl.run_dir": str(run_dir.absolute()),
            "streamrl.version": importlib.metadata.version("streamrl"),
            "streamrl.host": socket.gethostname(),
            **tags,
        },
        start_time_ms=int(1000 * time.time()),
    )


def _server_for(config: Config, run_dir: pathlib.Path) -> MlflowServer:
    uri = store_uri(config, run_dir)
    return MlflowServer(
        uri,
        artifact_root=_artifact_root(uri, run_dir),
        port=config.tracking.mlflow_ui_port,
        log_path=run_dir / LOGS_DIR / "mlflow-server.log",
    )


def _mlflow_client(uri: str) -> Any:
    # Read by mlflow when it is imported and at each request. Its own defaults retry for minutes inside one call.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_TIMEOUT_S))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what they say would break the live view
    return MlflowClient(tracking_uri=uri)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
