"""Rewards in processes of their own: right answers, time limits, failures that stay theirs."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import pytest

from actors.rewards import RewardWorker, check_reward
from streamrl.config import Config, config_from_tree
from streamrl.errors import ClosedError, ConfigError, RewardError
from streamrl.examples import load_examples

T = TypeVar("T")

FUNCTIONS = """
import os, subprocess, sys, time

def length(prompt, response, answer, task):
    return len(response)

def arguments(prompt, response, answer, task):
    assert (prompt, answer, task["row"]) == ("2+2=", "4", {"level": 1}), (prompt, answer, task)
    return 0.5, {"short": 1, "polite": 0.25}

def by_command(prompt, response, answer, task):
    print("a verifier that prints", flush=True)
    if response == "stuck":
        while True:
            pass
    if response == "stuck child":
        subprocess.run(["sleep", "600"])
    if response == "die":
        os._exit(7)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "nan":
        return float("nan")
    if response == "text":
        return "good"
    if response == "slow":
        time.sleep(0.3)
    if response == "modules":
        return float(any(name in sys.modules for name in ("torch", "transformers", "vllm")))
    return float(os.getpid())

not_a_function = 3
"""


@pytest.fixture
def functions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "functions_of_a_user.py").write_text(FUNCTIONS)
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "functions_of_a_user"


def config_for(kind: str, *, function: str = "", timeout_s: float = 5.0, workers: int = 1) -> Config:
    return config_from_tree(
        {
            "data": {"task": "spell_backward", "size": 5},
            "eval": {"num_prompts": 0},
            "reward": {"kind": kind, "function": function, "timeout_s": timeout_s, "workers": workers},
        }
    )


def with_worker(config: Config, use: Callable[[RewardWorker], Awaitable[T]]) -> T:
    """Run `use` with a started worker, and close it."""

    async def main() -> T:
        worker = RewardWorker(config)
        try:
            await worker.start()
            return await use(worker)
        finally:
            await worker.close()

    return asyncio.run(main())


def task_of(answer: str = "4") -> dict[str, Any]:
    return {"prompt": "2+2=", "answer": answer, "row": {"level": 1}}


async def reason_of(scoring: Awaitable[Any]) -> str:
    with pytest.raises(RewardError) as caught:
        await scoring
    return f"{caught.value.reason}: {caught.value}"


def test_an_exact_match_ignores_space_around_the_answer() -> None:
    async def use(worker: RewardWorker) -> list[tuple[float, dict[str, float]]]:
        return [await worker.score(task_of(), response) for response in ("4", " 4\n", "44", "")]

    assert with_worker(config_for("exact_match"), use) == [(1.0, {}), (1.0, {}), (0.0, {}), (0.0, {})]


def test_the_verifier_of_a_task_scores_its_own_answers_one() -> None:
    config = config_for("task")
    examples = load_examples(config).train

    async def use(worker: RewardWorker) -> list[tuple[float, float]]:
        return [
            ((await worker.score(e.task, e.answer or ""))[0], (await worker.score(e.task, ""))[0]) for e in examples
        ]

    assert with_worker(config, use) == [(1.0, 0.0)] * len(examples)


def test_a_function_gets_its_arguments_and_may_name_parts(functions: str) -> None:
    result = with_worker(config_for("python", function=f"{functions}:arguments"), lambda w: w.score(task_of(), "5"))
    assert result == (0.5, {"short": 1.0, "polite": 0.25})


def test_failures_have_reasons_and_leave_the_worker_able_to_score(functions: str) -> None:
    async def use(worker: RewardWorker) -> None:
        first, _ = await worker.score(task_of(), "pid")
        assert (await reason_of(worker.score(task_of(), "raise"))).startswith("reward_error: KeyError: 'no such thing'")
        assert (await reason_of(worker.score(task_of(), "text"))).startswith(
            "reward_error: ValueError: could not convert"
        )
        assert (await reason_of(worker.score(task_of(), "nan"))).startswith("reward_not_finite: reward nan")
        assert (await worker.score(task_of(), "pid"))[0] == first, "an ordinary failure does not cost a process"

    with_worker(config_for("python", function=f"{functions}:by_command"), use)


@pytest.mark.parametrize("response", ["stuck", "stuck child"])
def test_a_stuck_reward_is_killed_and_its_process_replaced(response: str, functions: str) -> None:
    async def use(worker: RewardWorker) -> None:
        stuck = int((await worker.score(task_of(), "pid"))[0])
        begun = time.monotonic()
        assert (await reason_of(worker.score(task_of(), response))).startswith("reward_timeout: no answer within 0.4 s")
        assert time.monotonic() - begun < 3.0
        fresh = int((await worker.score(task_of(), "pid"))[0])
        assert fresh != stuck and not psutil.pid_exists(stuck)
        sleepers = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]
        assert not sleepers, "what a reward started must die with it"

    with_worker(config_for("python", function=f"{functions}:by_command", timeout_s=0.4), use)


def test_a_reward_that_ends_its_process_is_an_error_of_its_own(functions: str) -> None:
    async def use(worker: RewardWorker) -> None:
        assert (
            await reason_of(worker.score(task_of(), "die")) == "reward_error: the reward process died with exit code 7"
        )
        assert (await worker.score(task_of(), "pid"))[0] > 0

    with_worker(config_for("python", function=f"{functions}:by_command"), use)


def test_scores_of_many_callers_do_not_mix(functions: str) -> None:
    async def use(worker: RewardWorker) -> list[float]:
        return [r for r, _ in await asyncio.gather(*(worker.score(task_of(), "x" * n) for n in range(200)))]

    config = config_for("python", function=f"{functions}:length", workers=2)
    assert with_worker(config, use) == [float(n) for n in range(200)]


def test_whoever_asks_first_is_scored_first(functions: str) -> None:
    async def use(worker: RewardWorker) -> int:
        """Scores of one caller who asks again and again, until that of another who asked in between is there."""
        num_scored = 0

        async def ask_again() -> None:
            nonlocal num_scored
            while num_scored < 50:
                await worker.score(task_of(), "x")
                num_scored += 1

        greedy = asyncio.create_task(ask_again())
        await asyncio.sleep(0)  # it has the only process now
        await worker.score(task_of(), "x")
        passed = num_scored
        await greedy
        return passed

    assert with_worker(config_for("python", function=f"{functions}:length"), use) <= 2


def test_a_cancelled_score_leaves_no_answer_behind_and_costs_no_process(functions: str) -> None:
    """A group that grows stale while it is scored is cancelled; starting a process for each would cost a second."""

    async def use(worker: RewardWorker) -> None:
        before, _ = await worker.score(task_of(), "pid")
        scoring = asyncio.create_task(worker.score(task_of(), "slow"))
        await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert (await worker.score(task_of(), "modules"))[0] == 0.0, "the answer of another request"
        assert (await worker.score(task_of(), "pid"))[0] == before

    with_worker(config_for("python", function=f"{functions}:by_command"), use)


def test_several_workers_score_at_once(functions: str) -> None:
    async def use(worker: RewardWorker) -> float:
        begun = time.monotonic()
        pids = await asyncio.gather(*(worker.score(task_of(), "slow") for _ in range(3)))
        assert len({pid for pid, _ in pids}) == 3
        return time.monotonic() - begun

    assert with_worker(config_for("python", function=f"{functions}:by_command", workers=3), use) < 0.85


def test_a_reward_process_imports_no_model_library(functions: str) -> None:
    config = config_for("python", function=f"{functions}:by_command")
    assert with_worker(config, lambda w: w.score(task_of(), "modules")) == (0.0, {})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "no_such_module_here:score",
            r"reward\.function \(no_such_module_here:score\): cannot be imported: ModuleNotFound",
        ),
        ("functions_of_a_user:missing", r"cannot be imported: AttributeError"),
        ("functions_of_a_user:not_a_function", r"is not a function"),
        ("module_that_exits:score", r"a process that imports it does not start"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_before_the_run(function: str, message: str, functions: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_reward(config_for("python", function=function))


def test_a_function_that_can_be_had_passes_the_check(functions: str) -> None:
    check_reward(config_for("python", function=f"{functions}:length"))


def test_closing_ends_every_process_and_every_wait(functions: str) -> None:
    async def main() -> None:
        worker = RewardWorker(config_for("python", function=f"{functions}:by_command", timeout_s=60.0))
        await worker.start()
        pid = int((await worker.score(task_of(), "pid"))[0])
        stuck, waiting = (asyncio.create_task(worker.score(task_of(), text)) for text in ("stuck", "pid"))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(worker.close(), 5.0)
        assert not psutil.pid_exists(pid)
        assert await reason_of(stuck) == "reward_error: the reward process died with exit code -9"
        for scoring in (waiting, worker.score(task_of(), "pid")):
            with pytest.raises(ClosedError):
                await scoring

    asyncio.run(main())


def test_a_stuck_reward_process_dies_with_its_killed_parent(functions: str, tmp_path: pathlib.Path) -> None:
    program = (
        "import asyncio, sys, test_rewards as t\n"
        "async def main():\n"
        "    worker = t.RewardWorker(t.config_for('python', function='functions_of_a_user:by_command', timeout_s=60))\n"
        "    await worker.start()\n"
        "    print(int((await worker.score(t.task_of(), 'pid'))[0]), flush=True)\n"
        "    await worker.score(t.task_of(), 'stuck')\n"
        "asyncio.run(main())\n"
    )
    path = os.pathsep.join([str(tmp_path), str(pathlib.Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    child.wait(5)  # raises if it is still there
