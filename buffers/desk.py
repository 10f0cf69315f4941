"""The desk where learner ranks ask for their shard of a step.

A step at version v has one batch, sampled when the first rank asks and it is complete, cut once, and kept until a later
version is asked for: whoever asks first, or again after a reconnect, gets the same. No sockets: `answers` says what to
send. Blocking: nothing; a rank that asks stays at the desk until generators complete its batch, or the data has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from buffers.replay import ReplayBuffer
from buffers.shards import Shard, cut
from streamrl import wire
from streamrl.errors import DeadlineExceededError
from streamrl.records import BufferStats, Wait


@dataclass(slots=True)
class _Waiting:
    peer: str
    request: int
    policy_version: int
    since: float  # unix time


class ShardDesk:
    """One desk per buffer server.

    Args:
        groups_per_step: B.
        ranks: number of learner ranks, w.
        exhausted: whether no prompt will ever be issued again.
    """

    def __init__(
        self, buffer: ReplayBuffer, *, groups_per_step: int, ranks: int, exhausted: Callable[[], bool]
    ) -> None:
        self._buffer = buffer
        self._groups_per_step = groups_per_step
        self._ranks = ranks
        self._exhausted = exhausted
        self._waiting: dict[int, _Waiting] = {}  # by rank
        self._cut: tuple[int, list[Shard]] | None = None  # policy_version and the shard of each rank

    def ask(self, rank: int, peer: str, request: wire.Sample) -> None:
        """A later request of a rank replaces an earlier one."""
        self._waiting[rank] = _Waiting(peer, request.request, request.policy_version, time.time())

    def leave(self, rank: int) -> None:
        """The rank is gone and waits no more."""
        self._waiting.pop(rank, None)

    def answers(self) -> list[tuple[str, list[wire.Frame]]]:
        """(peer, message) for every rank whose batch is complete, or can never be."""
        if not self._waiting:
            return []
        version = max(waiting.policy_version for waiting in self._waiting.values())
        if self._cut is None or self._cut[0] != version:
            try:
                groups = self._buffer.sampled_at(version) or self._buffer.sample(
                    self._groups_per_step, policy_version=version, timeout_s=0.0
                )
            except DeadlineExceededError:
                return self._end() if self._is_out_of_data() else []
            self._cut = version, cut(groups, self._ranks)
        answers: list[tuple[str, list[wire.Frame]]] = []
        for rank, waiting in list(self._waiting.items()):
            if waiting.policy_version == version:
                del self._waiting[rank]
                answers += _shard_messages(waiting, self._cut[1][rank])
        return answers

    def waits(self, stats: BufferStats) -> list[Wait]:
        """Who stands at the desk, and for what."""
        missing = max(1, self._groups_per_step - stats.buffered)
        return [
            Wait(waiter=w.peer, waiting_for=f"{missing} more groups", owner="generators", since=w.since)
            for w in self._waiting.values()
        ]

    def _end(self) -> list[tuple[str, list[wire.Frame]]]:
        gone, self._waiting = self._waiting, {}
        return [(w.peer, wire.pack(wire.Answer(request=w.request, status="end"))) for w in gone.values()]

    def _is_out_of_data(self) -> bool:
        """No prompt is left, and the groups in flight cannot make a batch any more, or there are none."""
        stats = self._buffer.stats()
        enough = stats.in_flight + stats.buffered >= self._groups_per_step
        return self._exhausted() and not (stats.in_flight and enough)


def _shard_messages(waiting: _Waiting, shard: Shard) -> list[tuple[str, list[wire.Frame]]]:
    head = wire.ShardHead(
        request=waiting.request,
        num_shard_groups=len(shard.groups),
        num_groups=shard.num_groups,
        num_rollouts=shard.num_rollouts,
        num_tokens=shard.num_tokens,
        num_response_tokens=shard.num_response_tokens,
    )
    messages = [wire.pack(head), *(wire.encode_group(group, request=waiting.request) for group in shard.groups)]
    return [(waiting.peer, message) for message in messages]
