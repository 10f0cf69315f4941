"""Who generates what: the open members of every group in flight, and what to hand out next. No sockets, no clock.

A member is pending (wanted, nobody works on it) or held by one generator. Refills come before new groups because they
are older: a pending member holds back a whole group. Invariant: a member of an open uid is in exactly one of `pending`
and `held`, or settled and in neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from buffers.outcomes import OpenGroup
from streamrl.records import IntArray, Lease, Prompt

Member = tuple[str, int, int]  # uid, member, attempt

SOMEBODY_ELSE = "a generator that has not come back"


class _Note(msgspec.Struct, array_like=True, frozen=True):
    index: int
    prompt_ids: bytes
    task: dict[str, Any]


_note_decoder = msgspec.msgpack.Decoder(_Note)


def note_of(prompt: Prompt) -> bytes:
    """What the journal keeps beside the uid, so that the prompt can be leased again after a restart."""
    return msgspec.msgpack.encode(_Note(prompt.index, prompt.prompt_ids.tobytes(), prompt.task))


def _prompt_of(group: OpenGroup) -> Prompt:
    note = _note_decoder.decode(group.note)
    prompt_ids = np.frombuffer(note.prompt_ids, dtype=np.int32)
    return Prompt(uid=group.uid, index=note.index, prompt_ids=prompt_ids, task=note.task)


@dataclass(slots=True)
class _Open:
    prompt: Prompt
    pending: dict[int, int]  # member -> attempt
    held: dict[int, tuple[str, int]] = field(default_factory=dict)  # member -> (generator, attempt)


class LeaseBook:
    """The book of one buffer server. One owner, not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._pending: dict[str, None] = {}  # uids with pending members, oldest first
        self._holdings: dict[str, set[tuple[str, int]]] = {}  # generator -> (uid, member)

    def open(self, prompt: Prompt, *, group_size: int) -> None:
        """All members of a new group are wanted, attempt 0."""
        assert prompt.uid not in self._open, f"{prompt.uid} is open already"
        self._open[prompt.uid] = _Open(prompt, dict.fromkeys(range(group_size), 0))
        self._pending[prompt.uid] = None

    def restore(self, group: OpenGroup) -> None:
        """A group that was open when the server before this one was lost. `SOMEBODY_ELSE` holds its members until the
        generators that have them come back (`reconcile`), or do not."""
        prompt = _prompt_of(group)
        held = {m: (SOMEBODY_ELSE, a) for m, a in zip(group.members, group.attempts, strict=True)}
        self._open[prompt.uid] = _Open(prompt, {}, held)
        self._holdings.setdefault(SOMEBODY_ELSE, set()).update((prompt.uid, m) for m in held)

    def take(self, generator: str, num_members: int) -> tuple[Lease, IntArray] | None:
        """Lease up to `num_members` members of the oldest uid with pending ones, with its prompt_ids [P]; None if
        nothing is pending."""
        if not self._pending:
            return None
        uid = next(iter(self._pending))
        group = self._open[uid]
        members = tuple(sorted(group.pending))[:num_members]
        attempts = tuple(group.pending.pop(m) for m in members)
        if not group.pending:
            del self._pending[uid]
        for member, attempt in zip(members, attempts, strict=True):
            self._hold(generator, uid, member, attempt)
        return Lease(uid=uid, members=members, attempts=attempts, task=group.prompt.task), group.prompt.prompt_ids

    def is_current(self, uid: str, member: int, attempt: int) -> bool:
        """Whether this very attempt is held by somebody."""
        group = self._open.get(uid)
        return group is not None and group.held.get(member, ("", -1))[1] == attempt

    def settle(self, uid: str, member: int) -> None:
        """The member is there, or will never be wanted again."""
        group = self._open.get(uid)
        if group is None:
            return
        self._let_go(uid, member)
        if group.pending.pop(member, None) is not None and not group.pending:
            del self._pending[uid]
        if not group.pending and not group.held:
            del self._open[uid]

    def refill(self, uid: str, member: int, attempt: int) -> None:
        """The member is wanted again, as `attempt`, from anybody."""
        self._let_go(uid, member)
        self._open[uid].pending[member] = attempt
        self._pending.setdefault(uid)

    def close(self, uid: str) -> list[str]:
        """Nothing of the uid is wanted any more. Returns the generators that hold members of it."""
        group = self._open.get(uid)
        if group is None:
            return []
        holders = {generator for generator, _ in group.held.values()}
        for member in list(group.held):
            self._let_go(uid, member)
        self._pending.pop(uid, None)
        del self._open[uid]
        return sorted(holders)

    def held_by(self, generator: str) -> list[Member]:
        """What the generator works on, in order of uid and member."""
        return sorted(
            (uid, member, self._open[uid].held[member][1]) for uid, member in self._holdings.get(generator, ())
        )

    def num_held(self, generator: str) -> int:
        return len(self._holdings.get(generator, ()))

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def reconcile(self, generator: str, claimed: Iterable[Member]) -> list[str]:
        """A generator's link came up again; it works on `claimed`.

        What the book says it holds and it does not claim was lost on the way: pending again, same attempt. Returns the
        uids of which nothing that it claims is its own any more: it may abort them.
        """
        theirs = set(claimed)
        for uid, member, attempt in theirs.intersection(self.held_by(SOMEBODY_ELSE)):
            self._let_go(uid, member)
            self._hold(generator, uid, member, attempt)
        mine = set(self.held_by(generator))
        for uid, member, attempt in sorted(mine - theirs):
            self.refill(uid, member, attempt)
        return sorted({uid for uid, _, _ in theirs} - {uid for uid, _, _ in mine & theirs})

    def _hold(self, generator: str, uid: str, member: int, attempt: int) -> None:
        self._open[uid].held[member] = (generator, attempt)
        self._holdings.setdefault(generator, set()).add((uid, member))

    def _let_go(self, uid: str, member: int) -> None:
        holding = self._open[uid].held.pop(member, None)
        if holding is None:
            return
        holdings = self._holdings[holding[0]]
        holdings.discard((uid, member))
        if not holdings:
            del self._holdings[holding[0]]
