"""The whole stream in processes of its own, SIGKILLed at random: everything is accounted for exactly once.

The processes run the real server, clients, journal and sockets (tests/stand_ins.py); only the model is missing.
"""

from __future__ import annotations

import json
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import stand_ins

NUM_KILLS = 100


class Fleet:
    """One buffer process, three generators, one learner; each is started again when it was killed."""

    def __init__(self, folder: pathlib.Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.checkpoint = folder / "checkpoint.json"
        self.checkpoint.write_text(json.dumps({"version": 0, "trained": {}}))
        checkpoint = str(self.checkpoint)
        self.log = folder / "log"
        self.arguments = {
            "server": ["server", address, str(folder / "journal"), checkpoint],
            "learner": ["learner", address, checkpoint],
            **{f"generator-{i}": ["generator", address, f"generator-{i}", checkpoint] for i in range(3)},
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> None:
        with self.log.open("a") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, stand_ins.__file__, *self.arguments[name]],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.checkpoint.read_text())
        return state

    def wait_for_steps(self, count: int) -> None:
        """Until the learner is so many steps further; any process that ended by itself fails the test."""
        version = self.state()["version"] + count
        deadline = time.monotonic() + 60
        while self.state()["version"] < version:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended, (ended, self.log.read_text())
            assert time.monotonic() < deadline, "the stream stands still"
            time.sleep(0.005)

    def stop_learner(self) -> None:
        pathlib.Path(f"{self.checkpoint}.stop").touch()
        assert self.processes["learner"].wait(timeout=20) == 0, self.log.read_text()

    def stop_server(self) -> dict[str, Any]:
        """The final ledger."""
        server = self.processes["server"]
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=20)
        ledger: dict[str, Any] = json.loads(output)
        return ledger

    def end(self) -> None:
        for name in self.processes:
            self.kill(name)


@pytest.mark.timeout(60 + 10 * NUM_KILLS)
def test_any_process_may_be_killed_at_any_moment_and_every_uid_is_accounted_for_exactly_once(
    tmp_path: pathlib.Path,
) -> None:
    rng = random.Random(7)
    fleet = Fleet(tmp_path)
    names = list(fleet.arguments)
    try:
        for name in names:
            fleet.start(name)
        for _ in range(NUM_KILLS):
            fleet.wait_for_steps(rng.randint(1, 5))
            time.sleep(rng.uniform(0.0, 0.05))
            name = rng.choice(names)
            fleet.kill(name)
            fleet.start(name)
        fleet.wait_for_steps(2)
        fleet.stop_learner()
        ledger = fleet.stop_server()
    finally:
        fleet.end()
    steps = fleet.state()["trained"]
    trained = [uid for uids in steps.values() for uid in uids]
    assert [int(version) for version in steps] == list(range(len(steps)))
    assert all(len(uids) == 4 for uids in steps.values())
    assert len(set(trained)) == len(trained) == ledger["trained"]
    assert ledger["in_flight"] == 0
    assert ledger["issued"] == ledger["trained"] + ledger["buffered"] + sum(ledger["discarded"].values())
    assert set(ledger["discarded"]) <= {"stale", "straggler", "failed", "end_of_run"}
    assert ledger["trained"] > 0.7 * (ledger["issued"] - ledger["discarded"].get("end_of_run", 0))
