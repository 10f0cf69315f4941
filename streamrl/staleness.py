"""Version arithmetic: how stale a group is, and how many more groups may be started.

Two mechanisms with different duties. The *guarantee* is the check at consumption: a group is handed to the learner at
version v only if `group_staleness(v, min_version) <= S` (buffers/replay.py); it holds whatever the generators do. The
*pacing* is `admission_capacity`: it keeps groups from being started that could only be discarded later. A wrong pacing costs
compute, never correctness.

Proof of the pacing. Let every optimizer step consume B groups, oldest first, and let the rule
`accepted + running <= (S + v + 1) * B` hold at the version v at which a group g is started, with g counted in `running`. The
number of groups that are ever consumed and were started no later than g is then at most (S + v + 1) * B. Steps 0, 1, ... consume B
of them each, so g is among the first (S + v + 1) * B consumed groups and is consumed by the step at version S + v at the latest. Its tokens were
sampled by version v or a newer one, so its staleness at that moment is at most (S + v) - v = S. A group that is
discarded is never consumed: it takes no place in the count, so its slot is given back. Two things can still make a group stale: a
generator that serves a version older than v when it starts g (by k versions: then k more), and a group that finishes so late
that younger ones pass it. Those are swept and counted by the buffer.
"""

from __future__ import annotations


def group_staleness(policy_version: int, min_version: int) -> int:
    """Optimizer steps between the oldest token of a group and the version that consumes it.

    Negative if every token was sampled by weights newer than `policy_version` (the learner's own report was overtaken).
    """
    return policy_version - min_version


def admission_capacity(
    *, max_staleness: int, policy_version: int, groups_per_step: int, accepted: int, running: int
) -> int:
    """Groups that may still be started: `(S + v + 1) * B - accepted - running`, never below 0.

    Args:
        max_staleness: S.
        policy_version: v, optimizer steps applied so far.
        groups_per_step: B.
        accepted: groups trained or buffered, discarded ones not counted. After a resume at version v it is re-based:
            every earlier step counts as B groups, whoever trained them.
        running: groups started and not yet complete.
    """
    return max(0, (max_staleness + policy_version + 1) * groups_per_step - accepted - running)
