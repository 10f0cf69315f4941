"""The desk where learner ranks ask for their shard of a step, chunk by chunk.

A step at version v has one batch of B groups. Chunk k of it is groups [k * c, (k + 1) * c) in the order of sampling, c
being `learner.stream_groups` or, without it, B: it is sampled when the first rank asks for it and c groups are there,
cut once, and kept until a later version is asked for. So whoever asks first, or again after a reconnect, or a desk
that was opened anew on the journal, gets the same. The bound is checked by `ReplayBuffer.sample` for every chunk; the
version does not move inside a step. No sockets: `answers` says what to send. Blocking: nothing; a rank that asks stays
at the desk until generators complete its chunk, or the data cannot complete the batch any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from buffers.replay import ReplayBuffer
from buffers.shards import Shard, StepCut
from streamrl import wire
from streamrl.errors import DeadlineExceededError
from streamrl.records import BufferStats, Wait


@dataclass(slots=True)
class _Waiting:
    peer: str
    request: int
    policy_version: int
    chunk: int
    since: float  # unix time


class ShardDesk:
    """One desk per buffer server.

    Args:
        groups_per_step: B.
        stream_groups: c; 0 hands out the whole batch at once.
        ranks: number of learner ranks, w.
        exhausted: whether no prompt will ever be issued again.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        groups_per_step: int,
        stream_groups: int = 0,
        ranks: int,
        exhausted: Callable[[], bool],
    ) -> None:
        self._buffer = buffer
        self._groups_per_step = groups_per_step
        self._chunk_size = stream_groups or groups_per_step
        self._ranks = ranks
        self._exhausted = exhausted
        self._waiting: dict[int, _Waiting] = {}  # by rank
        self._version = -1  # that of `_step`
        self._step = self._new_step()

    def ask(self, rank: int, peer: str, request: wire.Sample) -> None:
        """A later request of a rank replaces an earlier one."""
        self._waiting[rank] = _Waiting(peer, request.request, request.policy_version, request.chunk, time.time())

    def leave(self, rank: int) -> None:
        """The rank is gone and waits no more."""
        self._waiting.pop(rank, None)

    def answers(self) -> list[tuple[str, list[wire.Frame]]]:
        """(peer, message) for every rank whose chunk is complete, or can never be, or comes too early."""
        if not self._waiting:
            return []
        version = max(waiting.policy_version for waiting in self._waiting.values())
        if self._version != version:
            self._version, self._step = version, self._new_step()
            self._step.extend(self._buffer.sampled_at(version))
        step = self._step
        asked = {rank: waiting for rank, waiting in self._waiting.items() if waiting.policy_version == version}
        ended = False
        if step.missing and any(waiting.chunk == step.num_chunks for waiting in asked.values()):
            ended = not self._sample_next()
        answers: list[tuple[str, list[wire.Frame]]] = []
        for rank, waiting in asked.items():
            if waiting.chunk < step.num_chunks:
                answers += _shard_messages(waiting, step.shard(waiting.chunk, rank))
            elif waiting.chunk > step.num_chunks or not step.missing:
                detail = f"chunk {waiting.chunk} of step {version}, of which {step.num_chunks} were handed out"
                answers.append(_answer(waiting, "refused", detail))
            elif ended:
                answers.append(_answer(waiting, "end"))
            else:
                continue
            del self._waiting[rank]
        return answers

    def waits(self, stats: BufferStats) -> list[Wait]:
        """Who stands at the desk, and for what."""
        missing = max(1, (self._step.missing or self._chunk_size) - stats.buffered)
        return [
            Wait(waiter=w.peer, waiting_for=f"{missing} more groups", owner="generators", since=w.since)
            for w in self._waiting.values()
        ]

    def _new_step(self) -> StepCut:
        return StepCut(size=self._groups_per_step, chunk_size=self._chunk_size, world_size=self._ranks)

    def _sample_next(self) -> bool:
        """Sample the next chunk, if it is complete. False if the batch never will be."""
        step = self._step
        stats = self._buffer.stats()
        enough = stats.in_flight + stats.buffered >= step.missing_in_step
        if self._exhausted() and not enough:
            return False  # a chunk of it would only have to be given back
        try:
            step.extend(self._buffer.sample(step.missing, policy_version=self._version, timeout_s=0.0))
        except DeadlineExceededError:
            return stats.in_flight > 0 or not self._exhausted()
        return True


def _answer(waiting: _Waiting, status: str, detail: str = "") -> tuple[str, list[wire.Frame]]:
    return waiting.peer, wire.pack(wire.Answer(request=waiting.request, status=status, detail=detail))


def _shard_messages(waiting: _Waiting, shard: Shard) -> list[tuple[str, list[wire.Frame]]]:
    head = wire.ShardHead(
        request=waiting.request,
        num_shard_groups=len(shard.groups),
        num_groups=shard.num_groups,
        num_rollouts=shard.num_rollouts,
        num_tokens=shard.num_tokens,
        num_response_tokens=shard.num_response_tokens,
        is_last=shard.is_last,
    )
    messages = [wire.pack(head), *(wire.encode_group(group, request=waiting.request) for group in shard.groups)]
    return [(waiting.peer, message) for message in messages]
