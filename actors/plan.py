"""The plan of a run: what would be started, on what, how much memory it takes, and the arithmetic of its batches.

`make_plan` also makes the refusals that need more than the config: data, model, port, GPUs. It starts nothing, writes
nothing and imports neither torch nor ray.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from actors.rewards import check_reward
from streamrl.base_model import model_kind
from streamrl.config import CPU_KV_CACHE_BYTES, Config
from streamrl.custom import check_custom_functions
from streamrl.errors import ConfigError
from streamrl.examples import ExampleSets, load_examples
from streamrl.mlflow_server import check_port_free
from streamrl.weight_sync.choice import Placement, choose_backend

# Largest proportional set size in a quickstart on CPU, whose model hardly counts; weights and KV cache are added.
_DRIVER_BYTES = int(0.8e9)
_RAY_BYTES = int(0.5e9)  # gcs, raylet, agents, an idle worker
_BUFFER_BYTES = int(0.5e9)
_LEARNER_BYTES = int(0.7e9)
_GENERATOR_BYTES = int(1.75e9)  # the actor 0.55, its engine process 1.1, a reward worker 0.1
_MLFLOW_UI_BYTES = int(0.4e9)
_QUICK_DRAWS = 64
_CLUSTER_TIMEOUT_S = 3.0
_VOCABULARY = 100  # of the character tokenizer, for the size of a base model
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """Some equal processes. Example: ProcessPlan(name="generator", count=3, device="1 GPU", num_bytes=2_000_000)."""

    name: str
    count: int
    device: str
    num_bytes: int  # of each


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything `--dry-run` prints."""

    title: str
    processes: tuple[ProcessPlan, ...]
    facts: tuple[tuple[str, str], ...]  # (what, how much)
    warnings: tuple[str, ...]  # what is allowed and odd


def make_plan(config: Config, run_dir: pathlib.Path, *, quick: bool = False) -> Plan:
    """Check what only this machine can tell, and work out the plan.

    `quick` only draws a few prompts of a reasoning-gym task, to see that it can be done; files are read whole.

    Raises:
        ConfigError: missing or empty data, no model, a reward function that cannot be had, a port in use, an address
            that is not this machine's, no Ray cluster, more GPUs asked for than there are.
    """
    c = config
    _check_host(c.network.host)
    kind = model_kind(c)
    if c.tracking.mlflow_ui:
        check_port_free(c.tracking.mlflow_ui_port)
    if c.ray.address:
        _check_cluster(c.ray.address)
    num_gpus = _check_gpus(c)
    data_text, num_train = _check_data(c, kind, quick=quick)
    if c.reward.kind == "python":
        check_reward(c)
    check_custom_functions(c)
    parameters = _num_parameters(c, kind)
    admitted = (c.buffer.max_staleness + 1) * c.learner.groups_per_step * c.algorithm.num_members
    rollout_bytes = 4 * c.data.max_prompt_tokens + 12 * c.generator.max_new_tokens  # ids; ids, log-probs, versions
    processes = _processes(c, parameters, admitted * rollout_bytes)
    return Plan(
        title=f"{c.run.name}: {_count(c.generator.count, 'generator')}, {_count(c.learner.ranks, 'learner rank')}",
        processes=processes,
        facts=(
            ("model", f"{c.model.path} ({kind}), {_parameters_text(parameters)}, {c.model.dtype}"),
            ("data", data_text),
            ("reward", c.reward.function if c.reward.kind == "python" else c.reward.kind),
            *_arithmetic(c, num_train=num_train, buffered_bytes=admitted * rollout_bytes),
            ("weights", _weights_text(c, parameters)),
            ("files", str(run_dir)),
        ),
        warnings=_warnings(c, processes, num_gpus=num_gpus, num_train=num_train),
    )


def print_plan(plan: Plan) -> None:
    """Print it to the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(plan.title, style="bold", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("process", "count", "device", "memory each"):
        table.add_column(column, justify="right" if column in ("count", "memory each") else "left")
    for p in plan.processes:
        table.add_row(p.name, str(p.count), p.device, _bytes(p.num_bytes))
    table.add_row("all", str(sum(p.count for p in plan.processes)), "", _bytes(_total(plan.processes)), style="bold")
    console.print(table)
    facts = Table.grid(padding=(0, 2))
    for name, text in plan.facts:
        facts.add_row(name, Text(text))
    for warning in plan.warnings:
        facts.add_row(Text("odd", style="yellow"), Text(warning))
    console.print(facts)
    console.print("Nothing was started (--dry-run).")


def _arithmetic(c: Config, *, num_train: int, buffered_bytes: int) -> list[tuple[str, str]]:
    groups, bound = c.learner.groups_per_step, c.buffer.max_staleness
    tokens = c.rollouts_per_step * (c.data.max_prompt_tokens + c.generator.max_new_tokens)
    micro_batches = -(-tokens // (c.learner.micro_batch_tokens * c.learner.ranks))
    admitted = (bound + 1) * groups
    prompts = c.run.max_steps * groups
    return [
        (
            "one step",
            f"{groups} groups x {c.algorithm.group_size} = {c.rollouts_per_step} rollouts, at most {tokens:,} tokens, "
            f"{_count(micro_batches, 'micro-batch', 'micro-batches')} on each rank",
        ),
        (
            "admission",
            f"(S + 1) x B = ({bound} + 1) x {groups} = {admitted} groups, {admitted * c.algorithm.num_members} members "
            "generated ahead of the learner",
        ),
        ("buffer", f"at most {_bytes(buffered_bytes)} of {_bytes(c.buffer.max_bytes)}"),
        ("training", f"{c.run.max_steps} steps, {prompts:,} prompts, {prompts / num_train:.1f} passes over the data"),
    ]


def _processes(c: Config, parameters: int | None, buffered_bytes: int) -> tuple[ProcessPlan, ...]:
    count = parameters or 0
    weights = count * _DTYPE_BYTES[c.model.dtype]
    # float32 weights, gradients and two AdamW moments of each trained model, and two published versions, sharded over
    # the ranks
    num_trained = 2 if c.algorithm.has_critic else 1
    learner = _LEARNER_BYTES + (16 * count * num_trained + 2 * weights) // c.learner.ranks
    kv_cache = 0 if c.generator.gpus else c.generator.kv_cache_bytes or CPU_KV_CACHE_BYTES
    generator = _GENERATOR_BYTES + 2 * weights + kv_cache
    learner_device = _device(c.learner.gpus, c.learner.threads)
    generator_device = f"{_device(c.generator.gpus, c.generator.threads)}, {_count(c.reward.workers, 'reward worker')}"
    processes = [
        ProcessPlan(name="driver", count=1, device="CPU", num_bytes=_DRIVER_BYTES),
        ProcessPlan(name="buffer", count=1, device="CPU", num_bytes=_BUFFER_BYTES + buffered_bytes),
        ProcessPlan(name="learner", count=c.learner.ranks, device=learner_device, num_bytes=learner),
        ProcessPlan(name="generator", count=c.generator.count, device=generator_device, num_bytes=generator),
    ]
    if not c.ray.address:
        processes.insert(1, ProcessPlan(name="ray", count=1, device="CPU", num_bytes=_RAY_BYTES))
    if c.tracking.mlflow_ui:
        processes.append(ProcessPlan(name="mlflow server", count=1, device="CPU", num_bytes=_MLFLOW_UI_BYTES))
    return tuple(processes)


def _warnings(c: Config, processes: Sequence[ProcessPlan], *, num_gpus: int, num_train: int) -> tuple[str, ...]:
    found = []
    cores = os.cpu_count() or 1
    threads = c.generator.count * c.generator.threads + c.learner.ranks * c.learner.threads
    if threads > cores and not c.ray.address:
        found.append(f"{threads} compute threads share {_count(cores, 'core')}; it works, and each gets less.")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _total(processes) > memory and not c.ray.address:
        found.append(f"about {_bytes(_total(processes))} of memory is needed, and this machine has {_bytes(memory)}.")
    admitted = (c.buffer.max_staleness + 1) * c.learner.groups_per_step * c.algorithm.num_members
    slots = c.generator.count * c.generator.concurrency
    if slots > admitted:
        found.append(
            f"the engines have {slots} slots, but admission lets at most {admitted} members be generated ahead, so "
            "some stay empty. Raise buffer.max_staleness or learner.groups_per_step, or lower generator.concurrency."
        )
    if c.buffer.max_staleness == 0:
        found.append("S = 0 is the synchronous loop: generators and learner take turns.")
    if c.data.epochs and (steps := c.data.epochs * num_train // c.learner.groups_per_step) < c.run.max_steps:
        found.append(f"the data ends after {_count(steps, 'step')}, before run.max_steps={c.run.max_steps}.")
    if num_gpus and not c.generator.gpus and not c.learner.gpus:
        found.append(f"{_count(num_gpus, 'GPU')} here, and none is used; set generator.gpus and learner.gpus.")
    return tuple(found)


def _check_data(c: Config, kind: str, *, quick: bool) -> tuple[str, int]:
    """A line about the data, and the number of training prompts."""
    if c.data.source == "reasoning_gym" and quick:
        few = msgspec.structs.replace(
            c,
            data=msgspec.structs.replace(c.data, size=min(c.data.size, _QUICK_DRAWS)),
            eval=msgspec.structs.replace(c.eval, num_prompts=min(c.eval.num_prompts, 1)),
        )
        _check_lengths(c, kind, load_examples(few))
        return f"reasoning-gym {c.data.task}: {c.data.size:,} draws, {c.eval.num_prompts:,} held out", c.data.size
    sets = load_examples(c)
    num_train = _check_lengths(c, kind, sets)
    text = f"{num_train:,} training prompts, {len(sets.held_out):,} held out"
    if left_out := len(sets.train) - num_train:
        text += f", {left_out:,} longer than data.max_prompt_tokens"
    if c.data.source != "reasoning_gym":
        return f"{c.data.path}: {text}", num_train
    return f"reasoning-gym {c.data.task}: {text}, from {c.data.size:,} draws", num_train


def _check_lengths(c: Config, kind: str, sets: ExampleSets) -> int:
    """Number of training prompts within data.max_prompt_tokens, as far as that is known without a tokenizer."""
    if kind != "base":
        return len(sets.train)
    from actors.prompts import within_length  # numpy

    # The base model has one token a character, and one in front.
    kept = within_length(c, sets.train, [len(e.text) + 1 for e in sets.train], kind="training")
    within_length(c, sets.held_out, [len(e.text) + 1 for e in sets.held_out], kind="held-out")
    return len(kept)


def _check_cluster(address: str) -> None:
    """Refuse the address of a cluster that does not answer; Ray itself would try for a minute. `auto` is Ray's to find.

    Raises:
        ConfigError: naming the address and the remedy.
    """
    if address == "auto":
        return
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in host:
        raise ConfigError(
            f"ray.address ({address}): must be the host:port that `ray start --head` prints, or auto, because this "
            "machine has to be a node of the cluster. Leave it out to start a cluster for this run."
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CLUSTER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray.address ({address}): no Ray cluster answers there ({error}). Start one with `ray start --head`, or "
            "leave it out to start one for this run."
        ) from None


def _check_host(host: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"network.host ({host}): no socket can listen there: {error.strerror}. Set it to an address of this "
                "machine, as `hostname -I` lists them, or to 127.0.0.1."
            ) from None


# -- GPUs --


def _check_gpus(c: Config) -> int:
    """The number of GPUs of this machine; 0 when none is asked for and there is no cheap way to know."""
    wanted = gpus_wanted(c)
    if c.ray.address:  # the cluster's GPUs, not this machine's
        return 0
    there = count_gpus(ask_torch=wanted > 0)
    if wanted > there:
        raise ConfigError(
            f"generator.gpus ({c.generator.gpus:g}) x {c.generator.count} generators + learner.gpus "
            f"({c.learner.gpus:g}) x {c.learner.ranks} ranks: {wanted:g} GPUs are asked for and there "
            f"{'is' if there == 1 else 'are'} {there}. Ask for fewer, share one with a fraction, or set 0 for the CPU."
        )
    return there


def gpus_wanted(c: Config) -> float:
    """GPUs of all processes together; rounded, because 0.1 * 7 + 0.3 is more than 1."""
    return round(c.generator.count * c.generator.gpus + c.learner.ranks * c.learner.gpus, 6)


def count_gpus(*, ask_torch: bool) -> int:
    """GPUs this process may use: CUDA_VISIBLE_DEVICES, else nvidia-smi, else (slow, so only if `ask_torch`) torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
        except subprocess.TimeoutExpired:
            return 0
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    if not ask_torch:
        return 0
    import torch

    return torch.cuda.device_count()


# -- sizes --


def _num_parameters(c: Config, kind: str) -> int | None:
    """Of a base model by its shape, of a folder or GGUF file by its size; None for a hub name."""
    if kind == "base":
        w = c.model.warm_up
        return (
            w.num_layers * (4 * w.hidden_size**2 + 3 * w.hidden_size * 4 * w.hidden_size)
            + 2 * _VOCABULARY * w.hidden_size
        )
    path = pathlib.Path(c.model.path).expanduser()
    if kind == "folder":
        dtype = json.loads((path / "config.json").read_text(encoding="utf-8")).get("dtype") or "float32"
        return sum(f.stat().st_size for f in path.glob("*.safetensors")) // (4 if "32" in str(dtype) else 2)
    return None


def model_bytes(c: Config) -> int | None:
    """Bytes of one version of the weights as they are published; None for a model that is not here yet."""
    parameters = _num_parameters(c, model_kind(c))
    return None if parameters is None else parameters * _DTYPE_BYTES[c.model.dtype]


def _parameters_text(parameters: int | None) -> str:
    if parameters is None:
        return "of unknown size"
    millions = parameters / 1e6
    return f"about {millions:,.1f}M parameters" if millions < 1000 else f"about {millions / 1000:,.1f}B parameters"


def _weights_text(c: Config, parameters: int | None) -> str:
    size = "all" if parameters is None else _bytes(parameters * _DTYPE_BYTES[c.model.dtype])
    interval = c.learner.publish_interval
    backend, _ = choose_backend(c, Placement.on_this_host())
    return f"{size} published every {'step' if interval == 1 else f'{interval} steps'} through {backend}"


def _device(gpus: float, threads: int) -> str:
    return f"{gpus:g} GPU" if gpus else f"CPU, {_count(threads, 'thread')}"


def _total(processes: Sequence[ProcessPlan]) -> int:
    return sum(p.count * p.num_bytes for p in processes)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
