"""The question-answer pairs of a run: read, checked, and split into training and held-out examples.

Everything that needs the run's data starts here: the prompt source, the evaluation, the warm-up of the base model, and
the check before anything starts. Imports neither torch nor transformers; lengths in tokens are judged in
actors/prompts.py.

Invariants: the same config gives the same examples in the same order on every machine; no held-out prompt text occurs
among the training examples; training texts are distinct.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.template import Template

# Draws per wanted held-out example before a reasoning-gym task counts as too small to have that many distinct prompts.
_DRAWS_PER_EXAMPLE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One question of the run's data.

    Example: Example(text="sun=", answer="nus", task={"prompt": "sun=", "answer": "nus", "entry": {...}}).
    """

    text: str  # the prompt as the model sees it, before tokenization
    answer: str | None  # the reference answer, if the data has one
    task: dict[str, Any] = field(default_factory=dict)  # what the reward needs; msgpack-able


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleSets:
    """The data of a run, split."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    num_duplicates: int  # training rows dropped because an earlier row has the same text
    num_leaked: int  # training rows dropped because a held-out prompt, another row, has the same text


def load_examples(config: Config) -> ExampleSets:
    """Read and split the data that `config.data` and `config.eval` name.

    A reasoning-gym task: `data.size` training draws by `run.seed`, and `eval.num_prompts` distinct held-out draws that
    do not depend on the seed, so that runs with different seeds are evaluated on the same prompts. A file: held-out
    prompts are the first `eval.num_prompts` distinct rows of `data.eval_path`, or else the last ones of `data.path`.

    Raises:
        ConfigError: naming the setting or the file and line, the rule and the remedy.
    """
    num_held_out = config.eval.num_prompts
    if config.data.source == "reasoning_gym":
        held_out = _distinct(_draw_held_out(config), num_held_out)
        if len(held_out) < num_held_out:
            raise ConfigError(
                f"eval.num_prompts ({num_held_out}): data.task={config.data.task} gave only {len(held_out)} distinct "
                f"prompts in {num_held_out * _DRAWS_PER_EXAMPLE} draws. "
                f"Set eval.num_prompts={max(len(held_out) // 4, 1)}, or widen data.task_args."
            )
        train: Iterable[Example] = _draw(config, split="train", count=config.data.size)
    else:
        rows = list(read_file(config, pathlib.Path(config.data.path), setting="data.path"))
        if config.data.eval_path:
            eval_rows = read_file(config, pathlib.Path(config.data.eval_path), setting="data.eval_path")
            held_out = _distinct(eval_rows, num_held_out)
        else:
            held_out = _distinct(reversed(rows), num_held_out)[::-1]
        train = rows
    own_file = config.data.source != "reasoning_gym" and not config.data.eval_path
    return _split(config, train, held_out, num_set_apart=len(held_out) if own_file else 0)


def _split(config: Config, rows: Iterable[Example], held_out: list[Example], *, num_set_apart: int) -> ExampleSets:
    """`num_set_apart`: how many of the held-out examples are among the rows themselves."""
    held_out_texts = {e.text for e in held_out}
    train: dict[str, Example] = {}
    num_rows = num_leaked = 0
    for num_rows, row in enumerate(rows, start=1):  # noqa: B007
        if row.text in held_out_texts:
            num_leaked += 1
        else:
            train.setdefault(row.text, row)
    if not train:
        where = "data.task_args" if config.data.source == "reasoning_gym" else f"data.path ({config.data.path})"
        raise ConfigError(
            f"{where}: none of the {num_rows} rows is left for training once the {len(held_out)} held-out prompts are "
            "set apart. Set eval.num_prompts lower, or name more data."
        )
    return ExampleSets(
        train=tuple(train.values()),
        held_out=tuple(held_out),
        num_duplicates=num_rows - num_leaked - len(train),
        num_leaked=num_leaked - num_set_apart,
    )


def _distinct(rows: Iterable[Example], count: int) -> list[Example]:
    """The first `count` rows with distinct texts, or as many as there are."""
    chosen: dict[str, Example] = {}
    for row in rows if count else ():
        chosen.setdefault(row.text, row)
        if len(chosen) == count:
            break
    return list(chosen.values())


# -- reasoning-gym --


def open_task(name: str, task_args: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """The reasoning-gym data set `name`.

    Raises:
        ConfigError: for an unknown name or arguments the task refuses.
    """
    import reasoning_gym  # a second to import, so only where a task is used
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"data.task ({name!r}): no such reasoning-gym task. {hint}There are: {', '.join(sorted(DATASETS))}."
        )
    reserved = sorted({"seed", "size"} & task_args.keys())
    if reserved:
        raise ConfigError(
            f"data.task_args.{reserved[0]} ({task_args[reserved[0]]!r}): set by streamrl. Use run.seed and data.size."
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **task_args)
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        fields = [f for f in DATASETS[name][1].__dataclass_fields__ if f not in ("seed", "size")]
        raise ConfigError(
            f"data.task_args ({dict(task_args)!r}): refused by {name}: {error}. Its arguments are: {', '.join(fields)}."
        ) from None


def _draw(config: Config, *, split: str, count: int) -> Iterator[Example]:
    # reasoning-gym draws entry i with Random(seed + i), so neighbouring seeds give the same entries shifted by one;
    # seeds from a hash lie far apart.
    salt = f"{split}/{config.run.seed if split == 'train' else ''}"
    seed = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:6])
    dataset = open_task(config.data.task, config.data.task_args, seed=seed, size=count)
    template = Template(config.data.template)
    for index in range(count):
        entry = dataset[index]
        text = template.render(
            {**entry["metadata"], "prompt": entry["question"]}, where=f"data.task={config.data.task}"
        )
        answer = None if entry["answer"] is None else str(entry["answer"])
        yield Example(text=text, answer=answer, task={"prompt": text, "answer": answer, "entry": plain(entry)})


def _draw_held_out(config: Config) -> Iterator[Example]:
    return _draw(config, split="held-out", count=config.eval.num_prompts * _DRAWS_PER_EXAMPLE)


def plain(value: Any) -> Any:
    """`value` in types that msgpack keeps; tuples, which some verifiers tell from lists, are marked. See `restore`."""
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, tuple):
        return {"__tuple__": [plain(child) for child in value]}
    if isinstance(value, list):
        return [plain(child) for child in value]
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    return value


def restore(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(restore(child) for child in value["__tuple__"])
        return {key: restore(child) for key, child in value.items()}
    if isinstance(value, list):
        return [restore(child) for child in value]
    return value


# -- files --


def read_file(config: Config, path: pathlib.Path, *, setting: str) -> Iterator[Example]:
    """Rows of a JSONL or Parquet file, by `data.source`.

    Raises:
        ConfigError: for a missing, unreadable or empty file, a missing column, a row that is not text.
    """
    data = config.data
    template = Template(data.template)
    wants_all = config.reward.kind == "python"  # a function of the user's may look at any column
    columns = {data.prompt_column, *template.names - {"prompt"}} | (
        {data.answer_column} if data.answer_column else set()
    )
    rows = (_jsonl_rows if data.source == "jsonl" else _parquet_rows)(path, setting, columns, wants_all)
    empty = True
    for where, row in rows:
        empty = False
        prompt = _text(row[data.prompt_column], data.prompt_column, where)
        answer = _text(row[data.answer_column], data.answer_column, where) if data.answer_column else None
        text = template.render({**row, "prompt": prompt}, where=where)
        task: dict[str, Any] = {"prompt": text, "answer": answer}
        if wants_all:
            task["row"] = row
        yield Example(text=text, answer=answer, task=task)
    if empty:
        raise ConfigError(f"{setting} ({path}): has no rows. Name a file with at least one prompt.")


def _text(value: Any, column: str, where: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: column {column} must be a text that is not empty, not {value!r}. Correct the row.")
    return value


def _jsonl_rows(
    path: pathlib.Path, setting: str, columns: set[str], wants_all: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    decoder = msgspec.json.Decoder()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{setting} ({path}), line {number}"
                try:
                    row = decoder.decode(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"{where}: not UTF-8 ({error.reason} at byte {error.start}). Save it as UTF-8."
                    ) from None
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{where}: not JSON ({error}). Each line must be one JSON object.") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{where}: must be a JSON object, not {type(row).__name__}.")
                for column in columns - row.keys():
                    raise _no_column(where, column, row)
                yield where, row if wants_all else {column: row[column] for column in columns}
    except OSError as error:
        raise _unreadable(setting, path, error) from None


def _parquet_rows(
    path: pathlib.Path, setting: str, columns: set[str], wants_all: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for column in columns - set(names):
                raise _no_column(f"{setting} ({path})", column, names)
            wanted = None if wants_all else sorted(columns)
            batches = file.iter_batches(batch_size=8192, columns=wanted)
            for number, row in enumerate(itertools.chain.from_iterable(b.to_pylist() for b in batches), start=1):
                yield f"{setting} ({path}), row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(setting, path, error) from None


def _no_column(where: str, column: str, present: Iterable[str]) -> ConfigError:
    names = list(present)
    near = difflib.get_close_matches(column, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"{where}: has no column {column}. {hint}It has: {', '.join(names)}. Set data.prompt_column, "
        "data.answer_column or data.template to columns that are there."
    )


def _unreadable(setting: str, path: pathlib.Path, error: Exception) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        return ConfigError(
            f"{setting} ({path}): no such file. Name a file that exists; paths start at the working directory."
        )
    return ConfigError(f"{setting} ({path}): cannot be read: {' '.join(str(error).split())}.")
