"""`mlflow server` beside a run: a child process group on loopback, health-checked, gone when the run is.

It may serve a database that the run itself writes; it is there for the person who watches.

Invariants: it binds 127.0.0.1 only; it outlives neither `stop` nor the death of this process by SIGKILL, because a
shell holds the read end of a pipe whose write end is ours, and ends the process group when the pipe closes.

Waits: `start` for the first healthy answer (ended by the server, by its death, by `stop` or by `timeout_s`); `stop` for
the exit of the group (ended by SIGTERM, after a limit by SIGKILL).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

import psutil

from streamrl.errors import ClosedError, ConfigError, DeadlineExceededError, ProcessDiedError

_HOST = "127.0.0.1"
# The group ends when the server does, and when our end of the pipe closes.
_GUARD = '("$@"; kill -TERM 0) & read -r _; trap "" TERM; kill -TERM 0; wait'
_TERM_TIMEOUT_S = 2.0  # for uvicorn's own shutdown
_KILL_TIMEOUT_S = 3.0  # for the kernel's


class MlflowServer:
    """One `mlflow server`.

    Example: server = MlflowServer("sqlite:////runs/mlflow.db", artifact_root="file:///runs/mlartifacts", port=0,
    log_path=run_dir / "logs/mlflow-server.log"); server.start(timeout_s=60.0); server.url == "http://127.0.0.1:43215".
    """

    def __init__(self, backend_uri: str, *, artifact_root: str, port: int, log_path: pathlib.Path) -> None:
        self._backend_uri = backend_uri
        self._artifact_root = artifact_root
        self._port = port
        self._log_path = log_path
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()  # `stop` may come from another thread while `start` waits
        self.healthy = False

    @property
    def url(self) -> str:
        """Empty before `start`."""
        return f"http://{_HOST}:{self._port}" if self._port else ""

    @property
    def pid(self) -> int:
        """Leader of its process group; 0 when it is not running."""
        return self._process.pid if self._process is not None else 0

    def start(self, *, timeout_s: float) -> None:
        """Start it and wait until it answers.

        Raises:
            ProcessDiedError: it ended first; the message has the end of its log.
            DeadlineExceededError: it did not answer within `timeout_s`.
            ClosedError: `stop` was called.
        """
        process = self._spawn()
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if self._stopped:
                raise ClosedError("mlflow server was stopped while it started")
            if process.poll() is not None:
                raise ProcessDiedError(
                    f"mlflow server ended while it started: {self._last_line()} (see {self._log_path})"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise DeadlineExceededError(
                    f"mlflow server at {self.url} did not answer within {timeout_s:g} s (see {self._log_path})"
                )
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
        self.healthy = True

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._port = self._port or _free_port()
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            _HOST,
            "--port",
            str(self._port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", self._backend_uri, "--default-artifact-root", self._artifact_root]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self._log_path, "ab")
        with self._lock:
            if self._stopped:
                raise ClosedError("mlflow server was stopped before it started")
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
            return self._process

    def stop(self) -> None:
        """End the whole process group; at most a few seconds. Does nothing if it is not running."""
        with self._lock:
            self._stopped, self.healthy = True, False
            process, self._process = self._process, None
        if process is None:
            return
        family = _family(process.pid)
        assert process.stdin is not None
        process.stdin.close()  # the guard ends the group
        _, alive = psutil.wait_procs(family, timeout=_TERM_TIMEOUT_S)
        if alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            psutil.wait_procs(alive, timeout=_KILL_TIMEOUT_S)
        process.wait()
        if self._log is not None:
            self._log.close()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _last_line(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def check_port_free(port: int) -> None:
    """Refuse a port that something listens on; 0 stands for any free one.

    Raises:
        ConfigError: naming the port and the remedy.
    """
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"tracking.mlflow_ui_port ({port}): cannot be used on {_HOST}: {error.strerror}. "
                "Set another, or 0 for a free one."
            ) from None


def _family(pid: int) -> list[psutil.Process]:
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
