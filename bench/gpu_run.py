"""What a GPU host shows of streamrl: whole runs, each side alone, log-prob agreement, in one JSON each.

    prepare            register streamrl's entry points in a folder on PYTHONPATH, print versions and GPUs
    run --name NAME    `streamrl launch`: speeds of both sides, weight-sync phases, mismatch, rewards, memory
    generate           engines alone, one process each, kept full with the run's prompts: tokens per second of them all
    learn              the learner alone on batches of the run's shape: tokens per second, peak memory
    parity             the engine's log-probs against the learner's policy, on its own samples and on random tokens

All but `prepare` take `--config FILE` and `section.key=value`. Progress goes to stderr; the JSON is the last line of
stdout and, with the logs, under --out. Without a GPU everything runs on the CPU, slowly, for trying it out.
Waits: for a child's line or end, each within --limit-s; children are killed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from typing import Any

import numpy as np

from bench.gpu_alone import engine, generate, learn, parity
from bench.gpu_meter import GpuMeter, config_arguments, say

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED_STEPS = 10  # until buffer and engines are in their stride


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    array = np.array(values)
    return {"median": float(np.median(array)), "p90": float(np.quantile(array, 0.9)), "max": float(array.max())}


# -- prepare --


def prepare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Entry points come from installed metadata, and a bare host cannot install: write what an install would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = pathlib.Path(arguments.site) / f"streamrl-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: streamrl\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    text = "".join(
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()
    )
    (info / "entry_points.txt").write_text(text)
    names = ["torch", "vllm", "transformers", "ray", "mlflow-skinny", "pyzmq", "msgspec", "tensordict", "lmdb"]
    names += ["reasoning-gym", "numpy", "triton"]
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpus = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
        if (shutil.which("nvidia-smi"))
        else []
    )
    return {"versions": versions, "missing": sorted(set(names) - set(versions)), "gpus": gpus, "cores": os.cpu_count()}


# -- run --


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    run_dir = pathlib.Path(arguments.runs) / arguments.name
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "actors.cli", "launch", "--run-dir", str(run_dir), *config_arguments(arguments)]
    log = arguments.out / f"{arguments.name}.log"
    began = time.time()
    with GpuMeter() as meter, log.open("wb") as sink:
        driver = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT)
        said = 0
        while driver.poll() is None and time.time() - began < arguments.limit_s:
            time.sleep(1.0)
            steps = lines(run_dir / "metrics.jsonl")
            if time.time() - began > said + 15:
                said = int(time.time() - began)
                last = log.read_text(errors="replace").strip().splitlines()
                say(f"{arguments.name}: {said} s, step {len(steps)}; {last[-1][:160] if last else ''}")
        late = driver.poll() is None
        if late:
            say(f"{arguments.name}: {arguments.limit_s} s are over, it is told to end")
            driver.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(30)
            driver.kill()
        driver.wait()
        events = lines(run_dir / "events.jsonl")
        ready = next((e["time"] for e in events if e["kind"] == "ready"), time.time())
        result = {"name": arguments.name, "exit_code": driver.returncode, "cut_short": late, **measure(run_dir)}
        result["gpus"] = meter.summary(ready)
    with log.open("a") as sink:
        for part in sorted((run_dir / "logs").glob("*.log")):
            sink.write(f"\n===== {part.name}\n" + part.read_text(errors="replace")[-200_000:])
    if driver.returncode != 0:
        for part in [log, *sorted((run_dir / "logs").glob("*.log"))]:
            print(f"===== {part.name}", *part.read_text(errors="replace").splitlines()[-12:], sep="\n", file=sys.stderr)
    audit = subprocess.run(
        [sys.executable, "-m", "actors.cli", "audit", str(run_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {**result, "audit_exit_code": audit.returncode}


def measure(run_dir: pathlib.Path) -> dict[str, Any]:
    events, steps = lines(run_dir / "events.jsonl"), lines(run_dir / "metrics.jsonl")
    by_kind = {event["kind"]: event for event in events}
    syncs = [e for e in events if e["kind"] == "weight_sync" and e["policy_version"] > 0]
    phases = [name for name in syncs[0] if name.endswith("_s") or name.startswith("probe_")] if syncs else []
    result: dict[str, Any] = {
        "ready_s": by_kind.get("ready", {}).get("seconds"),
        "first_step_s": by_kind.get("first_step", {}).get("seconds"),
        "end": by_kind.get("end", {}).get("reason"),
        "steps": len(steps),
        "busy": {side: by_kind.get("end", {}).get(f"{side}_busy") for side in ("learner", "generator")},
        "weight_sync": {"bytes": syncs[-1]["num_bytes"] if syncs else 0, "count": len(syncs)}
        | {name: quantiles([s[name] for s in syncs]) for name in phases},
        "eval": [(e["step"], round(e["eval/reward"], 4)) for e in lines(run_dir / "evals.jsonl")],
        "reward": [round(s["rollout/reward/mean"], 4) for s in steps],
        "logprob_mismatch": quantiles([v for s in steps if (v := s.get("offpolicy/logprob_mismatch")) is not None]),
    }
    steady = steps[SKIPPED_STEPS:]
    if len(steady) > 1:
        elapsed = steady[-1]["time"] - steps[SKIPPED_STEPS - 1]["time"]
        responses = sum(s["learner/response_tokens"] for s in steady)
        result["steady"] = {
            "steps": len(steady),
            "seconds": elapsed,
            "response_tokens_per_s": responses / elapsed,
            "tokens_per_s": sum(s["learner/tokens_per_s"] * s["learner/step_time_s"] for s in steady) / elapsed,
            "rollouts_per_s": sum(s["learner/rollouts"] for s in steady) / elapsed,
            "response_length": responses / sum(s["learner/rollouts"] for s in steady),
            "generator_tokens_per_s": median([s["generator/tokens_per_s"] for s in steady]),
            "generator_idle_fraction": median([s["generator/idle_fraction"] for s in steady]),
        }
        names = ("learner/step_time_s", "time/wait_for_batch", "time/train", "time/publish", "policy/entropy")
        names += ("offpolicy/staleness/mean", "offpolicy/staleness/max", "offpolicy/ess", "offpolicy/kl_k3")
        names += ("learner/grad_norm", "rollout/latency_s", "rollout/truncated_fraction", "generator/running")
        names += ("generator/scoring",)
        result["steady"] |= {name: median([s[name] for s in steady if name in s]) for name in names}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "run", "generate", "engine", "learn", "parity"])
    parser.add_argument("--name", default="run")
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "configs" / "smollm2_1gpu.yaml")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", "/tmp/streamrl-gpu")))
    parser.add_argument("--runs", default="/tmp/streamrl-runs")
    parser.add_argument("--site", default="/tmp/site", help="of prepare: a folder on PYTHONPATH")
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of generate: how long is counted")
    parser.add_argument("--engines", type=int, nargs="+", default=[4])
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10, help="of learn: how many are counted")
    parser.add_argument("--compile", type=int, nargs="+", default=[0])
    parser.add_argument("--max-logits", type=int, nargs="+", default=[1 << 24])
    parser.add_argument("--response-length", type=float, default=32.0, help="of learn: mean tokens of a response")
    parser.add_argument("--samples", type=int, default=256, help="of parity: responses")
    arguments, arguments.settings = parser.parse_known_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    work = {"prepare": prepare, "run": run, "generate": generate, "engine": engine, "learn": learn, "parity": parity}
    began = time.time()
    result = {"command": arguments.command, **work[arguments.command](arguments)}
    result["seconds"] = round(time.time() - began, 1)
    text = json.dumps(result)
    if arguments.command != "engine":
        (arguments.out / f"{arguments.command}-{arguments.name}.json").write_text(text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
