"""The lease book: who generates what, without sockets."""

from __future__ import annotations

import random

import numpy as np
from stand_ins import CountingSource

from buffers.leases import SOMEBODY_ELSE, LeaseBook, note_of
from buffers.outcomes import OpenGroup
from streamrl.records import Prompt


def book_with(num_groups: int, group_size: int = 4) -> tuple[LeaseBook, list[Prompt]]:
    book, source = LeaseBook(), CountingSource()
    prompts = [prompt for prompt in (source.next() for _ in range(num_groups)) if prompt is not None]
    for prompt in prompts:
        book.open(prompt, group_size=group_size)
    return book, prompts


def test_a_lease_holds_as_many_members_of_the_oldest_group_as_were_asked_for() -> None:
    book, prompts = book_with(2)
    leased = book.take("a", 3)
    assert leased is not None
    lease, prompt_ids = leased
    assert (lease.uid, lease.members, lease.attempts) == ("0-000000", (0, 1, 2), (0, 0, 0))
    assert lease.task == {"index": 0}
    assert np.array_equal(prompt_ids, prompts[0].prompt_ids)
    rest = book.take("b", 10)
    assert rest is not None and rest[0].members == (3,)
    following = book.take("b", 10)
    assert following is not None and following[0].uid == "0-000001"
    assert book.take("b", 10) is None


def test_a_refill_comes_before_younger_groups_and_only_for_its_member() -> None:
    book, _ = book_with(1)
    book.take("a", 4)
    book.open(Prompt(uid="later", index=9, prompt_ids=np.arange(2, dtype=np.int32)), group_size=4)
    book.take("a", 4)
    book.refill("0-000000", 2, 1)
    leased = book.take("b", 4)
    assert leased is not None and (leased[0].members, leased[0].attempts) == ((2,), (1,))
    assert not book.is_current("0-000000", 2, 0) and book.is_current("0-000000", 2, 1)


def test_closing_a_group_names_its_holders_and_forgets_everything_of_it() -> None:
    book, _ = book_with(1)
    book.take("b", 1)
    book.take("a", 2)
    assert book.close("0-000000") == ["a", "b"]
    assert book.close("0-000000") == []
    assert not book.has_pending and not book.num_held("a") and not book.num_held("b")
    book.settle("0-000000", 0)  # a late result of it changes nothing


def test_a_reconnect_gives_back_what_was_lost_and_names_what_is_void() -> None:
    book, _ = book_with(3)
    for _ in range(3):
        book.take("a", 4)
    book.close("0-000001")
    claimed = [("0-000000", 0, 0), ("0-000000", 1, 0), ("0-000001", 0, 0), ("0-000002", 0, 7)]
    assert book.reconcile("a", claimed) == ["0-000001", "0-000002"]
    assert book.held_by("a") == [("0-000000", 0, 0), ("0-000000", 1, 0)]
    leased = book.take("b", 4)
    assert leased is not None and (leased[0].uid, leased[0].members, leased[0].attempts) == ("0-000000", (2, 3), (0, 0))
    leased = book.take("b", 4)
    assert leased is not None and (leased[0].uid, leased[0].members) == ("0-000002", (0, 1, 2, 3))


def test_after_a_restart_generators_take_up_what_they_hold_and_the_rest_waits_for_its_owner() -> None:
    prompt = Prompt(uid="0-000003", index=5, prompt_ids=np.arange(3, dtype=np.int32), task={"answer": "7"})
    book = LeaseBook()
    book.restore(OpenGroup(uid="0-000003", members=(1, 2, 3), attempts=(0, 2, 0), note=note_of(prompt)))
    assert not book.has_pending
    assert book.reconcile("a", [("0-000003", 1, 0), ("0-000003", 2, 1), ("gone", 0, 0)]) == ["gone"]
    assert book.held_by("a") == [("0-000003", 1, 0)]
    assert book.held_by(SOMEBODY_ELSE) == [("0-000003", 2, 2), ("0-000003", 3, 0)]
    book.refill("0-000003", 2, 3)
    leased = book.take("b", 4)
    assert leased is not None
    lease, prompt_ids = leased
    assert (lease.members, lease.attempts, lease.task) == ((2,), (3,), {"answer": "7"})
    assert prompt_ids.tolist() == [0, 1, 2]


def test_every_member_is_in_one_place_whatever_happens() -> None:
    """Random operations against the plainest model: member -> pending, holder, or settled."""
    rng = random.Random(1)
    book, source = LeaseBook(), CountingSource()
    model: dict[tuple[str, int], str | None] = {}  # None: pending
    generators = ["a", "b", "c"]
    for _ in range(3000):
        match rng.randrange(6):
            case 0:
                prompt = source.next()
                assert prompt is not None
                book.open(prompt, group_size=3)
                model.update({(prompt.uid, m): None for m in range(3)})
            case 1 | 2:
                name = rng.choice(generators)
                leased = book.take(name, rng.randint(1, 4))
                assert (leased is None) == (None not in model.values())
                if leased is not None:
                    for member in leased[0].members:
                        assert model[leased[0].uid, member] is None
                        model[leased[0].uid, member] = name
            case 3 if model:
                uid, member = rng.choice(list(model))
                book.settle(uid, member)
                del model[uid, member]
            case 4 if model:
                uid, member = rng.choice(list(model))
                book.refill(uid, member, 1)
                model[uid, member] = None
            case 5 if model and rng.random() < 0.3:
                uid = rng.choice(list(model))[0]
                holders = {h for (u, _), h in model.items() if u == uid and h is not None}
                assert book.close(uid) == sorted(holders)
                model = {key: holder for key, holder in model.items() if key[0] != uid}
        assert book.has_pending == (None in model.values())
        for name in generators:
            held = sorted(key for key, holder in model.items() if holder == name)
            assert [(uid, member) for uid, member, _ in book.held_by(name)] == held
            assert book.num_held(name) == len(held)
