"""What a person watches: a live terminal panel, or one plain line per optimizer step when the output is no terminal.

Invariants: it only reads what it is given and never waits; every look is also written to `status.json` for
`streamrl status`; the last lines of a run say how it ended, whatever the output is.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from actors.run_view import RunView, Snapshot, ledger_line, write_status
from streamrl.config import Config

if TYPE_CHECKING:
    from actors.controller import Outcome

__all__ = ["LiveView", "RunView", "show_progress"]

STATUS_FILE_INTERVAL_S = 1.0
_BARS = " .:-=+*#"
_BARS_UNICODE = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SPARK_WIDTH = 48


class Addresses(Protocol):
    """What the view wants to know of the tracker."""

    @property
    def run_url(self) -> str: ...

    @property
    def viewing_command(self) -> str: ...

    @property
    def problem(self) -> str: ...


class LiveView:
    """The display of one run, used by the driver.

    Example::

        view = LiveView(config, run_dir, tracker)
        with view:
            view.phase("starting processes")
            view.update(run_view)  # at every status and every optimizer step
        view.close(outcome)  # the summary
    """

    def __init__(
        self, config: Config, run_dir: pathlib.Path, tracker: Addresses, *, console: Console | None = None
    ) -> None:
        self._run_dir = run_dir
        self._tracker = tracker
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._live = (
            Live(console=self._console, refresh_per_second=4, transient=True)
            if config.tracking.live_view and self._console.is_terminal
            else None
        )
        self._view = RunView(config=config, started=time.time())
        self._phase = "starting"
        self._printed_step = 0
        self._printed_evals = 0
        self._printed_url = self._printed_problem = ""
        self._notes: list[str] = []
        self._status_due = 0.0

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """The run has come to a new phase, or a process is ready: shown, and in plain output a line of its own."""
        self._phase = text
        if self._live is None:
            self._print(text)
        self._show(self._snapshot())

    def note(self, text: str) -> None:
        """A line that the user should not miss: printed now and again under the summary."""
        self._notes.append(text)
        self._print(text)

    def update(self, view: RunView) -> None:
        """Show the newest state of the run."""
        self._view = view
        snapshot = self._snapshot()
        if self._live is None:
            if len(snapshot.evals) > self._printed_evals:
                self._printed_evals = len(snapshot.evals)
                step, reward = snapshot.evals[-1]
                self._print(f"held-out reward {reward:.3f} at step {step}")
            if snapshot.step > self._printed_step:
                self._printed_step = snapshot.step
                self._print(step_line(snapshot))
        if snapshot.run_url and snapshot.run_url != self._printed_url:
            self._printed_url = snapshot.run_url
            self._print(f"MLflow run: {snapshot.run_url}")
        if snapshot.mlflow_problem != self._printed_problem:
            self._printed_problem = snapshot.mlflow_problem
            self._print(
                f"metrics are not taken at the moment, training goes on: {snapshot.mlflow_problem}"
                if snapshot.mlflow_problem
                else "metrics are taken again"
            )
        self._show(snapshot)

    def close(self, outcome: Outcome) -> None:
        """Print the summary and write the last `status.json`."""
        self._phase = "done" if outcome.exit_code == 0 else f"ended: {outcome.reason}"
        snapshot = self._snapshot()
        with contextlib.suppress(OSError):
            write_status(self._run_dir, snapshot)
        for text in (summary(snapshot, outcome), *self._notes):
            self._print(text)
        if not snapshot.run_url and self._tracker.viewing_command:
            self._print(f"mlflow   {self._tracker.viewing_command}")

    def _snapshot(self) -> Snapshot:
        tracker = self._tracker
        return self._view.snapshot(
            run_dir=self._run_dir, phase=self._phase, run_url=tracker.run_url, mlflow_problem=tracker.problem
        )

    def _show(self, snapshot: Snapshot) -> None:
        if self._live is not None:
            # Room for the ^C that a terminal echoes: it would make a new line, and a line of the panel would stay.
            self._live.update(Padding(render(snapshot), (0, 3, 0, 0)))
        if time.monotonic() >= self._status_due:
            self._status_due = time.monotonic() + STATUS_FILE_INTERVAL_S
            with contextlib.suppress(OSError):  # a full disk is the tracker's to report
                write_status(self._run_dir, snapshot)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)


def step_line(s: Snapshot) -> str:
    """`step 12/200  reward 0.530  staleness 1.20 max 3/4  generators 8,123 tok/s 97% busy  learner ...`."""
    parts = [f"step {s.step}/{s.max_steps}"]
    if (reward := s.metrics.get("rollout/reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (mean := s.metrics.get("offpolicy/staleness/mean")) is not None:
        maximum = s.metrics.get("offpolicy/staleness/max") or 0.0
        parts.append(f"staleness {mean:.2f} max {maximum:.0f}/{s.max_staleness}")
    if s.generator_busy is not None:
        parts.append(f"generators {_side(s.generator_tokens_per_s, s.generator_busy)}")
    if s.learner_busy is not None:
        parts.append(f"learner {_side(s.learner_tokens_per_s, s.learner_busy)}")
    if (loss := s.metrics.get("learner/loss")) is not None:
        parts.append(f"loss {loss:+.4f}")
    if (sync := s.metrics.get("weight_sync/total_s")) is not None:
        parts.append(f"sync {1000 * sync:.0f} ms")
    return "  ".join(parts)


def summary(s: Snapshot, outcome: Outcome) -> str:
    """The last lines of a run: which side was the slower, rewards, ledger, where the files are."""
    lines = [f"{s.step} optimizer steps in {_duration(s.time - s.started)}"]
    if outcome.reason and outcome.exit_code not in (1, 2):  # those are said on the last line
        lines[0] += f", {outcome.reason}"
    if outcome.learner_busy or outcome.generator_busy:
        slower = "generators" if outcome.generator_busy >= outcome.learner_busy else "learner"
        lines.append(
            f"slower   {slower}: after the first ten steps the generators were busy "
            f"{_percent(outcome.generator_busy)} of the time, the learner {_percent(outcome.learner_busy)}"
        )
    if s.evals:
        (first, before), (last, after) = s.evals[0], s.evals[-1]
        lines.append(f"reward   held-out {before:.3f} at step {first} -> {after:.3f} at step {last}")
    if s.rewards:
        lines.append(f"reward   training {s.rewards[0]:.3f} -> {s.rewards[-1]:.3f}")
    lines.append(f"ledger   {ledger_line(outcome.ledger)}")
    lines.append(f"files    {s.run_dir}")
    if s.run_url:
        lines.append(f"mlflow   {s.run_url}")
    return "\n".join(lines)


def render(s: Snapshot, *, unicode: bool = True) -> RenderableType:
    """The panel of one look; also what `streamrl status` prints."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    reward = Text("-")
    if s.rewards:
        reward = Text(f"{s.rewards[-1]:.3f}  {sparkline(s.rewards, unicode=unicode)}")
    facts.add_row("reward", reward)
    if s.evals:
        (first, before), (last, after) = s.evals[0], s.evals[-1]
        text = f"{after:.3f} at step {last}" + (f" (was {before:.3f} at step {first})" if last != first else "")
        facts.add_row("held-out", Text(text, style="green"))
    if (mean := s.metrics.get("offpolicy/staleness/mean")) is not None:
        maximum = s.metrics.get("offpolicy/staleness/max") or 0.0
        facts.add_row("staleness", f"mean {mean:.2f}  max {maximum:.0f} of S = {s.max_staleness}")
    if s.generator_busy is not None:
        facts.add_row("generators", _side(s.generator_tokens_per_s, s.generator_busy))
    if s.learner_busy is not None and s.learner is not None:
        facts.add_row("learner", f"{_side(s.learner_tokens_per_s, s.learner_busy)}  ({s.learner.phase})")
    syncs = [g.last_sync for g in s.generators if g.last_sync is not None]
    if syncs:
        pause, total = max(x.pause_s for x in syncs), max(x.total_s for x in syncs)
        facts.add_row("weight sync", f"pause {1000 * pause:.0f} ms  published to proven {1000 * total:.0f} ms")
    for number, wait in enumerate(s.waits[:3]):
        since = max(0.0, s.time - wait.since)
        facts.add_row(
            "" if number else "waits", f"{wait.waiter} for {wait.waiting_for} from {wait.owner} {since:.1f} s"
        )
    if s.buffer.issued:
        facts.add_row("ledger", ledger_line(s.buffer))
    strangers = s.buffer.refused_peers + (s.learner.refused_peers if s.learner is not None else 0)
    if strangers:
        facts.add_row("refused", Text(f"{strangers} connections of strangers", style="yellow"))
    if s.run_url:
        facts.add_row("mlflow", s.run_url)
    parts: list[RenderableType] = [facts]
    if s.generators:
        parts.append(_generator_table(s))
    title = f"{s.name}  {s.phase}  step {s.step}/{s.max_steps}  {_duration(s.time - s.started)}"
    return Panel(Group(*parts), title=Text(title), title_align="left", border_style="cyan")


def sparkline(values: Sequence[float], *, width: int = _SPARK_WIDTH, unicode: bool = True) -> str:
    """A series in one line of bars, averaged down to `width`, from its lowest to its highest value."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, span = min(means), max(means) - min(means)
    bars = _BARS_UNICODE if unicode else _BARS
    return "".join(bars[round((value - low) / span * (len(bars) - 1)) if span else 0] for value in means)


class ProgressBars:
    """Progress of work that happens before the run, as `progress(what, done, total)`; one bar for each `what`."""

    def __init__(self, progress: Progress | None, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._tasks: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._progress is None:
            if what not in self._tasks:
                self._tasks[what] = 0
                self._console.print(f"{what} ({total})", markup=False)
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)  # type: ignore[arg-type]


@contextlib.contextmanager
def show_progress(*, console: Console | None = None) -> Iterator[ProgressBars]:
    """Progress bars while the context lasts; one plain line for each kind of work when the output is no terminal."""
    console = console or Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield ProgressBars(None, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield ProgressBars(progress, console)


def _generator_table(s: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("generator", "version", "running", "tokens/s", "rollouts", "failed", "unacked", "kv"):
        table.add_column(column, justify="left" if column == "generator" else "right")
    newest = s.learner.policy_version if s.learner is not None else s.step
    for g in s.generators:
        behind = f" (-{newest - g.policy_version})" if 0 <= g.policy_version < newest else ""
        table.add_row(
            g.name,
            f"{g.policy_version}{behind}",
            str(g.running),
            f"{s.tokens_per_s[g.name]:,.0f}" if g.name in s.tokens_per_s else "-",
            f"{g.finished_rollouts:,}",
            str(g.failed_members),
            str(g.unacknowledged),
            _percent(g.kv_usage),
        )
    return table


def _side(tokens_per_s: float, busy: float) -> str:
    return f"{tokens_per_s:,.0f} tok/s {_percent(busy)} busy"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
