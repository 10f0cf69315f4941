"""docs/staleness.md's tables, between its markers, and its plots, from the results of bench/staleness_study.py.

A number is a mean over the seeds with its range. Two things are derived:

- steps to 0.9: optimizer steps up to the first of two evaluations in a row with a held-out reward of 0.9 or more;
- seconds to 0.9: of a pipeline with one core for sampling and one for training. With S >= 1 the two overlap, and a step
  takes max(generate, train); with S = 0 they take turns, and a step takes their sum. Both are CPU seconds as measured
  in the cell, and evaluation is left out.
"""

from __future__ import annotations

import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LABELS = {
    "none": "none",
    "ppo_clip": "PPO clip on mu",
    "token_truncate": "token truncation",
    "sequence_mask": "sequence mask",
    "cispo": "CISPO",
    "gspo": "GSPO, clip 0.0003",
    "gspo_wide": "GSPO, clip 0.2",
    "token_mask": "token mask",
    "interpolate": "interpolate, token truncation",
}
TARGET = 0.9
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

Line = dict[str, Any]


def write_report(lines: Sequence[Line], engines: Sequence[Line], *, docs: pathlib.Path) -> None:
    """Replace what is between the markers of `docs`/staleness.md, and draw the plots beside it."""
    page = docs / "staleness.md"
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{measured(lines, engines)}\n{END}{tail}", encoding="utf-8")
    draw_rewards(lines, docs / "staleness_reward.svg")
    draw_ess(lines, docs / "staleness_ess.svg")


def measured(lines: Sequence[Line], engines: Sequence[Line]) -> str:
    """What stands between the markers."""
    return f"{tables(lines)}\n{engine_table(lines, engines)}"


# -- numbers of one cell --


def final_reward(line: Line) -> float:
    return float(line["evals"][-1][1])


def mean_reward(line: Line) -> float:
    return statistics.fmean(reward for _, reward in line["evals"])


def steps_to_target(line: Line) -> int | None:
    """None if it was never reached."""
    evals = line["evals"]
    for (step, reward), (_, following) in zip(evals, [*evals[1:], evals[-1]], strict=True):
        if reward >= TARGET and following >= TARGET:
            return int(step)
    return None


def seconds_to_target(line: Line) -> float | None:
    steps = steps_to_target(line)
    if steps is None:
        return None
    pairs = zip(line["curves"]["generate_s"][:steps], line["curves"]["train_s"][:steps], strict=True)
    return float(sum(max(pair) if line["staleness"] else sum(pair) for pair in pairs))


def late(name: str) -> Callable[[Line], float]:
    """Mean of a curve over the second half of the run."""
    return lambda line: statistics.fmean(line["curves"][name][len(line["curves"][name]) // 2 :])


def unused(line: Line) -> float:
    """Share of tokens whose gradient a mask or a clip took away, over the second half; of `cispo`, whose ratio was
    clipped."""
    return late("masked")(line) + late("clipped")(line)


MEASURES: tuple[tuple[str, str, Callable[[Line], float | None], str], ...] = (
    ("Held-out reward at the end", "Greedy, 128 words", final_reward, "{:.3f}"),
    ("Held-out reward, mean over the run", "The area under the curve", mean_reward, "{:.3f}"),
    ("Steps to a held-out reward of 0.9", "Looked at every 2 steps", steps_to_target, "{:.0f}"),
    ("Seconds to a held-out reward of 0.9", "Of the pipeline described above", seconds_to_target, "{:.1f}"),
    ("Effective sample size", "`offpolicy/ess`, mean over the second half of the run", late("ess"), "{:.2f}"),
    ("KL(mu || p)", "`offpolicy/kl_k1`, mean over the second half of the run", late("kl_k1"), "{:.4f}"),
    (
        "Tokens without a gradient",
        "Masked or clipped, mean over the second half of the run; of CISPO: with a clipped weight",
        unused,
        "{:.1%}",
    ),
)


_COMPARED = ((final_reward, "{:.3f}"), (late("ess"), "{:.2f}"), (late("kl_k1"), "{:.4f}"))


# -- tables --


def tables(lines: Sequence[Line]) -> str:
    rates = sorted({line["lr"] for line in lines})
    bounds = sorted({line["staleness"] for line in lines})
    corrections = [name for name in LABELS if any(line["correction"] == name for line in lines)]
    seeds = len({line["seed"] for line in lines})
    steps = "/".join(str(count) for count in sorted({line["steps"] for line in lines}))
    commits = ", ".join(sorted({line["commit"] for line in lines}))
    minutes = sum(sum(line["curves"][name]) for line in lines for name in ("generate_s", "train_s")) / 60
    out = [
        f"{len(lines)} runs of {steps} steps, {minutes:.0f} CPU minutes of sampling and training; up to {seeds} seeds: "
        f"mean (min to max), one number where they agree or there is one; empty: not run. Commit {commits}.\n"
    ]
    for title, remark, measure, form in MEASURES:
        out.append(f"### {title}\n\n{remark}.\n")
        header = [f"S = {bound}" for _ in rates for bound in bounds]
        header[:: len(bounds)] = [f"lr {rate:g}: S = {bounds[0]}" for rate in rates]
        out.append("| | " + " | ".join(header) + " |\n| --- |" + " --- |" * len(header))
        for name in corrections:
            row = [
                _range([measure(line) for line in _chosen(lines, name, bound, rate)], form)
                for rate in rates
                for bound in bounds
            ]
            out.append(f"| {LABELS[name]} | " + " | ".join(row) + " |")
        out.append("")
    return "\n".join(out)


def engine_table(lines: Sequence[Line], engines: Sequence[Line]) -> str:
    """Runs with real engines beside the study's cells of the same settings."""
    out = [
        "### With real engines\n",
        "| correction | lr | S | mean staleness, engines | held-out reward at the end: engines | study | "
        "ESS: engines | study | KL(mu \\|\\| p): engines | study |",
        "| --- |" + " --- |" * 9,
    ]
    for run in engines:
        cells = _chosen(lines, run["correction"], run["staleness"], run["lr"])
        study = [_range([measure(line) for line in cells], form) for measure, form in _COMPARED]
        ours = [form.format(value) for value, (_, form) in zip(_of_engines(run), _COMPARED, strict=True)]
        pairs = [text for pair in zip(ours, study, strict=True) for text in pair]
        name = LABELS[run["correction"]]
        out.append(
            f"| {name} | {run['lr']:g} | {run['staleness']} | {run['staleness_mean']:.2f} | {' | '.join(pairs)} |"
        )
    return "\n".join(out) + "\n"


def _of_engines(run: Line) -> tuple[float, float, float]:
    return final_reward(run), run["ess"], run["kl_k1"]


def _chosen(lines: Iterable[Line], correction: str, staleness: int, lr: float) -> list[Line]:
    return [
        line for line in lines if (line["correction"], line["staleness"], line["lr"]) == (correction, staleness, lr)
    ]


def _range(values: Sequence[float | None], form: str) -> str:
    """`0.97 (0.96 to 0.98)`; `never` where no seed has a number, and how many have none where some do."""
    there = [value for value in values if value is not None]
    if not there:
        return "never" if values else ""
    mean, low, high = (
        form.format(value + 0.0) if abs(value) > 1e-5 else form.format(0.0)  # never "-0.0000"
        for value in (statistics.fmean(there), min(there), max(there))
    )
    text = mean if low == high else f"{mean} ({low} to {high})"
    return text if len(there) == len(values) else f"{text}; never in {len(values) - len(there)} of {len(values)}"


# -- plots --


def draw_rewards(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Held-out reward over steps: a panel for each learning rate and staleness, a line for each correction."""
    _draw(lines, path, label="held-out reward", points=lambda line: line["evals"], low=0.0)


def draw_ess(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Effective sample size over steps, of stale data."""
    stale = [line for line in lines if line["staleness"] > 0]
    _draw(
        stale, path, label="effective sample size", points=lambda line: list(enumerate(line["curves"]["ess"], 1))[::2]
    )


def _draw(
    lines: Sequence[Line],
    path: pathlib.Path,
    *,
    label: str,
    points: Callable[[Line], list[Any]],
    low: float | None = None,
) -> None:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rates = sorted({line["lr"] for line in lines})
    bounds = sorted({line["staleness"] for line in lines})
    figure = Figure(figsize=(2.9 * len(bounds), 2.5 * len(rates) + 0.5), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(len(rates), len(bounds), sharex=True, sharey=True, squeeze=False)
    for row, rate in enumerate(rates):
        for column, bound in enumerate(bounds):
            axes = panels[row][column]
            for number, name in enumerate(LABELS):
                runs = [points(line) for line in _chosen(lines, name, bound, rate)]
                if not runs:
                    continue
                steps = [step for step, _ in runs[0]]
                values = list(zip(*([value for _, value in run] for run in runs), strict=True))
                style = "--" if name == "none" else "-"
                axes.fill_between(steps, list(map(min, values)), list(map(max, values)), color=f"C{number}", alpha=0.1)
                axes.plot(
                    steps,
                    list(map(statistics.fmean, values)),
                    style,
                    color=f"C{number}",
                    linewidth=1.1,
                    label=LABELS[name],
                )
            axes.set_title(f"S = {bound}, lr {rate:g}", loc="left", fontsize=9)
            axes.grid(alpha=0.3)
            axes.set_ylim(low, 1.02)
            axes.tick_params(labelsize=7)
    for axes in panels[-1]:
        axes.set_xlabel("optimizer step", fontsize=8)
    for axes in panels[:, 0]:
        axes.set_ylabel(label, fontsize=8)
    handles = {}
    for axes in panels.flat:
        handles |= {line.get_label(): line for line in axes.lines}
        axes.set_visible(bool(axes.lines))
    labels = [label for label in LABELS.values() if label in handles]
    figure.legend(
        [handles[label] for label in labels], labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "streamrl"}):
        figure.savefig(path, metadata={"Date": None})
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"(\d\.\d)\d{2,}", r"\1", text), encoding="utf-8")  # a tenth of a point is enough
