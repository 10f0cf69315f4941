"""What the quickstart shows of itself: `streamrl launch --generators 3 --learner 1`, from its own files.

    first_step_s    launch to the first optimizer step, the making of the base model left out
    reward_09_s     engines up to the first look at a held-out reward of 0.9 or more
    busy            share of the time after the first ten steps in which the slower side, and the other, worked
    mismatch        largest |p - mu| over rollouts that one version sampled whole

A run takes about two minutes, and one more when the base model is not in the cache. Prints one JSON line with the bars
of the project beside what was measured; `load` says how busy the machine was before. Times are no tests: on a machine
that others use they say more about the others.

    python -m bench.bench_quickstart [section.key=value ...]
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(run_dir: pathlib.Path) -> dict[str, Any]:
    events = {event["kind"]: event for event in lines(run_dir / "events.jsonl")}
    steps, evals = lines(run_dir / "metrics.jsonl"), lines(run_dir / "evals.jsonl")
    reached = [e["time"] for e in evals if e["eval/reward"] >= 0.9]
    busy = sorted((events["end"]["learner_busy"], events["end"]["generator_busy"]), reverse=True)
    return {
        "first_step_s": {"is": round(events["first_step"]["seconds"] - events["base_model"]["seconds"], 1), "bar": 120},
        "reward_09_s": {"is": round(reached[0] - events["ready"]["time"], 1) if reached else None, "bar": 360},
        "held_out_reward": {"before": evals[0]["eval/reward"], "after": evals[-1]["eval/reward"]},
        "busy": {"slower": busy[0], "other": busy[1], "bar": 0.9},
        "mismatch": {"is": max(s.get("offpolicy/logprob_mismatch", 0.0) for s in steps), "bar": 1e-4},
        "staleness": {"mean": sum(s["offpolicy/staleness/mean"] for s in steps) / len(steps)},
        "steps_per_s": (len(steps) - 1) / (steps[-1]["time"] - steps[0]["time"]),
    }


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = pathlib.Path(folder, "run")
        command = [sys.executable, "-m", "actors.cli", "launch", "--config", str(ROOT / "configs" / "quickstart.yaml")]
        subprocess.run(
            [*command, "--run-dir", str(run_dir), *sys.argv[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        print(json.dumps({"bench": "quickstart", "load": load, "cores": os.cpu_count(), **measure(run_dir)}))


if __name__ == "__main__":
    main()
