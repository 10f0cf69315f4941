"""The desk where learner ranks ask for their shards, without sockets."""

from __future__ import annotations

from stand_ins import make_rollout, small_config

from buffers.desk import ShardDesk
from buffers.replay import ReplayBuffer
from streamrl import wire
from streamrl.records import RolloutGroup


class Office:
    """A desk, its buffer, and what every rank has got."""

    def __init__(self, *, ranks: int = 2, exhausted: bool = False) -> None:
        self.buffer = ReplayBuffer(small_config().buffer, group_size=4, groups_per_step=4)
        self.exhausted = exhausted
        self.desk = ShardDesk(self.buffer, groups_per_step=4, ranks=ranks, exhausted=lambda: self.exhausted)

    def complete(self, first: int, last: int, *, version: int = 0) -> None:
        for index in range(first, last):
            for member in range(4):
                self.buffer.insert(make_rollout(f"0-{index:06d}", member, version=version, length=1 + index))

    def ask(self, rank: int, version: int, request: int = 1) -> None:
        self.desk.ask(rank, f"learner-{rank}", wire.Sample(request=request, policy_version=version))

    def answers(self) -> dict[str, list[object]]:
        received: dict[str, list[object]] = {}
        for peer, frames in self.desk.answers():
            message, arrays = wire.TO_LEARNER.unpack(frames)
            if isinstance(message, wire.GroupMessage):
                message = wire.group_from(message, arrays)
            received.setdefault(peer, []).append(message)
        return received


def uids(messages: list[object]) -> list[str]:
    return [message.uid for message in messages if isinstance(message, RolloutGroup)]


def test_nobody_is_answered_before_the_batch_is_complete_and_then_everybody_gets_a_part() -> None:
    office = Office()
    office.ask(1, 0)
    office.complete(0, 3)
    assert office.answers() == {}
    office.complete(3, 4)
    early = office.answers()
    office.ask(0, 0)
    late = office.answers()
    assert list(early) == ["learner-1"] and list(late) == ["learner-0"]
    assert sorted(uids(early["learner-1"]) + uids(late["learner-0"])) == [f"0-{i:06d}" for i in range(4)]
    assert office.answers() == {}


def test_a_rank_that_asks_again_gets_the_same_under_its_new_request() -> None:
    office = Office()
    office.complete(0, 8)
    office.ask(0, 0)
    first = office.answers()["learner-0"]
    office.ask(0, 0, request=2)
    again = office.answers()["learner-0"]
    assert uids(again) == uids(first) != []
    assert isinstance(again[0], wire.ShardHead) and again[0].request == 2


def test_the_next_version_is_a_new_batch() -> None:
    office = Office(ranks=1)
    office.complete(0, 8)
    office.ask(0, 0)
    first = uids(office.answers()["learner-0"])
    office.ask(0, 1)
    second = uids(office.answers()["learner-0"])
    assert len(first) == len(second) == 4 and not set(first) & set(second)
    assert office.buffer.stats().policy_version == 1


def test_at_the_end_of_the_data_every_waiting_rank_is_told_and_not_before() -> None:
    office = Office(exhausted=True)
    office.complete(0, 3)
    office.buffer.issue("0-000003")
    office.ask(0, 0)
    office.ask(1, 0)
    assert office.answers() == {}  # the group in flight may still make the batch complete
    office.buffer.discard_in_flight("straggler")
    told = office.answers()
    assert sorted(told) == ["learner-0", "learner-1"]
    assert all(isinstance(m, wire.Answer) and m.status == "end" for messages in told.values() for m in messages)
    assert office.buffer.stats().buffered == 3


def test_a_rank_that_left_is_not_waited_for_and_not_listed() -> None:
    office = Office()
    office.ask(0, 0)
    office.ask(1, 0)
    assert [w.waiter for w in office.desk.waits(office.buffer.stats())] == ["learner-0", "learner-1"]
    office.desk.leave(1)
    office.desk.leave(7)
    assert [w.waiting_for for w in office.desk.waits(office.buffer.stats())] == ["4 more groups"]
    office.complete(0, 4)
    assert list(office.answers()) == ["learner-0"]
