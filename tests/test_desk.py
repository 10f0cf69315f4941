"""The desk where learner ranks ask for their shards, without sockets."""

from __future__ import annotations

import pathlib

import pytest
from stand_ins import make_rollout, small_config

from buffers.desk import ShardDesk
from buffers.replay import ReplayBuffer
from streamrl import wire
from streamrl.records import RolloutGroup


class Office:
    """A desk, its buffer, and what every rank has got."""

    def __init__(
        self, *, ranks: int = 2, exhausted: bool = False, stream_groups: int = 0, journal: pathlib.Path | None = None
    ) -> None:
        config = small_config(buffer={"journal": "async", "selector": "freshest"} if journal else {}).buffer
        self.buffer = ReplayBuffer(config, group_size=4, groups_per_step=4, journal_path=journal)
        self.exhausted = exhausted
        self.desk = ShardDesk(
            self.buffer,
            groups_per_step=4,
            stream_groups=stream_groups,
            ranks=ranks,
            exhausted=lambda: self.exhausted,
        )

    def complete(self, first: int, last: int, *, version: int = 0) -> None:
        for index in range(first, last):
            for member in range(4):
                self.buffer.insert(make_rollout(f"0-{index:06d}", member, version=version, length=1 + index))

    def ask(self, rank: int, version: int, request: int = 1, chunk: int = 0) -> None:
        self.desk.ask(rank, f"learner-{rank}", wire.Sample(request=request, policy_version=version, chunk=chunk))

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


def test_a_chunk_is_handed_out_when_it_is_complete_and_not_when_the_batch_is() -> None:
    office = Office(ranks=1, stream_groups=3)
    office.complete(0, 2)
    office.ask(0, 0)
    assert office.answers() == {}
    assert [w.waiting_for for w in office.desk.waits(office.buffer.stats())] == ["1 more groups"]
    office.complete(2, 3)
    head, *groups = office.answers()["learner-0"]
    assert isinstance(head, wire.ShardHead) and (head.num_groups, head.is_last) == (3, False)
    assert uids(groups) == ["0-000000", "0-000001", "0-000002"]
    office.ask(0, 0, chunk=1)
    assert office.answers() == {}
    assert [w.waiting_for for w in office.desk.waits(office.buffer.stats())] == ["1 more groups"]
    office.complete(3, 5)
    head, *groups = office.answers()["learner-0"]
    assert isinstance(head, wire.ShardHead) and (head.num_groups, head.num_rollouts, head.is_last) == (4, 16, True)
    assert uids(groups) == ["0-000003"]  # and no more: the batch has four groups
    assert head.num_response_tokens == 4 * (1 + 2 + 3 + 4)


def test_a_chunk_is_the_same_for_a_rank_that_asks_late_or_again() -> None:
    office = Office(stream_groups=2)
    office.complete(0, 8)
    office.ask(0, 0)
    first = uids(office.answers()["learner-0"])
    office.ask(0, 0, chunk=1)
    second = uids(office.answers()["learner-0"])
    office.ask(1, 0)
    other_first = uids(office.answers()["learner-1"])
    office.ask(1, 0, chunk=1)
    other_second = uids(office.answers()["learner-1"])
    assert sorted(first + other_first) == ["0-000000", "0-000001"]
    assert sorted(second + other_second) == ["0-000002", "0-000003"]
    office.ask(0, 0, request=7, chunk=0)
    assert uids(office.answers()["learner-0"]) == first
    office.ask(0, 1)
    assert set(uids(office.answers()["learner-0"])) <= {"0-000004", "0-000005"}


def test_a_desk_opened_anew_on_the_journal_hands_out_the_same_chunks_and_goes_on(tmp_path: pathlib.Path) -> None:
    """The freshest first: the order of sampling is neither that of issue nor that of completion."""
    office = Office(ranks=1, stream_groups=1, journal=tmp_path)
    office.complete(0, 1)
    office.complete(1, 2, version=1)
    office.buffer.advance(1)
    handed_out = []
    for chunk in range(2):
        office.ask(0, 1, chunk=chunk)
        handed_out.append(uids(office.answers()["learner-0"]))
    assert handed_out == [["0-000001"], ["0-000000"]]
    office.buffer.close()
    office = Office(ranks=1, stream_groups=1, journal=tmp_path)
    for chunk in range(2):
        office.ask(0, 1, chunk=chunk)
        assert uids(office.answers()["learner-0"]) == handed_out[chunk]
    office.complete(2, 4, version=1)
    for chunk in (2, 3):
        office.ask(0, 1, chunk=chunk)
        handed_out.append(uids(office.answers()["learner-0"]))
    assert sorted(uid for chunk in handed_out for uid in chunk) == [f"0-{i:06d}" for i in range(4)]
    office.buffer.close()


@pytest.mark.parametrize("chunk", [1, 9])
def test_a_chunk_before_its_turn_is_refused_because_those_before_it_would_be_lost(chunk: int) -> None:
    office = Office(ranks=1, stream_groups=2)
    office.complete(0, 8)
    office.ask(0, 0, chunk=chunk)
    (answer,) = office.answers()["learner-0"]
    assert isinstance(answer, wire.Answer) and answer.status == "refused"
    assert answer.detail == f"chunk {chunk} of step 0, of which 0 were handed out"
    assert office.buffer.stats().trained == 0


def test_a_chunk_after_the_last_is_refused() -> None:
    office = Office(ranks=1)
    office.complete(0, 8)
    office.ask(0, 0)
    office.answers()
    office.ask(0, 0, chunk=1)
    (answer,) = office.answers()["learner-0"]
    assert isinstance(answer, wire.Answer) and answer.status == "refused"


def test_no_chunk_of_a_batch_that_the_data_cannot_complete_is_handed_out() -> None:
    office = Office(ranks=1, stream_groups=1, exhausted=True)
    office.complete(0, 3)
    office.ask(0, 0)
    (answer,) = office.answers()["learner-0"]
    assert isinstance(answer, wire.Answer) and answer.status == "end"
    assert (office.buffer.stats().buffered, office.buffer.stats().trained) == (3, 0)


def test_the_data_that_ends_inside_a_step_ends_it_and_its_groups_can_be_given_back() -> None:
    office = Office(stream_groups=2, exhausted=True)
    office.complete(0, 3)
    office.buffer.issue("0-000003")  # it may still come
    for rank in range(2):
        office.ask(rank, 0)
    assert sorted(office.answers()) == ["learner-0", "learner-1"]
    for rank in range(2):
        office.ask(rank, 0, chunk=1)
    assert office.answers() == {}
    office.buffer.discard_in_flight("straggler")
    told = office.answers()
    assert [m.status for messages in told.values() for m in messages if isinstance(m, wire.Answer)] == ["end", "end"]
    assert office.buffer.stats().trained == 2
    office.buffer.rollback(0)
    stats = office.buffer.stats()
    assert (stats.trained, stats.buffered, stats.discarded) == (0, 3, {"straggler": 1})
