"""A process that computes rewards, one at a time: the child of `actors.rewards.RewardWorker`.

Consumes requests on standard input and produces answers on a copy of standard output: each is a length in four bytes,
little end first, and that many bytes of msgpack. The first request says what to compute; its answer, that it can be
computed. Waits only for the next request; the end of input, or the death of the parent, ends it. Imports neither torch
nor vllm.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from streamrl.errors import ConfigError
from streamrl.examples import open_task, restore

_PR_SET_PDEATHSIG = 1


class RewardSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first request."""

    kind: str  # RewardConfig.kind
    function: str
    task: str
    task_args: dict[str, Any]
    parent: int  # process id


class RewardRequest(msgspec.Struct, frozen=True, array_like=True):
    """Every other request."""

    task: dict[str, Any]  # Prompt.task
    response: str


class RewardAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a request; to the setup, `reward` means nothing."""

    reward: float = 0.0
    parts: dict[str, float] = {}
    reason: str = ""  # "", "reward_error", "reward_not_finite", or "config"
    detail: str = ""


Scorer = Callable[[dict[str, Any], str], Any]


def make_scorer(setup: RewardSetup) -> Scorer:
    """`scorer(task, response)` for `reward.kind`, giving a number or (number, named parts).

    Raises:
        ConfigError: the function or task cannot be had.
    """
    if setup.kind == "exact_match":
        return lambda task, response: float(response.strip() == task["answer"].strip())
    if setup.kind == "python":
        return _python_scorer(setup.function)
    dataset = open_task(setup.task, setup.task_args, seed=0, size=1)
    return lambda task, response: dataset.score_answer(response.strip(), restore(task["entry"]))


def _python_scorer(path: str) -> Scorer:
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            f"reward.function ({path}): cannot be imported: {type(error).__name__}: {error}. Name `module:function`, "
            "with the module in the working directory or on PYTHONPATH."
        ) from None
    if not callable(function):
        raise ConfigError(f"reward.function ({path}): is not a function.")
    return lambda task, response: function(prompt=task["prompt"], response=response, answer=task["answer"], task=task)


def score(scorer: Scorer, request: RewardRequest) -> RewardAnswer:
    """One reward; what the scorer raises becomes an answer."""
    try:
        value = scorer(request.task, request.response)
        number, named = value if isinstance(value, tuple) else (value, {})
        reward, parts = float(number), {str(name): float(part) for name, part in named.items()}
    except Exception as error:  # isolating a reward's failure is the purpose of this process
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        return RewardAnswer(reason="reward_error", detail=f"{type(error).__name__}: {error} ({where})")
    if not all(map(math.isfinite, (reward, *parts.values()))):
        return RewardAnswer(reason="reward_not_finite", detail=f"reward {reward!r}, parts {parts!r}")
    return RewardAnswer(reward=reward, parts=parts)


def main() -> None:
    """Serve until the end of input."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints must not get between the answers
    setup = msgspec.msgpack.decode(_read(requests) or b"", type=RewardSetup)
    _die_with(setup.parent)
    encode = msgspec.msgpack.Encoder().encode
    try:
        scorer = make_scorer(setup)
    except ConfigError as error:
        _write(answers, encode(RewardAnswer(reason="config", detail=str(error))))
        return
    _write(answers, encode(RewardAnswer()))
    decoder = msgspec.msgpack.Decoder(RewardRequest)
    while (frame := _read(requests)) is not None:
        _write(answers, encode(score(scorer, decoder.decode(frame))))


def _die_with(parent: int) -> None:
    """A reward that never returns cannot notice the end of input, so the kernel has to end it with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _read(file: BinaryIO) -> bytes | None:
    head = file.read(4)
    return file.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None


def _write(file: BinaryIO, payload: bytes) -> None:
    file.write(struct.pack("<I", len(payload)) + payload)
    file.flush()


if __name__ == "__main__":
    main()
