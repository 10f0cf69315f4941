"""Fixtures shared by the tests: a real run of `streamrl launch` as a subprocess, and the base model's cache."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


class LaunchedRun:
    """One `streamrl launch` in a process group of its own, as a shell would start it."""

    def __init__(self, run_dir: pathlib.Path, *arguments: str, config: pathlib.Path = QUICKSTART) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "actors.cli", "launch", "--config", str(config), "--run-dir", str(run_dir)]
        self.output = run_dir.with_suffix(".out")
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if event["kind"] == kind]

    def wait_until(self, what: str, reached: Callable[[], bool], *, timeout_s: float) -> None:
        """Look at the run's files until `reached`; fails at the deadline, or when the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                pytest.fail(f"no {what} within {timeout_s} s:\n{self.tail()}")
            time.sleep(0.1)

    def wait_for_events(self, kind: str, *, count: int = 1, timeout_s: float) -> None:
        self.wait_until(f"{count} x event {kind!r}", lambda: len(self.events(kind)) >= count, timeout_s=timeout_s)

    def wait_for_step(self, step: int, *, timeout_s: float) -> None:
        self.wait_until(f"step {step}", lambda: len(self.lines("metrics.jsonl")) >= step, timeout_s=timeout_s)

    def wait(self, *, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {timeout_s} s:\n{self.tail()}")

    def interrupt(self, signum: int = signal.SIGINT) -> None:
        """Ctrl-C reaches the whole foreground process group."""
        os.killpg(self.process.pid, signum)

    def pid_of(self, process: str) -> int:
        return next(int(e["pid"]) for e in self.events("start") if e["process"] == process)

    def last_line(self) -> str:
        return self.output.read_text(errors="replace").strip().splitlines()[-1]

    def tail(self, lines: int = 40) -> str:
        text = "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])
        logs = sorted((self.run_dir / "logs").glob("*.log")) if (self.run_dir / "logs").exists() else []
        return text + "".join(
            f"\n--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs
        )

    def ledger(self) -> dict[str, Any]:
        ledger: dict[str, Any] = json.loads((self.run_dir / "ledger.json").read_text())
        return ledger

    def family(self) -> list[psutil.Process]:
        """Every process the run has started so far, however deep."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def segments(self) -> list[str]:
        """Shared memory of this run that is there now."""
        return [path.name for path in pathlib.Path("/dev/shm").glob(f"*{self.run_dir.name}-{self.process.pid}-*")]

    def kill(self) -> None:
        if self.process.poll() is None:
            family = self.family()
            self.process.kill()
            self.process.wait(10)
            for child in family:
                if child.is_running():
                    child.kill()


def still_running(family: list[psutil.Process]) -> list[str]:
    """Those of `family` that are not gone, with their command lines."""
    alive = []
    for process in family:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(f"{process.pid}: {' '.join(process.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return alive


def own_address() -> str:
    """An IPv4 address of this machine that other hosts could reach; skips the test where there is none."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has a loopback interface only")


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Base models made by the tests: made once a session, or kept where STREAMRL_TEST_CACHE says."""
    kept = os.environ.get("STREAMRL_TEST_CACHE")
    return pathlib.Path(kept) if kept else tmp_path_factory.mktemp("models")


@pytest.fixture
def small_run(tmp_path: pathlib.Path, model_cache: pathlib.Path) -> Iterator[Any]:
    """Start runs with one generator and a base model that is barely warmed up: for tests of how runs end."""
    runs: list[LaunchedRun] = []

    def start(*arguments: str) -> LaunchedRun:
        overrides = [
            f"model.cache_dir={model_cache}",
            "model.warm_up.steps=3",
            "eval.num_prompts=0",
            f"tracking.mlflow_uri=sqlite:///{tmp_path}/mlflow.db",
        ]
        runs.append(LaunchedRun(tmp_path / f"run{len(runs)}", "--generators", "1", *overrides, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
