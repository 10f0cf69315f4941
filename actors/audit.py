"""Re-adds a run's books: the ledger against itself, against the metrics of every step, and against the run's end.

Reads files only, so it works on a run that is going on, has ended or was killed.
"""

from __future__ import annotations

import itertools
import pathlib
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.run_view import ledger_line, read_status
from streamrl.config import load_config
from streamrl.records import BufferStats
from streamrl.run_directory import CONFIG_FILE, EVENTS_FILE, LEDGER_FILE, METRICS_FILE, is_alive, read_lines


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about the books. Example: Finding(True, "trained 960 groups = 60 steps x 16")."""

    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok    ' if self.ok else 'WRONG '} {self.text}"


def audit_run(run_dir: pathlib.Path) -> list[Finding]:
    """Every check of the books; the run is sound if all are ok."""
    config = load_config(run_dir / CONFIG_FILE)
    alive = is_alive(run_dir)
    stats, source = _read_ledger(run_dir)
    if stats is None:
        return [
            Finding(alive, "no ledger yet: the run is starting" if alive else f"no {LEDGER_FILE} and no status: lost")
        ]
    total = stats.in_flight + stats.buffered + stats.trained + sum(stats.discarded.values())
    counts = [stats.issued, stats.in_flight, stats.buffered, stats.trained, *stats.discarded.values()]
    findings = [
        Finding(total == stats.issued, f"{ledger_line(stats)} ({source})"),
        Finding(min(counts) >= 0, "no count is negative"),
    ]
    steps = [record for record, _ in read_lines(run_dir / METRICS_FILE)]
    findings += _check_steps(steps, max_staleness=config.buffer.max_staleness)
    end = next((e for e, _ in read_lines(run_dir / EVENTS_FILE) if e.get("kind") == "end"), None)
    if alive:
        return findings
    findings.append(Finding(source == LEDGER_FILE, "the run wrote its final ledger"))
    if source != LEDGER_FILE:
        return findings
    findings.append(Finding(stats.in_flight == 0, f"nothing is in flight after the end ({stats.in_flight})"))
    version = int(end["policy_version"]) if end is not None and "policy_version" in end else len(steps)
    per_step = config.learner.groups_per_step
    sampled, reuse = version * per_step, config.buffer.max_times_sampled
    findings.append(
        Finding(
            sampled <= reuse * stats.trained and stats.trained <= sampled,
            f"trained {stats.trained} groups{f' up to {reuse} times each' if reuse > 1 else ''}; "
            f"{version} optimizer steps of {per_step} groups are {sampled}",
        )
    )
    recorded = [int(s["buffer/trained"]) for s in steps if s.get("buffer/trained") is not None]
    if recorded:
        findings.append(
            Finding(max(recorded) <= stats.trained, f"no step saw more groups trained ({max(recorded)}) than there are")
        )
    return findings


def _check_steps(steps: list[dict[str, Any]], *, max_staleness: int) -> list[Finding]:
    numbers = [int(s["step"]) for s in steps if "step" in s]
    if not numbers:
        return [Finding(True, "no optimizer step yet")]
    gaps = [a for a, b in itertools.pairwise(numbers) if b != a + 1]
    worst = max(float(s.get("offpolicy/staleness/max") or 0.0) for s in steps)
    return [
        Finding(
            not gaps and numbers[0] == 1,
            f"metrics of every step from {numbers[0]} to {numbers[-1]}"
            + (f", with a gap after {gaps[0]}" if gaps else ""),
        ),
        Finding(worst <= max_staleness, f"largest staleness trained on: {worst:.0f}, allowed: {max_staleness}"),
    ]


def _read_ledger(run_dir: pathlib.Path) -> tuple[BufferStats | None, str]:
    try:
        return msgspec.json.decode((run_dir / LEDGER_FILE).read_bytes(), type=BufferStats), LEDGER_FILE
    except FileNotFoundError:
        pass
    snapshot = read_status(run_dir)
    return (snapshot.buffer, "the last status") if snapshot is not None else (None, "")
