"""Cells of bench/staleness_study.py with real engines: `streamrl launch` with a learner that is slowed until the data
is near S versions old.

The learner is slowed by a loss of its own, `slow_reinforce`, which waits `SLOW_S` in every micro-batch (a batch of the
quickstart is one). Its gradient is that of ppo_clip with `proximal: recompute`: with correction=token_truncate that of
the cell `token_truncate`, with correction=none that of `none`, which `check_config` would refuse for ppo_clip.
`buffer.min_size` lets the generators run ahead before the first step, as the study has it.

    python -m bench.staleness_engines [--cells token_truncate:4,none:16] [--lr 3e-4] [--seed 0]

Each run is one line of the results file, with the steps' staleness and the held-out rewards; `--report` of the study
sets them beside its cells. A run takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.config import AlgorithmConfig
    from streamrl.losses import LossInputs

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "staleness_engines.jsonl"
SLOW_S = 0.5


def slow_reinforce(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """-w A p, late."""
    time.sleep(SLOW_S)
    return -inputs.weights * inputs.log_probs * inputs.advantages


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_with_engines(correction: str, staleness: int, *, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """One launch; what its files say."""
    groups = 16  # learner.groups_per_step of the quickstart
    with tempfile.TemporaryDirectory() as folder:
        run_dir = pathlib.Path(folder, "run")
        command = [sys.executable, "-m", "actors.cli", "launch", "--config", str(ROOT / "configs" / "quickstart.yaml")]
        settings = {
            "algorithm.loss": "python:bench.staleness_engines:slow_reinforce",
            "algorithm.proximal": "recompute",
            "algorithm.correction": correction,
            "buffer.max_staleness": staleness,
            "buffer.min_size": max(1, staleness * groups),
            "learner.lr": lr,
            "run.seed": seed,
            "run.max_steps": steps,
            "eval.interval_steps": 8,
        }
        subprocess.run(
            [*command, "--run-dir", str(run_dir), *(f"{name}={value}" for name, value in settings.items())],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        metrics, evals = lines_of(run_dir / "metrics.jsonl"), lines_of(run_dir / "evals.jsonl")
        ledger = json.loads((run_dir / "ledger.json").read_text(encoding="utf-8"))
    late = metrics[len(metrics) // 2 :]
    return {
        "correction": correction,
        "staleness": staleness,
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "evals": [(int(line["step"]), line["eval/reward"]) for line in evals],
        "staleness_mean": statistics.fmean(m["offpolicy/staleness/mean"] for m in late),
        "staleness_max": max(m["offpolicy/staleness/max"] for m in metrics),
        "ess": statistics.fmean(m["offpolicy/ess"] for m in late),
        "kl_k1": statistics.fmean(m["offpolicy/kl_k1"] for m in late),
        "discarded": ledger["discarded"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="token_truncate:4,none:16", help="correction:staleness, ...")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    for cell in args.cells.split(","):
        correction, _, staleness = cell.partition(":")
        line = run_with_engines(correction, int(staleness), lr=args.lr, seed=args.seed, steps=args.steps)
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
