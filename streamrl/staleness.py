"""Version arithmetic: how stale a group is, and how many more groups may be started.

Two mechanisms with different duties. The *guarantee* is the check at consumption: a group is handed to the learner at
version v only if `group_staleness(v, min_version) <= S` (buffers/replay.py); it holds whatever the generators do. The
*pacing* is `admission_capacity`: it keeps groups from being started that could only be discarded later. A wrong pacing
costs compute, never correctness.

Proof of the pacing. Let every optimizer step consume B groups in the order in which they were started, and let
`accepted + running <= (S + v + 1) * B` hold when a group g is started by a generator at version v, g included. Then
at most (S + v + 1) * B groups that are ever consumed were started no later than g. Steps 0, 1, 2, ... consume B groups
each, so g is consumed by the step at version S + v at the latest. Its tokens were sampled by version v or a newer one,
so its staleness is then at most (S + v) - v = S. A discarded group is never consumed: it takes no place in this count,
so its slot is given back. A group that finishes so late that younger ones pass it can still become stale: the buffer
sweeps and counts it.
"""

from __future__ import annotations

from streamrl.records import Rollout


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
        policy_version: v, of the weights that the new groups would start with.
        groups_per_step: B.
        accepted: groups trained or buffered, discarded ones not counted. After a resume at version v it is re-based:
            every earlier step counts as B groups, whoever trained them.
        running: groups started and not yet complete.
    """
    return max(0, (max_staleness + policy_version + 1) * groups_per_step - accepted - running)


class Lineage:
    """Which weights still exist, over the lives (incarnations) of the learner.

    A learner that is restored from its checkpoint at version v begins a new incarnation. What earlier incarnations
    published after v is gone: the numbers above v will be given to other weights.

    Example: after rollback(7) began incarnation 1, tokens of (incarnation 0, version 8) are dead; (0, 7), (1, 8) live.
    """

    def __init__(self, *, incarnation: int = 0, rollbacks: list[tuple[int, int]] | None = None) -> None:
        self.incarnation = incarnation
        self.rollbacks = list(rollbacks or [])  # (incarnation that began, version it went on from)

    def rollback(self, policy_version: int, *, incarnation: int | None = None) -> None:
        """A new incarnation goes on from `policy_version`; None for the next number."""
        self.incarnation = self.incarnation + 1 if incarnation is None else incarnation
        self.rollbacks.append((self.incarnation, policy_version))

    def is_dead(self, rollout: Rollout) -> bool:
        """Does it hold a token of weights that a rollback undid?

        A rollout that spans two incarnations carries the older one, so it may be called dead although its newer tokens
        are not: never the other way round.
        """
        return any(
            rollout.incarnation < incarnation and int(rollout.versions.max()) > version
            for incarnation, version in self.rollbacks
        )
