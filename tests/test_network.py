"""Runs that other hosts can reach: only who holds the run's keys is let in, and everybody else is counted."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import time
from typing import Any

import msgspec
import psutil
import pytest
from conftest import LaunchedRun, own_address

from actors.audit import audit_run
from actors.plan import make_plan
from streamrl.config import load_config
from streamrl.errors import ConfigError, StreamrlError
from streamrl.run_directory import STATUS_FILE
from streamrl.transport import Connection, CurveKeys

READY_S = 200.0


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "", "localhost", "::1", "224.0.0.1", "10.0.0.1:80"])
def test_a_host_that_is_not_one_ipv4_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"network.host .* Set network.host=127.0.0.1"):
        load_config(None, [f"network.host={host}"])


def test_an_address_of_another_machine_is_refused_before_anything_starts(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"network.host \(198.51.100.7\): no socket can listen there"):
        make_plan(load_config(None, ["network.host=198.51.100.7"]), tmp_path / "run", quick=True)


def listening_addresses(pid: int, host: str) -> list[str]:
    connections = psutil.Process(pid).net_connections(kind="tcp4")
    ports = [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.ip == host]
    return [f"tcp://{host}:{port}" for port in ports]


async def knock(addresses: list[str]) -> None:
    other_run = CurveKeys.make(listeners=["buffer"], others=["generator-0"])
    for address in addresses:
        for keys in (other_run["generator-0"], None):
            with pytest.raises(StreamrlError):
                await Connection(address, name="generator-0", curve=keys).connect(timeout_s=0.5)


def refused(run: LaunchedRun) -> tuple[int, int]:
    """By the buffer and by the learner's weight channel."""
    status = msgspec.json.decode((run.run_dir / STATUS_FILE).read_bytes())
    return status["buffer"]["refused_peers"], status["learner"]["refused_peers"]


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_run_on_a_network_lets_in_its_own_processes_and_counts_strangers(small_run: Any) -> None:
    host = own_address()
    run = small_run("--max-steps", "100000", f"network.host={host}", "buffer.journal=async")
    run.wait_for_step(2, timeout_s=READY_S)
    assert refused(run) == (0, 0)
    buffer, learner = (listening_addresses(run.pid_of(name), host) for name in ("buffer", "learner-0"))
    assert buffer and learner
    asyncio.run(knock([*buffer, *learner]))
    steps = len(run.lines("metrics.jsonl"))
    deadline = time.monotonic() + 30
    while min(refused(run)) == 0:
        assert time.monotonic() < deadline, refused(run)
        time.sleep(0.2)
    run.wait_for_step(steps + 2, timeout_s=60)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(timeout_s=30) == 0, run.tail()
    assert run.ledger()["refused_peers"] >= 2
    audit = audit_run(run.run_dir)
    assert audit.sound, [str(finding) for finding in audit.findings]
    assert any("counted in the journal, are those of the ledger" in finding.text for finding in audit.findings)
