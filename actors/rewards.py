"""Rewards off the event loop: a pool of processes, each computing one reward at a time under a time limit.

Consumes (task, response text); produces (reward, named parts), or a `RewardError` whose reason says what went wrong:
`reward_timeout`, `reward_error` or `reward_not_finite`. Invariants: an answer always belongs to its request, because a
process whose request timed out is killed and replaced, and one whose caller was cancelled is asked again only after its
answer; turns are taken in the order of asking.

Waits: `score` for a free process (ended by the scores before it, each within reward.timeout_s), for a replacement to
start (_START_TIMEOUT_S), and for its answer (reward.timeout_s). `start` for every process (_START_TIMEOUT_S). `close`
for killed processes (ended by the kernel).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from typing import Any

import msgspec

from actors.reward_process import RewardAnswer, RewardRequest, RewardSetup
from streamrl.config import Config
from streamrl.errors import ClosedError, ConfigError, RewardError, StreamrlError

# Importing reasoning-gym takes a second alone, and many on a machine whose cores are taken.
_START_TIMEOUT_S = 60.0

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RewardAnswer)


class _Process:
    """One reward process, started; asked from one task at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._killed = False

    @classmethod
    async def start(cls, setup: RewardSetup) -> _Process:
        """Start one and wait until it can score.

        Raises:
            ConfigError: what `setup` names cannot be had.
            RewardError: it did not start.
        """
        process = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "actors.reward_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # so that a kill reaches what a reward itself started, and Ctrl-C does not
                # What can be imported here can be imported there, the user's reward function too.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        )
        try:
            answer = await process.ask(_encode(setup), timeout_s=_START_TIMEOUT_S)
            if answer.reason:
                raise ConfigError(answer.detail)
        except StreamrlError:
            await process.close()
            raise
        return process

    async def ask(self, request: bytes, *, timeout_s: float) -> RewardAnswer:
        """Send a request, wait for its answer. A process that did not answer is killed, whatever the cause."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(struct.pack("<I", len(request)) + request)
                await stdin.drain()
                (length,) = struct.unpack("<I", await stdout.readexactly(4))
                answer = _decoder.decode(await stdout.readexactly(length))
            answered = True
            return answer
        except TimeoutError:
            raise RewardError(
                f"no answer within {timeout_s:g} s; the process was killed", reason="reward_timeout"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            raise RewardError(f"the reward process died with exit code {code}", reason="reward_error") from None
        finally:
            if not answered:
                self.kill()

    def kill(self) -> None:
        """Kill it and its descendants."""
        self._killed = True
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended just now

    async def close(self) -> None:
        """Kill it, wait until the kernel has removed it, and close the pipes."""
        self.kill()
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(ConnectionError):  # the other end is gone, as it should be
            await self._process.stdin.wait_closed()

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.returncode is None


class RewardWorker:
    """Scores responses for one generator.

    Example: `await worker.score(lease.task, "nus")` gives (1.0, {}).
    """

    def __init__(self, config: Config) -> None:
        self._timeout_s = config.reward.timeout_s
        self._setup = RewardSetup(
            kind=config.reward.kind,
            function=config.reward.function,
            task=config.data.task,
            task_args=config.data.task_args,
            parent=os.getpid(),
        )
        self._num_workers = config.reward.workers
        # A slot may hold a dead process; whoever takes it starts another. Turns are taken in the order of asking: a
        # queue of free slots would let whoever comes at the right moment pass all who wait.
        self._slots: list[_Process] = []
        self._turns = asyncio.Semaphore(0)
        self._processes: set[_Process] = set()
        self._asking: set[asyncio.Task[RewardAnswer]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start every process.

        Raises:
            ConfigError: reward.function or data.task cannot be had.
            RewardError: a process did not start in time.
        """
        starts = (self._start_process() for _ in range(self._num_workers))
        for started in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(started, BaseException):
                raise started
            self._slots.append(started)
            self._turns.release()

    async def score(self, prompt_task: dict[str, Any], response_text: str) -> tuple[float, dict[str, float]]:
        """The reward of one response and its named parts.

        Raises:
            RewardError: with a reason: `reward_timeout`, `reward_error` or `reward_not_finite`.
            ClosedError: after `close`.
        """
        request = _encode(RewardRequest(prompt_task, response_text))
        if self._closed:
            raise ClosedError("the reward worker is closed")
        await self._turns.acquire()
        # A task of its own: a caller that is cancelled leaves at once, and the process stays for the next one.
        asking = asyncio.create_task(self._ask(request))
        self._asking.add(asking)
        asking.add_done_callback(self._on_asked)
        answer = await asyncio.shield(asking)
        if answer.reason:
            raise RewardError(answer.detail, reason=answer.reason)
        return answer.reward, answer.parts

    async def _ask(self, request: bytes) -> RewardAnswer:
        process = self._slots.pop()
        try:
            if not process.alive:
                await process.close()
                self._processes.discard(process)
                process = await self._start_process()
            return await process.ask(request, timeout_s=self._timeout_s)
        except ConfigError as error:
            raise RewardError(f"the reward process did not start again: {error}", reason="reward_error") from None
        finally:
            self._slots.append(process)
            self._turns.release()

    def _on_asked(self, asking: asyncio.Task[RewardAnswer]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # seen, whether or not the caller is still there

    async def close(self) -> None:
        """Kill every process; a score in progress fails with `reward_error`, later ones with ClosedError."""
        self._closed = True
        await asyncio.gather(*(process.close() for process in self._processes))
        await asyncio.gather(*self._asking, return_exceptions=True)
        self._processes.clear()

    async def _start_process(self) -> _Process:
        if self._closed:
            raise ClosedError("the reward worker is closed")
        process = await _Process.start(self._setup)
        self._processes.add(process)
        return process


def check_reward(config: Config) -> None:
    """Start the reward processes and end them, to learn before anything else starts whether they can score.

    Raises:
        ConfigError: reward.function or data.task cannot be had, or its process does not start.
    """

    async def start_and_close() -> None:
        worker = RewardWorker(config)
        try:
            await worker.start()
        finally:
            await worker.close()

    try:
        asyncio.run(start_and_close())
    except RewardError as error:
        raise ConfigError(
            f"reward.function ({config.reward.function}): a process that imports it does not start: {error}. "
            "Its module must be imported within a minute, and must not end the process."
        ) from None
