"""The run directory: the names of its files, who may use it, and how its JSON files are written and read.

Invariants: `config.yaml` is created exclusively and first, so a directory belongs to one run; whole files are replaced
atomically; lines are appended whole, and a reader ignores a last line without its newline (it is still being written).
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

import msgspec

from streamrl.config import Config, dump_config
from streamrl.errors import ConfigError

CONFIG_FILE = "config.yaml"  # the resolved config
METRICS_FILE = "metrics.jsonl"  # one object per optimizer step
EVALS_FILE = "evals.jsonl"  # one object per evaluation on held-out prompts
EVENTS_FILE = "events.jsonl"  # starts, deaths, restarts, syncs
LEDGER_FILE = "ledger.json"  # BufferStats at the end of the run, written when it ends
STATUS_FILE = "status.json"  # the newest RunView, replaced while the run goes on
DELIVERY_FILE = "mlflow.json"  # how far MLflow has got
PLOT_FILE = "plot.png"
LOCK_FILE = ".lock"  # locked by the driver while the run lives
JOURNAL_DIR = "journal"  # of the buffer, with buffer.journal
LOGS_DIR = "logs"


def choose_run_dir(config: Config, *, now: datetime.datetime | None = None) -> pathlib.Path:
    """`run.dir`, or `runs/<name>-<time>` in the working directory; a number is added while that one is taken."""
    if config.run.dir:
        return pathlib.Path(config.run.dir).absolute()
    stamp = (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S")
    first = pathlib.Path("runs", f"{config.run.name}-{stamp}").absolute()
    candidate, number = first, 2
    while candidate.exists():
        candidate, number = first.with_name(f"{first.name}-{number}"), number + 1
    return candidate


def check_free(run_dir: pathlib.Path) -> None:
    """Refuse a directory that holds another run, or that could not be made.

    Raises:
        ConfigError: naming the directory and the remedy.
    """
    for name in (CONFIG_FILE, METRICS_FILE, LEDGER_FILE):
        if (run_dir / name).exists():
            raise ConfigError(
                f"run.dir ({run_dir}): holds another run ({name} is there). Name another with --run-dir, or none."
            )
    parent = run_dir
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(f"run.dir ({run_dir}): {parent} is a file, not a directory. Name another with --run-dir.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir ({run_dir}): {parent} is not writable. Name another with --run-dir.")


def create_run_dir(run_dir: pathlib.Path, config: Config) -> None:
    """Make the directory and claim it by creating `config.yaml` exclusively.

    Raises:
        ConfigError: if another run has it.
    """
    check_free(run_dir)
    try:
        (run_dir / LOGS_DIR).mkdir(parents=True, exist_ok=True)
        with open(run_dir / CONFIG_FILE, "x", encoding="utf-8") as file:
            file.write(dump_config(config))
    except FileExistsError:
        raise ConfigError(f"run.dir ({run_dir}): was just taken by another run. Name another with --run-dir.") from None
    except OSError as error:
        raise ConfigError(f"run.dir ({run_dir}): cannot be made: {error}. Name another with --run-dir.") from None


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replace the file by `value` (plain data, dataclasses or msgspec structs) atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
    os.replace(temporary, path)


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One JSON line. Numbers that JSON does not have (nan, inf) become null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return msgspec.json.encode(plain) + b"\n"


def lock_run_dir(run_dir: pathlib.Path) -> IO[bytes]:
    """Hold the run directory until the returned file is closed or this process is dead, however it dies.

    Raises:
        ConfigError: if another process holds it: the run is alive.
    """
    file = open(run_dir / LOCK_FILE, "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"RUN ({run_dir}): this run is still going. Wait for its end, or stop it.") from None
    return file


def is_alive(run_dir: pathlib.Path) -> bool:
    """Whether a driver holds the run directory."""
    if not (run_dir / LOCK_FILE).exists():
        return False
    try:
        lock_run_dir(run_dir).close()
    except ConfigError:
        return True
    return False


def read_lines(path: pathlib.Path, *, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The records from byte `offset` on, each with the offset that follows it; a line that is not JSON is skipped."""
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        while (line := file.readline()).endswith(b"\n"):
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record, offset
