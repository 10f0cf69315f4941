"""How stale may the data be? Training runs whose staleness is exact: every batch is S versions old, by correction.

A cell of the study is one training run of the quickstart task with the real learner (Policy, Trainer), the real
ReplayBuffer with `max_staleness=S`, real losses and the real verifier. Instead of engines a sampler keeps the last
S + 1 snapshots of the weights and samples each batch from the oldest (bench/snapshot_sampler.py), so the batch of step
v was sampled by version max(0, v - S). That is checked for every group of every step, and so is that nothing was
discarded.
All cells of one seed get the same prompts in the same order, the same dice, and the same base model.

`none` is the gradient of data that is trained on as if it were fresh: loss -A p without any weight. `check_config`
refuses it where S > 0, so the study builds that config without asking.

    python -m bench.staleness_study [--jobs 2] [--steps 64] [--lr 1e-4,3e-4] [--seeds 3] [section.key=value ...]
    python -m bench.staleness_study --quick          # a slice, in a minute
    python -m bench.staleness_study --report         # tables and plots of docs/staleness.md

Each finished cell is one line of the results file; cells that are there already are not run again. One thread a cell;
seconds are CPU seconds of the process, so that a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.utils import logging

from actors.prompts import PromptSource, load_prompts, make_prompt_source
from bench.snapshot_sampler import Snapshot, SnapshotSampler
from bench.staleness_report import write_report
from buffers.replay import ReplayBuffer
from buffers.shards import cut
from streamrl.base_model import load_tokenizer, prepare_model
from streamrl.config import Config, check_config, load_config
from streamrl.policy import Policy
from streamrl.records import Prompt
from streamrl.staleness import group_staleness
from streamrl.trainer import Trainer

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "staleness_study.jsonl"
ENGINES = ROOT / "bench" / "staleness_engines.jsonl"  # written by bench/staleness_engines.py
STALENESS = (0, 1, 4, 16)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"proximal": "recompute", "correction": "none"},
    "ppo_clip": {"proximal": "bypass", "correction": "none"},
    "token_truncate": {"proximal": "recompute", "correction": "token_truncate"},
    "sequence_mask": {"proximal": "recompute", "correction": "sequence_mask"},
    "cispo": {"loss": "cispo", "correction": "none", "clip_low": 0.9, "clip_high": 4.0},
    # As its paper and the recipe of docs/algorithms.md have it, and with the clip range of PPO.
    "gspo": {
        "loss": "gspo",
        "proximal": "bypass",
        "correction": "none",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    "gspo_wide": {
        "loss": "gspo",
        "proximal": "bypass",
        "correction": "none",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence_mean_token_mean",
    },
    # Not asked for, but what else the default could be.
    "token_mask": {"proximal": "recompute", "correction": "token_mask"},
    "interpolate": {"proximal": "interpolate", "correction": "token_truncate"},
}
_PR_SET_PDEATHSIG = 1
EVAL_EVERY = 2  # steps
MISMATCH = 1e-4  # largest |p - mu| of fresh data, else the sampler is not the learner's policy
CURVES = {
    "reward": "rollout/reward/mean",
    "ess": "offpolicy/ess",
    "kl_k1": "offpolicy/kl_k1",
    "masked": "offpolicy/masked_fraction",
    "clipped": "policy/clip_fraction",
}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. Example: Cell(correction="token_truncate", staleness=4, lr=1e-4, seed=0, steps=64)."""

    correction: str
    staleness: int
    lr: float
    seed: int
    steps: int


def cell_config(base: Config, cell: Cell) -> Config:
    """The run's config with the cell's settings."""
    replace = msgspec.structs.replace
    config = replace(
        base,
        run=replace(base.run, seed=cell.seed, max_steps=cell.steps),
        buffer=replace(base.buffer, max_staleness=cell.staleness),
        learner=replace(base.learner, lr=cell.lr),
        algorithm=replace(base.algorithm, **CORRECTIONS[cell.correction]),
    )
    if cell.correction != "none":
        check_config(config)
    return config


class Data(NamedTuple):
    """The prompts of all cells of one seed."""

    batches: list[list[Prompt]]  # by step
    held_out: list[Prompt]


def load_data(base: Config, *, model_path: str, seed: int, steps: int) -> Data:
    """As a run with `run.seed=seed` would take them."""
    config = msgspec.structs.replace(base, run=msgspec.structs.replace(base.run, seed=seed))
    tokenizer = load_tokenizer(model_path)
    source = make_prompt_source(config, tokenizer)
    batches = [[_next(source) for _ in range(config.learner.groups_per_step)] for _ in range(steps)]
    return Data(batches, load_prompts(config, tokenizer)[0])


def _next(source: PromptSource) -> Prompt:
    prompt = source.next()
    assert prompt is not None  # data.epochs=0 never ends
    return prompt


def run_cell(base: Config, cell: Cell, data: Data, *, model_path: str) -> dict[str, Any]:
    """Train one cell; needs a process group of one rank. Returns its line of the results file."""
    config = cell_config(base, cell)
    torch.manual_seed(cell.seed)
    logging.disable_progress_bar()
    policy = Policy(model_path, mesh=init_device_mesh("cpu", (1,)), temperature=config.generator.temperature)
    trainer = Trainer(policy, config)
    sampler = SnapshotSampler(model_path, config)
    num_groups = config.learner.groups_per_step
    buffer = ReplayBuffer(config.buffer, group_size=config.algorithm.group_size, groups_per_step=num_groups)
    snapshots = deque([_snapshot(policy)], maxlen=cell.staleness + 1)

    curves: dict[str, list[float]] = {name: [] for name in (*CURVES, "generate_s", "train_s", "staleness")}
    evals = [(0, sampler.held_out_reward(data.held_out, snapshots[-1]))]
    for version, prompts in enumerate(data.batches):
        began = time.process_time()
        sampled_by = max(0, version - cell.staleness)
        for rollout in sampler.sample(prompts, snapshots[0], version=sampled_by, seed=cell.seed * 100_003 + version):
            outcome = buffer.insert(rollout)
            if outcome.status != "accepted":
                raise RuntimeError(f"step {version}: the buffer did not take {rollout.key}: {outcome}")
        sampled = time.process_time()
        groups = buffer.sample(num_groups, policy_version=version, timeout_s=0)
        found = {group_staleness(version, int(v)) for g in groups for r in g.rollouts for v in r.versions}
        if found != {min(version, cell.staleness)}:
            raise RuntimeError(f"step {version} is to have staleness {min(version, cell.staleness)}, and has {found}")
        (shard,) = cut(groups, 1)
        metrics = trainer.step(shard, policy_version=version)
        buffer.commit(version + 1)
        snapshots.append(_snapshot(policy))
        trained = time.process_time()

        if metrics.get("offpolicy/logprob_mismatch", 0.0) > MISMATCH:
            raise RuntimeError(f"step {version}: |p - mu| is {metrics['offpolicy/logprob_mismatch']} on fresh data")
        for name, metric in CURVES.items():
            curves[name].append(metrics[metric])
        curves["staleness"].append(metrics["offpolicy/staleness/max"])
        curves["generate_s"].append(sampled - began)
        curves["train_s"].append(trained - sampled)
        if (version + 1) % EVAL_EVERY == 0 or version + 1 == cell.steps:
            evals.append((version + 1, sampler.held_out_reward(data.held_out, snapshots[-1])))
    ledger = buffer.stats()
    if ledger.discarded or ledger.trained != cell.steps * num_groups:
        raise RuntimeError(f"the ledger of {cell} is not that of a run without losses: {ledger}")
    return {
        **msgspec.to_builtins(cell),
        "algorithm": CORRECTIONS[cell.correction],
        "evals": [(step, round(reward, 4)) for step, reward in evals],
        "curves": {name: [_short(value) for value in values] for name, values in curves.items()},
    }


def _snapshot(policy: Policy) -> Snapshot:
    return {name: p.full_tensor().detach().clone() for name, p in policy.named_parameters()}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


# -- many cells --


def missing_cells(cells: Sequence[Cell], results: pathlib.Path) -> list[Cell]:
    """Those of which the results file has no line."""
    done = {_cell_of(line) for line in read_results(results)}
    return [cell for cell in cells if cell not in done]


def read_results(results: pathlib.Path) -> list[dict[str, Any]]:
    """Every finished cell; a line that a kill left half is none."""
    if not results.exists():
        return []
    lines = results.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.endswith("}")]


def _cell_of(line: dict[str, Any]) -> Cell:
    return msgspec.convert({name: line[name] for name in Cell.__struct_fields__}, Cell)


def run_study(cells: Sequence[Cell], base: Config, results: pathlib.Path, *, jobs: int) -> int:
    """Run what is missing, append each finished cell; the number of cells that ran."""
    todo = missing_cells(cells, results)
    if not todo:
        return 0
    model_path = prepare_model(base)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    if results.exists() and not results.read_bytes().endswith(b"\n"):
        with results.open("a", encoding="utf-8") as file:
            file.write("\n")  # ends what a kill left half
    for number, line in enumerate(_run_all(todo, base, model_path, jobs=jobs), start=1):
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "commit": commit.strip()}) + "\n")
        print(
            f"{number}/{len(todo)} {line['correction']} S={line['staleness']} lr={line['lr']:g} seed {line['seed']}: "
            f"held-out {line['evals'][-1][1]:.3f}",
            flush=True,
        )
    return len(todo)


def _run_all(cells: Sequence[Cell], base: Config, model_path: str, *, jobs: int) -> Iterator[dict[str, Any]]:
    data = {
        (seed, steps): load_data(base, model_path=model_path, seed=seed, steps=steps)
        for seed, steps in sorted({(cell.seed, cell.steps) for cell in cells})
    }
    if jobs == 1:
        with _one_rank():
            for cell in cells:
                yield run_cell(base, cell, data[cell.seed, cell.steps], model_path=model_path)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start_worker, initargs=(os.getpid(),)) as pool:
        running = [
            pool.submit(run_cell, base, cell, data[cell.seed, cell.steps], model_path=model_path) for cell in cells
        ]
        try:
            for done in as_completed(running):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    """One thread, a process group of one rank. A worker ends with its parent, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the study is over")
    _start_rank()


def _start_rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    _start_rank()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _list(kind: type) -> Any:
    return lambda text: tuple(kind(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--lr", type=_list(float), default=(1e-4, 3e-4), help="that of the quickstart, and three times that"
    )
    parser.add_argument("--staleness", type=_list(int), default=STALENESS)
    parser.add_argument("--corrections", type=_list(str), default=tuple(CORRECTIONS))
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="S of 0 and 4, two corrections, one seed, 12 steps")
    parser.add_argument("--report", action="store_true", help="write docs/staleness.md from the results; train nothing")
    args = parser.parse_args(arguments)
    if args.report:
        write_report(read_results(args.results), read_results(ENGINES), docs=ROOT / "docs")
        return
    if args.quick:
        args.staleness, args.corrections, args.seeds, args.steps = (0, 4), ("none", "token_truncate"), 1, 12
        if args.results == RESULTS:
            parser.error("--quick needs --results=FILE, so that its cells do not stand among those of the study")
    base = load_config(ROOT / "configs" / "quickstart.yaml", args.overrides)
    cells = [
        Cell(correction=correction, staleness=staleness, lr=lr, seed=seed, steps=args.steps)
        for seed, lr, staleness, correction in itertools.product(
            range(args.seeds), args.lr, sorted(args.staleness, reverse=True), args.corrections
        )
    ]
    ran = run_study(cells, base, args.results, jobs=args.jobs)
    print(f"{ran} cells ran, {len(cells) - ran} were there already")


if __name__ == "__main__":
    main()
