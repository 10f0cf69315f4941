"""The buffer's state on disk, in LMDB: what makes "acknowledged" survive the death of the process.

A mirror, not a log: one row per group that is not settled, one per rollout of these, one per settled uid, and one for
the scalars. What a call of the buffer changed is written in one transaction, so the file is at every instant a state
between two calls, and its size is that of the state. Keys are short and ascend: rows are found by order of issue.

`async` leaves the pages to the kernel: the death of the process at any instant loses nothing, a power cut may lose or
damage the file. `sync` also waits for the disk: a power cut loses nothing.

Blocking: `write` waits for the file system, and with sync for the disk; nobody else can end that. One process has it
open at a time; the kernel releases it when that process dies.
"""

from __future__ import annotations

import fcntl
import pathlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import lmdb
import msgspec

from buffers.group import Group
from buffers.ledger import State
from streamrl.config import BufferConfig
from streamrl.records import Rollout
from streamrl.wire import decode_rollout, encode_rollout

_FORMAT = 2
_MAP_BYTES = 1 << 40  # address space, not disk: the file grows as it is written

_encode = msgspec.msgpack.Encoder().encode


class StateRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Everything that is not a group."""

    format: int = _FORMAT
    group_size: int
    policy_version: int
    committed: int
    incarnation: int
    rollbacks: list[tuple[int, int]]
    next_order: int
    limiter: tuple[float, float]  # error, given_back
    duplicates: int
    rejected: dict[str, int]
    failed: dict[str, int]


class GroupRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A `Group` without its rollouts."""

    uid: str
    attempts: list[int]
    lengths: list[int]
    state: State
    note: bytes
    given_up: list[int]
    unused: list[tuple[int, int]]
    num_bytes: int
    min_version: int
    order: int
    uses: list[int]
    places: list[int]
    probability: float
    share: float


class FinalRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A settled uid: what is needed to count its rollouts by fate and to know a member again."""

    uid: str
    fate: str  # "trained" or the reason it was discarded
    lengths: list[int]  # [n] response tokens; 0 for a member that was not there
    unused: list[tuple[int, int]]  # (member, response tokens) that arrived and was not taken


@dataclass(slots=True)
class Changes:
    """What one call of the buffer changed, by order of issue."""

    groups: dict[int, Group] = field(default_factory=dict)
    finals: dict[int, FinalRow] = field(default_factory=dict)
    rollouts: list[tuple[int, Rollout]] = field(default_factory=list)
    late: list[tuple[int, int, int]] = field(default_factory=list)  # index, member, response tokens: for a settled uid

    def __bool__(self) -> bool:
        return bool(self.groups or self.finals or self.rollouts or self.late)

    def clear(self) -> None:
        self.groups.clear()
        self.finals.clear()
        self.rollouts.clear()
        self.late.clear()


class Journal:
    """See the module docstring.

    Args:
        path: a folder of its own; made if it is not there.
        sync: wait for the disk.
        group_size: n; a journal of another group size is refused.

    Raises:
        ValueError: another process has it open; or it was written for another group size or in another format.
        lmdb.Error: the folder cannot be used.
    """

    def __init__(self, path: str | pathlib.Path, *, sync: bool, group_size: int) -> None:
        folder = pathlib.Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self._owner = (folder / "owner").open("w")
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._owner.close()
            raise ValueError(f"journal ({path}): another process has it open. End that process first") from None
        self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, max_dbs=4, sync=sync, metasync=sync, meminit=False)
        self._scalars, self._groups, self._finals, self._rollouts = (
            self._env.open_db(name) for name in (b"state", b"groups", b"finals", b"rollouts")
        )
        self._group_size = group_size
        self._last_state = b""
        state = self.state()
        if state is not None and (state.format, state.group_size) != (_FORMAT, group_size):
            self.close()
            raise ValueError(
                f"journal ({path}): has format {state.format} and group_size {state.group_size}, not {_FORMAT} and "
                f"{group_size}. Use another folder, or the settings it was written with"
            )

    # -- reading --

    def state(self) -> StateRow | None:
        """None if nothing was written yet."""
        with self._env.begin(db=self._scalars) as transaction:
            row = transaction.get(b"state")
            return None if row is None else msgspec.msgpack.decode(row, type=StateRow)

    def groups(self) -> Iterator[tuple[int, GroupRow]]:
        """Every group that is not settled, with its order of issue."""
        decoder = msgspec.msgpack.Decoder(GroupRow)
        with self._env.begin(db=self._groups) as transaction:
            for key, row in transaction.cursor():
                yield _index_of(key), decoder.decode(row)

    def finals(self) -> Iterator[tuple[int, FinalRow]]:
        """Every settled uid, with its order of issue."""
        decoder = msgspec.msgpack.Decoder(FinalRow)
        with self._env.begin(db=self._finals) as transaction:
            for key, row in transaction.cursor():
                yield _index_of(key), decoder.decode(row)

    def members(self, index: int) -> list[Rollout | None]:
        """[n] The rollouts of one group; None for a member that is not there."""
        with self._env.begin(db=self._rollouts) as transaction:
            rows = [transaction.get(_key(index, member)) for member in range(self._group_size)]
        return [None if row is None else decode_rollout(msgspec.msgpack.decode(row, type=list[bytes])) for row in rows]

    # -- writing --

    def write(self, state: StateRow, changes: Changes) -> None:
        """All of it or nothing, even if the process dies in the middle."""
        scalars = _encode(state)
        if scalars == self._last_state and not changes:
            return
        with self._env.begin(write=True) as transaction:
            if scalars != self._last_state:
                transaction.put(b"state", scalars, db=self._scalars)
            for index, rollout in changes.rollouts:
                payload = _encode(encode_rollout(rollout))
                transaction.put(_key(index, rollout.member), payload, db=self._rollouts)
            for index, group in changes.groups.items():
                transaction.put(_key(index), _encode(_row_of(group)), db=self._groups)
            for index, final in changes.finals.items():
                transaction.put(_key(index), _encode(final), db=self._finals)
                transaction.delete(_key(index), db=self._groups)
                for member, length in enumerate(final.lengths):
                    if length:
                        transaction.delete(_key(index, member), db=self._rollouts)
            for index, member, length in changes.late:
                row = transaction.get(_key(index), db=self._finals)
                assert row is not None, f"group {index} is settled without a row"
                final = msgspec.msgpack.decode(row, type=FinalRow)
                final = msgspec.structs.replace(final, unused=[*final.unused, (member, length)])
                transaction.put(_key(index), _encode(final), db=self._finals)
        self._last_state = scalars

    def close(self) -> None:
        self._env.close()
        self._owner.close()


def open_journal(config: BufferConfig, path: str | pathlib.Path | None, *, group_size: int) -> Journal | None:
    """The journal that `config.journal` asks for; None for `off`.

    Raises:
        ValueError: there is no path for it, or see `Journal`.
    """
    if config.journal == "off":
        return None
    if path is None:
        raise ValueError(f"journal_path (None): buffer.journal={config.journal} needs a folder")
    return Journal(path, sync=config.journal == "sync", group_size=group_size)


def _key(index: int, member: int | None = None) -> bytes:
    return struct.pack(">Q", index) if member is None else struct.pack(">QH", index, member)


def _index_of(key: bytes) -> int:
    index: int = struct.unpack(">Q", key)[0]
    return index


def _row_of(group: Group) -> GroupRow:
    return GroupRow(
        uid=group.uid,
        attempts=group.attempts,
        lengths=group.lengths,
        state=group.state,
        note=group.note,
        given_up=sorted(group.given_up),
        unused=group.unused,
        num_bytes=group.num_bytes,
        min_version=group.min_version,
        order=group.order,
        uses=group.uses,
        places=group.places,
        probability=group.probability,
        share=group.share,
    )
