"""How many more groups may be issued: the smallest of four rooms.

    groups   max_groups - (in flight + buffered)
    bytes    max_bytes, every member that may still come reserved at the size of the largest one so far
    limiter  what the rate limiter lets in
    version  (S + v + 1) * B - accepted - running, v being the generator's, see streamrl/staleness.py

Only pacing: the bound itself is kept at sampling. A discarded group leaves all four counts, so its place is given back.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from buffers.rate_limiter import RateLimiter
from buffers.shelf import Shelf
from streamrl.config import BufferConfig
from streamrl.staleness import admission_capacity


class Pace(NamedTuple):
    """What the admission rule needs of the run."""

    groups_per_step: int  # B
    policy_version: int  # the learner's
    started_at: int  # version of the generator that would start the groups: the learner's or an older one


def groups_admitted(config: BufferConfig, shelf: Shelf, limiter: RateLimiter, pace: Pace | None) -> int:
    """Groups that may be issued now; never below 0. Without a pace versions are not looked at."""
    running, buffered = len(shelf.in_flight), len(shelf.live) - len(shelf.in_flight)
    room = min(config.max_groups - len(shelf.live), limiter.insert_room(size=buffered) - running)
    if shelf.largest_rollout_bytes:
        reserved = shelf.live_bytes + shelf.missing_members * shelf.largest_rollout_bytes
        room = min(room, (config.max_bytes - reserved) // (shelf.group_size * shelf.largest_rollout_bytes))
    if pace is not None:
        used = sum(len(uids) for version, uids in shelf.uses.items() if version >= pace.policy_version)
        # Without `needed` limiter and version could wait for each other: the version moves only when its step was
        # sampled, and the limiter may ask for more groups than (S + 1) * B before it lets that happen.
        wanted = pace.groups_per_step - used
        needed = limiter.inserts_needed(wanted, size=buffered) - running if wanted > 0 else 0
        room = min(room, max(_version_room(config, shelf, pace, used), needed))
    return max(0, int(room))


def _version_room(config: BufferConfig, shelf: Shelf, pace: Pace, used: int) -> int:
    """The admission rule counted in uses: a group that is sampled k times fills k places of the steps to come.

    Each step before the learner's version counts as B uses, whoever trained them, so nothing has to be re-based after a
    resume. `used` counts the uses at the learner's version.
    """
    per_group = config.samples_per_insert if config.limiter == "ratio" else float(config.max_times_sampled)
    running, buffered = len(shelf.in_flight), len(shelf.live) - len(shelf.in_flight)
    waiting = math.ceil(max(0.0, buffered * per_group - shelf.buffered_uses))
    uses = admission_capacity(
        max_staleness=config.max_staleness,
        policy_version=pace.started_at,
        groups_per_step=pace.groups_per_step,
        accepted=pace.policy_version * pace.groups_per_step + used + waiting,
        running=math.ceil(running * per_group),
    )
    return int(uses / per_group)
