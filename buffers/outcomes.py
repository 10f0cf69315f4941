"""What the replay buffer answers: to an insert, to a failure, and to the question what is still open."""

from __future__ import annotations

from typing import Literal

import msgspec

RefillAction = Literal["refill", "wait", "given_up", "discarded", "ignored"]


class InsertOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a rollout. The buffer has settled it and the sender may forget it, except after `rejected` with
    reason `full`: then it was not counted either, and may be sent again later.

    Example: InsertOutcome(status="stale", reason="rolled_back", group_discarded=True).
    """

    status: Literal["accepted", "duplicate", "stale", "rejected"]
    reason: str = ""  # accepted: zero_variance; stale: stale, rolled_back; rejected: malformed, unknown_uid, late, full
    group_discarded: bool = False  # by this insert: the other members of the uid need not be generated any more


class RefillDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about a failed member.

    refill: lease (uid, member) again as `attempt`. wait: nobody generates it again, the group waits until its
    deadline. given_up: the group goes on without it. discarded: the group was discarded. ignored: the failure is of no
    concern any more.
    """

    action: RefillAction
    uid: str
    member: int
    attempt: int  # of the new lease with `refill`, else of the failure


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group in flight: what has to be leased, again after the buffer was restarted from its journal.

    Example: OpenGroup(uid="0-000017", members=(1, 3), attempts=(0, 1), note=b"...").
    """

    uid: str
    members: tuple[int, ...]  # that are missing
    attempts: tuple[int, ...]  # newest attempt known of each
    note: bytes  # as given to `issue`
