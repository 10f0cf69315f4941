"""The picture of a run, drawn from its files: reward, staleness, speed of both sides, weight sync."""

from __future__ import annotations

import pathlib
from typing import Any

from streamrl.run_directory import EVALS_FILE, METRICS_FILE, PLOT_FILE, read_lines

_PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("rollout/reward/mean", "training"), ("eval/reward", "held-out"))),
    ("staleness (optimizer steps)", (("offpolicy/staleness/mean", "mean"), ("offpolicy/staleness/max", "max"))),
    ("tokens/s", (("generator/tokens_per_s", "generators"), ("learner/tokens_per_s", "learner"))),
    (
        "seconds a step",
        (
            ("time/train", "learner trains"),
            ("time/wait_for_batch", "learner waits for rollouts"),
            ("weight_sync/pause_s", "longest pause of a generator for new weights"),
        ),
    ),
)


def plot_run(run_dir: pathlib.Path) -> pathlib.Path | None:
    """Draw `plot.png` in the run directory; None if there are no metrics to draw."""
    records = [record for name in (METRICS_FILE, EVALS_FILE) for record, _ in read_lines(run_dir / name)]
    if not records:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for name, label in curves:
            steps, values = _curve(records, name)
            if steps:
                axes.plot(
                    steps, values, label=label, marker="o" if len(steps) < 40 else "", markersize=3, linewidth=1.2
                )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.suptitle(run_dir.name, fontsize=11)
    path = run_dir / PLOT_FILE
    figure.savefig(path, dpi=110)
    return path


def _curve(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(int(r["step"]), float(r[name])) for r in records if r.get(name) is not None and "step" in r]
    return [step for step, _ in points], [value for _, value in points]
