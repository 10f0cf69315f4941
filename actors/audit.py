"""Re-adds a run's books: the ledger against the journal, against every step's metrics, and against the learner's books.

Two processes keep books of their own: the buffer (ledger, journal) and the learner (what it trained on, in the metrics
of its steps). They must agree. Reads files only, so it works on a run that is going on, has ended or was killed; only
the journal cannot be read while a buffer has it open.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.run_view import ledger_line, read_status
from buffers.books import has_journal, read_books
from streamrl.config import Config, load_config
from streamrl.records import BufferStats
from streamrl.run_directory import (
    CONFIG_FILE,
    EVENTS_FILE,
    JOURNAL_DIR,
    LEDGER_FILE,
    METRICS_FILE,
    is_alive,
    read_lines,
)

Steps = Sequence[Mapping[str, Any]]

_DISCARDED = "buffer/discarded/"
_OF_BOTH = (
    *("issued", "in_flight", "buffered", "trained", "discarded", "inserted_rollouts", "duplicate_rollouts"),
    *("failed_members", "generated_tokens", "generated_rollouts", "response_lengths"),
)


class _LedgerFile(BufferStats, frozen=True, kw_only=True):
    """`final` is false if the buffer was dead at the end of the run, and this is its last status."""

    final: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about the books. Example: Finding(True, "trained 960 groups = 60 steps x 16")."""

    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok    ' if self.ok else 'WRONG '} {self.text}"


@dataclass(frozen=True, slots=True)
class Audit:
    """All findings; the run is sound if all are ok. `stats` is the ledger that was checked."""

    findings: list[Finding]
    stats: BufferStats | None

    @property
    def sound(self) -> bool:
        return all(finding.ok for finding in self.findings)


def audit_run(run_dir: pathlib.Path) -> Audit:
    """Every check of the books."""
    config = load_config(run_dir / CONFIG_FILE)
    alive = is_alive(run_dir)
    journal, journal_finding = (None, None) if alive else _read_journal(config, run_dir)
    ledger, source = _read_ledger(run_dir)
    final = isinstance(ledger, _LedgerFile) and ledger.final
    stats = ledger if final or journal is None else journal
    if stats is None:
        text = "no ledger yet: the run is starting" if alive else f"no {LEDGER_FILE} and no status: lost"
        return Audit([Finding(alive, text)], None)
    steps = [record for record, _ in read_lines(run_dir / METRICS_FILE)]
    findings = [*_check_balance(stats, "the journal" if stats is journal else source)]
    findings += _check_steps(steps, max_staleness=config.buffer.max_staleness)
    findings += _check_counts_of_steps(steps, stats, groups_per_step=config.learner.groups_per_step)
    if alive:
        return Audit(findings, stats)
    if journal_finding is not None:
        findings.append(journal_finding)
    findings += _check_end(stats, final=final, journal=journal)
    end = next((e for e, _ in read_lines(run_dir / EVENTS_FILE) if e.get("kind") == "end"), {})
    version = int(end.get("policy_version", len(steps)))
    if not final and journal is not None:
        version = max(version, journal.policy_version)
    findings += _check_learner(config, stats, steps, version=version, final=final)
    return Audit(findings, stats)


def length_table(stats: BufferStats) -> list[str]:
    """Lengths of the responses by fate, side by side: share of the rollouts of that fate in each range of lengths.

    A length bias shows as columns that differ: `discarded` heavier in the long rows means that long responses are lost
    more often than short ones.
    """
    lengths = {fate: dict(stats.response_lengths.get(fate, {})) for fate in ("trained", "buffered", "discarded")}
    lengths["generated"] = {}
    for counts in list(lengths.values())[:3]:
        for bucket, count in counts.items():
            lengths["generated"][bucket] = lengths["generated"].get(bucket, 0) + count
    totals = {fate: sum(counts.values()) for fate, counts in lengths.items()}
    if not totals["generated"]:
        return []
    tokens = {**stats.generated_tokens, "generated": sum(stats.generated_tokens.values())}

    def row(name: str, cells: Mapping[str, str]) -> str:
        return f"{name:>16}" + "".join(f"{cells[fate]:>12}" for fate in lengths)

    lines = [row("response tokens", {fate: fate for fate in lengths})]
    for bucket in sorted(bucket for bucket, count in lengths["generated"].items() if count):
        low = bucket // 2 + 1
        lines.append(
            row(
                str(bucket) if low >= bucket else f"{low}-{bucket}",
                {f: f"{100 * lengths[f].get(bucket, 0) / totals[f]:.1f}%" if totals[f] else "-" for f in lengths},
            )
        )
    means = {f: f"{tokens.get(f, 0) / totals[f]:.1f}" if totals[f] else "-" for f in lengths}
    return [*lines, row("mean", means), row("rollouts", {fate: str(total) for fate, total in totals.items()})]


def _check_balance(stats: BufferStats, source: str) -> Iterator[Finding]:
    total = stats.in_flight + stats.buffered + stats.trained + sum(stats.discarded.values())
    yield Finding(total == stats.issued, f"{ledger_line(stats)} ({source})")
    counts = [stats.issued, stats.in_flight, stats.buffered, stats.trained, *stats.discarded.values()]
    yield Finding(min(counts) >= 0, "no count is negative")
    by_length = {fate: sum(counts.values()) for fate, counts in stats.response_lengths.items()}
    generated = {fate: stats.generated_rollouts.get(fate, 0) for fate in by_length}
    yield Finding(by_length == generated, "every rollout that arrived has a length and a fate")


def _check_steps(steps: Steps, *, max_staleness: int) -> Iterator[Finding]:
    numbers = [int(s["step"]) for s in steps if "step" in s]
    if not numbers:
        yield Finding(True, "no optimizer step yet")
        return
    gaps = [a for a, b in itertools.pairwise(numbers) if b != a + 1]
    worst = max(float(s.get("offpolicy/staleness/max") or 0.0) for s in steps)
    yield Finding(
        not gaps and numbers[0] == 1,
        f"metrics of every step from {numbers[0]} to {numbers[-1]}" + (f", with a gap after {gaps[0]}" if gaps else ""),
    )
    yield Finding(worst <= max_staleness, f"largest staleness trained on: {worst:.0f}, allowed: {max_staleness}")


def _check_counts_of_steps(steps: Steps, stats: BufferStats, *, groups_per_step: int) -> Iterator[Finding]:
    """The buffer's counts in the metrics: each row must balance, and nothing that was counted may vanish later."""
    states = ("buffer/in_flight", "buffer/groups", "buffer/trained")
    rows = [step for step in steps if all(step.get(name) is not None for name in ("buffer/issued", *states))]
    unbalanced = [
        int(step["step"])
        for step in rows
        if step["buffer/issued"] != sum(n for name, n in step.items() if name in states or name.startswith(_DISCARDED))
    ]
    if rows:
        but = f", but not in those of step {unbalanced[0]}" if unbalanced else ""
        yield Finding(not unbalanced, f"the ledger balances in the metrics of {len(rows)} steps{but}")
    now = {"buffer/issued": stats.issued, "buffer/trained": stats.trained}
    now |= {_DISCARDED + reason: count for reason, count in stats.discarded.items()}
    for name in sorted({name for step in steps for name in step if name in now or name.startswith(_DISCARDED)}):
        seen, there = max(int(step.get(name) or 0) for step in steps), now.get(name, 0)
        undone = groups_per_step if name == "buffer/trained" else 0  # the batch of a step that was not finished
        if seen > there + undone:
            yield Finding(False, f"no step saw more groups {name.removeprefix('buffer/')} ({seen}) than there are")


def _check_end(stats: BufferStats, *, final: bool, journal: BufferStats | None) -> Iterator[Finding]:
    if final:
        yield Finding(True, "the run wrote its final ledger")
        yield Finding(stats.in_flight == 0, f"nothing is in flight after the end ({stats.in_flight})")
    elif journal is None:
        yield Finding(False, "the run wrote its final ledger (buffer.journal=async would make up for it)")
    else:
        yield Finding(True, f"the buffer died before the end, with {stats.in_flight} groups in flight")
    if final and journal is not None:
        differing = [name for name in _OF_BOTH if _counted(getattr(stats, name)) != _counted(getattr(journal, name))]
        but = "".join(f"; {name} {getattr(stats, name)} but {getattr(journal, name)}" for name in differing)
        rollouts = sum(journal.generated_rollouts.values())
        yield Finding(
            not differing,
            f"{journal.issued} uids and {rollouts} rollouts, counted in the journal, are those of the ledger{but}",
        )


def _counted(count: Any) -> Any:
    """Without what is 0, which may be written or left out."""
    return {k: n for k, v in count.items() if (n := _counted(v))} if isinstance(count, dict) else count


def _check_learner(config: Config, stats: BufferStats, steps: Steps, *, version: int, final: bool) -> Iterator[Finding]:
    """What the buffer handed out is what the learner trained on, but for one batch if the end was not a good one."""
    per_step, reuse = config.learner.groups_per_step, config.buffer.max_times_sampled
    sampled = version * per_step
    yield Finding(
        sampled <= reuse * stats.trained and stats.trained <= sampled + (0 if final else per_step),
        f"trained {stats.trained} groups{f' up to {reuse} times each' if reuse > 1 else ''}; "
        f"{version} optimizer steps of {per_step} groups are {sampled}",
    )
    if reuse > 1 or any("learner/rollouts" not in step for step in steps):
        return
    rollouts, tokens = (int(sum(s[f"learner/{name}"] for s in steps)) for name in ("rollouts", "response_tokens"))
    out, out_tokens = stats.generated_rollouts.get("trained", 0), stats.generated_tokens.get("trained", 0)
    all_steps = final and version == len(steps)  # a run that was interrupted may lack the records of its last steps
    # A greedy response goes out with its group and is not trained on, so its tokens are known to the buffer only.
    baselines = stats.trained if config.algorithm.has_baseline else 0
    exact = tokens < out_tokens if baselines else tokens == out_tokens
    yield Finding(
        rollouts + baselines == out and exact if all_steps else rollouts <= out and tokens <= out_tokens,
        f"the learner trained on {rollouts} rollouts of {tokens} response tokens in {len(steps)} steps; "
        f"the buffer handed out {out} of {out_tokens}"
        + (f", {baselines} greedy ones among them" if baselines else "")
        + ("" if all_steps else f" in {version} or more"),
    )


def _read_journal(config: Config, run_dir: pathlib.Path) -> tuple[BufferStats | None, Finding | None]:
    path = run_dir / JOURNAL_DIR
    if config.buffer.journal == "off" or not has_journal(path):
        return None, None
    try:
        return read_books(path, group_size=config.algorithm.num_members), None
    except ValueError as error:
        return None, Finding(False, f"the journal cannot be read: {error}")


def _read_ledger(run_dir: pathlib.Path) -> tuple[BufferStats | None, str]:
    try:
        return msgspec.json.decode((run_dir / LEDGER_FILE).read_bytes(), type=_LedgerFile), LEDGER_FILE
    except FileNotFoundError:
        pass
    snapshot = read_status(run_dir)
    return (snapshot.buffer, "the last status") if snapshot is not None else (None, "")
