"""Where every group is: found by uid, by age, by oldest token version and by use.

The shelf knows the transitions of a group, not when they are due: each method moves one group from one state to another
and keeps every index, the bytes, the ledger and the changes for the journal in step. `buffers/replay.py` decides. No
lock: the buffer's lock covers it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from buffers.group import Group, arrived_bits
from buffers.journal import Changes, FinalRow, Journal
from buffers.ledger import Ledger
from streamrl.records import Rollout, RolloutGroup


class Shelf:
    """See the module docstring. Attributes are for reading; the methods change them.

    Args:
        group_size: members of a group.
        has_baseline: the last of them is greedy (`Group.has_baseline`).
        journal: if there is one, the groups in it are taken up, with `now` as their time of issue, and the payload of
            trained groups is left to it.
    """

    def __init__(self, *, group_size: int, journal: Journal | None, now: float, has_baseline: bool = False) -> None:
        self.group_size = group_size
        self._has_baseline = has_baseline
        self.ledger = Ledger()
        self.groups: dict[str, Group] = {}  # in_flight, buffered, and trained but not final
        self.final: dict[str, tuple[int, str, int]] = {}  # uid -> order of issue, fate, arrived members as bits
        self.in_flight: OrderedDict[str, None] = OrderedDict()  # by time of issue
        self.live: OrderedDict[str, None] = OrderedDict()  # in flight or buffered, by time of issue
        self.by_version: dict[int, dict[str, None]] = {}  # oldest token version -> live uids
        self.uses: dict[int, dict[str, None]] = {}  # policy version -> uids it sampled, until that version is committed
        self.committed = 0  # uses by earlier versions are final
        self.live_bytes = 0
        self.retained_bytes = 0  # trained, not final, and in memory
        self.largest_rollout_bytes = 0
        self.missing_members = 0  # of groups in flight
        self.buffered_uses = 0  # uses so far of buffered groups
        self.changes = Changes()
        self._journal = journal
        if journal is not None:
            self._take_up(journal, now)

    # -- transitions --

    def issue(self, uid: str, *, now: float, note: bytes) -> Group:
        """-> in_flight"""
        n = self.group_size
        group = Group(
            uid=uid,
            index=self.ledger.issued,
            issued_at=now,
            members=[None] * n,
            attempts=[0] * n,
            lengths=[0] * n,
            has_baseline=self._has_baseline,
            note=note,
        )
        self.ledger.issue()
        self.groups[uid] = group
        self._add_live(group)
        self.touch(group)
        return group

    def add(self, group: Group, rollout: Rollout, *, min_version: int) -> None:
        """A member of a group in flight is there."""
        length, num_bytes = len(rollout.response_ids), rollout.num_bytes
        group.members[rollout.member] = rollout
        group.lengths[rollout.member] = length
        group.attempts[rollout.member] = max(group.attempts[rollout.member], rollout.attempt)
        group.given_up.discard(rollout.member)
        group.arrived |= 1 << rollout.member
        group.num_bytes += num_bytes
        if group.min_version < 0 or min_version < group.min_version:
            self._drop_version(group)
            group.min_version = min_version
            self._add_version(group)
        self.live_bytes += num_bytes
        self.largest_rollout_bytes = max(self.largest_rollout_bytes, num_bytes)
        self.missing_members -= 1
        self.ledger.insert(length)
        if self._journal is not None:
            self.changes.rollouts.append((group.index, rollout))
        self.touch(group)

    def complete(self, group: Group, *, order: int) -> None:
        """in_flight -> buffered"""
        self._land(group)
        self.ledger.move(group.present, "in_flight", "buffered")
        group.state = "buffered"
        group.order = order
        self.touch(group)

    def use(self, group: Group, *, policy_version: int, probability: float) -> None:
        """A buffered group was sampled; it stays buffered until `retire`."""
        step = self.uses.setdefault(policy_version, {})
        group.uses.append(policy_version)
        group.places.append(len(step))
        group.probability = probability
        step[group.uid] = None
        self.buffered_uses += 1
        self.touch(group)

    def retire(self, group: Group) -> None:
        """buffered -> trained: its uses are up, or it is too old for another one."""
        del self.live[group.uid]
        self._drop_version(group)
        self.buffered_uses -= len(group.uses)
        self.live_bytes -= group.num_bytes
        self.ledger.move(group.present, "buffered", "trained")
        group.state = "trained"
        if self._journal is None:
            self.retained_bytes += group.num_bytes
        else:
            group.members = [None] * self.group_size
        self.touch(group)
        self._finish_if_final(group)

    def commit(self, policy_version: int) -> None:
        """trained -> final, for every group that was sampled by versions before this one only."""
        self.committed = max(self.committed, policy_version)
        for version in [v for v in self.uses if v < policy_version]:
            for uid in self.uses.pop(version):
                if uid in self.groups:
                    self._finish_if_final(self.groups[uid])

    def restore(self, group: Group, *, before: int) -> int:
        """Forget the uses at version `before` and later: a trained group is buffered again.

        Returns how many uses that were. The caller calls `undo_uses` when it is done with all groups.
        """
        kept = [version for version in group.uses if version < before]
        undone = len(group.uses) - len(kept)
        if group.state == "trained":
            if self._journal is None:
                self.retained_bytes -= group.num_bytes
            self.load_members(group)
            self.live_bytes += group.num_bytes
            self.ledger.move(group.present, "trained", "buffered")
            group.state = "buffered"
            self.live[group.uid] = None
            self._add_version(group)
            self.buffered_uses += len(group.uses)
        self.buffered_uses -= undone
        group.uses, group.places = kept, group.places[: len(kept)]
        self.touch(group)
        return undone

    def discard(self, group: Group, *, reason: str) -> None:
        """in_flight or buffered -> discarded"""
        if group.state == "in_flight":
            self._land(group)
        else:
            self.buffered_uses -= len(group.uses)
        del self.live[group.uid]
        self._drop_version(group)
        self.live_bytes -= group.num_bytes
        self.ledger.move(group.present, group.state, "discarded", reason=reason)
        self._settle(group, reason)

    def turn_away(self, uid: str, rollout: Rollout) -> None:
        """A member that arrived for a known uid and is not taken: it counts as generated and discarded."""
        length = len(rollout.response_ids)
        self.ledger.turn(length, "discarded")
        group = self.groups.get(uid)
        if group is not None:
            group.unused.append((rollout.member, length))
            group.arrived |= 1 << rollout.member
            self.touch(group)
            return
        index, fate, arrived = self.final[uid]
        self.final[uid] = (index, fate, arrived | 1 << rollout.member)
        if self._journal is not None:
            self.changes.late.append((index, rollout.member, length))

    def undo_uses(self, policy_version: int) -> None:
        """No group was sampled at this version or later any more."""
        for version in [v for v in self.uses if v >= policy_version]:
            del self.uses[version]
        self.live = OrderedDict.fromkeys(sorted(self.live, key=lambda uid: self.groups[uid].index))

    # -- look-ups --

    def arrived(self, uid: str) -> int | None:
        """Bit m is set if member m of this uid arrived; None for an unknown uid."""
        if uid in self.final:
            return self.final[uid][2]
        group = self.groups.get(uid)
        return None if group is None else group.arrived

    def oldest_group_s(self, now: float) -> float:
        """Age of the oldest group that is in flight or buffered; 0 if there is none."""
        return max(0.0, now - self.groups[next(iter(self.live))].issued_at) if self.live else 0.0

    def buffered(self) -> list[Group]:
        return [group for uid in self.live if (group := self.groups[uid]).state == "buffered"]

    def sampled_since(self, policy_version: int) -> list[Group]:
        """Groups that were sampled at this version or later, in order of issue."""
        uids = {uid for version, uids in self.uses.items() if version >= policy_version for uid in uids}
        return sorted((self.groups[uid] for uid in uids), key=lambda group: group.index)

    def sampled_at(self, policy_version: int) -> list[RolloutGroup]:
        """What the step at this version got, in order of sampling; empty once the version is committed."""
        groups = [self.groups[uid] for uid in self.uses.get(policy_version, ())]
        found = [(group.places[use := group.uses.index(policy_version)], group.index, use, group) for group in groups]
        samples = []
        for _, _, use, group in sorted(found, key=lambda entry: entry[:2]):
            in_memory = bool(group.rollouts)
            self.load_members(group)
            samples.append(group.as_sample(use=use + 1))
            if not in_memory:
                group.members = [None] * self.group_size
        return samples

    def load_members(self, group: Group) -> None:
        """Bring the payload back into memory, if only the journal holds it."""
        if self._journal is not None and not group.rollouts:
            group.members = self._journal.members(group.index)

    def touch(self, group: Group) -> None:
        """The journal has to write this group."""
        if self._journal is not None:
            self.changes.groups[group.index] = group

    # -- indexes --

    def _add_live(self, group: Group) -> None:
        self.live[group.uid] = None
        if group.state == "in_flight":
            self.in_flight[group.uid] = None
            self.missing_members += self.group_size - len(group.present)
        self._add_version(group)

    def _land(self, group: Group) -> None:
        del self.in_flight[group.uid]
        self.missing_members -= self.group_size - len(group.present)

    def _add_version(self, group: Group) -> None:
        if group.min_version >= 0:
            self.by_version.setdefault(group.min_version, {})[group.uid] = None

    def _drop_version(self, group: Group) -> None:
        if group.min_version >= 0:
            bucket = self.by_version[group.min_version]
            del bucket[group.uid]
            if not bucket:
                del self.by_version[group.min_version]

    def _finish_if_final(self, group: Group) -> None:
        if group.state == "trained" and group.uses[-1] < self.committed:
            if self._journal is None:
                self.retained_bytes -= group.num_bytes
            self._settle(group, "trained")

    def _settle(self, group: Group, fate: str) -> None:
        self.final[group.uid] = (group.index, fate, group.arrived)
        del self.groups[group.uid]
        if self._journal is not None:
            self.changes.groups.pop(group.index, None)
            row = FinalRow(uid=group.uid, fate=fate, lengths=group.lengths, unused=group.unused)
            self.changes.finals[group.index] = row

    def _take_up(self, journal: Journal, now: float) -> None:
        """Re-add the ledger and the indexes from the journal's rows; payload only of the groups that are live."""
        for index, final in journal.finals():
            self.final[final.uid] = (index, sys.intern(final.fate), arrived_bits(final.lengths, final.unused))
            present, unused = [n for n in final.lengths if n], [n for _, n in final.unused]
            self.ledger.count_final(final.fate, present, unused)
        for index, row in journal.groups():
            group = Group(
                uid=row.uid,
                index=index,
                issued_at=now,
                members=[None] * self.group_size,
                attempts=row.attempts,
                lengths=row.lengths,
                state=row.state,
                has_baseline=self._has_baseline,
                note=row.note,
                given_up=set(row.given_up),
                unused=row.unused,
                arrived=arrived_bits(row.lengths, row.unused),
                num_bytes=row.num_bytes,
                min_version=row.min_version,
                order=row.order,
                uses=row.uses,
                places=row.places,
                probability=row.probability,
                share=row.share,
            )
            self.groups[group.uid] = group
            self.ledger.count_live(group.state, group.present, [length for _, length in group.unused])
            for version in group.uses:
                self.uses.setdefault(version, {})[group.uid] = None
            if group.state == "trained":
                continue
            self.load_members(group)
            self._add_live(group)
            self.live_bytes += group.num_bytes
            self.largest_rollout_bytes = max([self.largest_rollout_bytes, *(r.num_bytes for r in group.rollouts)])
            if group.state == "buffered":
                self.buffered_uses += len(group.uses)
