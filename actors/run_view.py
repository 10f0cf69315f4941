"""What is known about a whole run now: filled by the controller, shown by the live view and by `streamrl status`.

Invariants: `RunView` only keeps what the processes reported; rates and busy shares are worked out here, from totals
over the last seconds, so that every display says the same. A `Snapshot` is plain data, so it is also `status.json`.
"""

from __future__ import annotations

import collections
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from streamrl.config import Config
from streamrl.records import BufferStats, GeneratorStatus, LearnerStatus, Wait
from streamrl.run_directory import STATUS_FILE, write_json

WINDOW_S = 10.0  # rates and busy shares are over this long
KEPT_REWARDS = 4096


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a run, ready to be shown.

    Example: Snapshot(name="quickstart", run_dir="/runs/quickstart-1", phase="training", time=1.8e9, started=1.8e9 - 60,
    step=12, max_steps=200, max_staleness=4, generators=[...], learner=..., buffer=BufferStats(...), metrics={...}).
    """

    name: str
    run_dir: str
    phase: str  # what the run is doing, in a few words
    time: float  # unix time of this look
    started: float  # unix time of the launch
    step: int
    max_steps: int
    max_staleness: int
    generators: list[GeneratorStatus] = []
    learner: LearnerStatus | None = None
    buffer: BufferStats = BufferStats()
    metrics: dict[str, float | None] = {}  # of the newest optimizer step
    generator_tokens_per_s: float = 0.0
    learner_tokens_per_s: float = 0.0
    tokens_per_s: dict[str, float] = {}  # by generator
    generator_busy: float | None = None  # share of the last seconds in [0, 1], mean over generators
    learner_busy: float | None = None
    rewards: list[float] = []  # mean training reward by step, the newest ones
    evals: list[tuple[int, float]] = []  # (step, mean reward on held-out prompts)
    run_url: str = ""
    mlflow_problem: str = ""

    @property
    def waits(self) -> list[Wait]:
        """The wait graph, the longest wait first."""
        waits = [g.wait for g in self.generators if g.wait is not None] + list(self.buffer.waits)
        if self.learner is not None and self.learner.wait is not None:
            waits.append(self.learner.wait)
        return sorted(waits, key=lambda wait: wait.since)


class RunView:
    """The controller's picture of the run.

    Example: view = RunView(config=config, started=time.time()); view.see(buffer=..., learner=..., generators=[...]);
    view.add_step(1, {"rollout/reward/mean": 0.4}); view.generator_tokens_per_s.
    """

    def __init__(self, *, config: Config, started: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.started = started
        self.step = 0
        self.generators: dict[str, GeneratorStatus] = {}
        self.learner = LearnerStatus(rank=0)
        self.buffer = BufferStats()
        self.metrics: dict[str, float] = {}
        self.rewards: collections.deque[float] = collections.deque(maxlen=KEPT_REWARDS)
        self.evals: list[tuple[int, float]] = []
        self._clock = clock
        self._seen: collections.deque[tuple[float, dict[str, GeneratorStatus], LearnerStatus]] = collections.deque()

    def see(self, *, buffer: BufferStats, learner: LearnerStatus, generators: Sequence[GeneratorStatus]) -> None:
        """The newest status of every process."""
        self.buffer, self.learner = buffer, learner
        self.generators = {g.name: g for g in generators}
        now = self._clock()
        self._seen.append((now, self.generators, learner))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimizer step was done."""
        self.step, self.metrics = step, dict(metrics)
        if (reward := metrics.get("rollout/reward/mean")) is not None:
            self.rewards.append(reward)

    def add_eval(self, step: int, reward: float) -> None:
        """Mean reward on held-out prompts, answered by the policy of optimizer step `step`."""
        self.evals.append((step, reward))

    @property
    def generator_tokens_per_s(self) -> float:
        """Response tokens of all generators."""
        return sum(self.tokens_per_s.values())

    @property
    def tokens_per_s(self) -> dict[str, float]:
        """Response tokens by generator; one that was restarted counts again from its next status."""
        if len(self._seen) < 2:
            return {}
        (t0, before, _), (t1, after, _) = self._seen[0], self._seen[-1]
        return {
            name: max(0, g.generated_tokens - before[name].generated_tokens) / max(1e-9, t1 - t0)
            for name, g in after.items()
            if name in before
        }

    @property
    def learner_tokens_per_s(self) -> float:
        """Trained tokens of rank 0."""
        if len(self._seen) < 2:
            return 0.0
        (t0, _, before), (t1, _, after) = self._seen[0], self._seen[-1]
        return max(0, after.trained_tokens - before.trained_tokens) / max(1e-9, t1 - t0)

    @property
    def busy(self) -> tuple[float | None, float | None]:
        """Share of the last seconds in which (the generators, the learner) worked; None when not measured."""
        if len(self._seen) < 2:
            return None, None
        (_, before, learner0), (_, after, learner1) = self._seen[0], self._seen[-1]
        shares = [
            share
            for name, g in after.items()
            if name in before
            and (share := _share(before[name].busy_s, before[name].uptime_s, g.busy_s, g.uptime_s)) is not None
        ]
        learner = _share(learner0.busy_s, learner0.uptime_s, learner1.busy_s, learner1.uptime_s)
        return (sum(shares) / len(shares) if shares else None), learner

    def snapshot(self, *, run_dir: pathlib.Path, phase: str, run_url: str = "", mlflow_problem: str = "") -> Snapshot:
        generator_busy, learner_busy = self.busy
        return Snapshot(
            name=self.config.run.name,
            run_dir=str(run_dir),
            phase=phase,
            time=time.time(),
            started=self.started,
            step=self.step,
            max_steps=self.config.run.max_steps,
            max_staleness=self.config.buffer.max_staleness,
            generators=list(self.generators.values()),
            learner=self.learner,
            buffer=self.buffer,
            metrics=dict(self.metrics),
            generator_tokens_per_s=self.generator_tokens_per_s,
            learner_tokens_per_s=self.learner_tokens_per_s,
            tokens_per_s=self.tokens_per_s,
            generator_busy=generator_busy,
            learner_busy=learner_busy,
            rewards=list(self.rewards),
            evals=list(self.evals),
            run_url=run_url,
            mlflow_problem=mlflow_problem,
        )

    def describe_waits(self) -> str:
        """`learner-0 has waited 31 s for 3 more groups from generators; ...`, for the last line of a stalled run."""
        waits = [g.wait for g in self.generators.values() if g.wait is not None] + list(self.buffer.waits)
        if self.learner.wait is not None:
            waits.insert(0, self.learner.wait)
        now = time.time()
        said = [f"{w.waiter} has waited {now - w.since:.0f} s for {w.waiting_for} from {w.owner}" for w in waits]
        return "; ".join(said) + "." if said else "No process reports a wait."


def write_status(run_dir: pathlib.Path, snapshot: Snapshot) -> None:
    """Replace `status.json`, which `streamrl status` reads."""
    write_json(run_dir / STATUS_FILE, snapshot)


def read_status(run_dir: pathlib.Path) -> Snapshot | None:
    """The newest snapshot that the run wrote; None if it wrote none yet."""
    try:
        return msgspec.json.decode((run_dir / STATUS_FILE).read_bytes(), type=Snapshot)
    except FileNotFoundError:
        return None


def ledger_line(stats: BufferStats) -> str:
    """`issued 812 = trained 640 + buffered 60 + in flight 100 + stale 8 + straggler 4`, and what does not add up."""
    parts = {"trained": stats.trained, "buffered": stats.buffered, "in flight": stats.in_flight, **stats.discarded}
    shown = [f"{name} {count}" for name, count in parts.items() if count or name == "trained"]
    missing = stats.issued - sum(parts.values())
    return f"issued {stats.issued} = {' + '.join(shown)}" + (f"; {missing} UNACCOUNTED FOR" if missing else "")


def _share(busy0: float, uptime0: float, busy1: float, uptime1: float) -> float | None:
    if uptime1 <= uptime0:
        return None
    return min(1.0, max(0.0, (busy1 - busy0) / (uptime1 - uptime0)))
