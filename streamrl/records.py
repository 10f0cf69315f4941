"""The records that travel between processes: data, no logic beyond derived values.

Arrays are numpy on purpose: they go on the wire as raw bytes (`wire.py`) and become tensors only in
`packing.py`. Records are msgspec Structs: one of scalars can be a message header as it is, and a `Rollout` is made
several times faster than as a dataclass, which counts where they arrive (bench/bench_wire.py).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length"]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt instance. Its `AlgorithmConfig.num_members` responses form one group.

    Example: Prompt(uid="0-000017", index=17, prompt_ids=array([5, 9, 2]), task={"source": "chain_sum", ...}).
    """

    uid: str  # "<epoch>-<position>", unique in a run
    index: int  # position in the data set, 0-based
    prompt_ids: IntArray  # [P]
    task: dict[str, Any] = {}  # what the reward needs; msgpack-able


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to generate some members of one group. Array `prompt_ids` travels beside it.

    Example: Lease(uid="0-000017", members=(0, 1, 2, 3), attempts=(0, 0, 0, 0), task={...}).
    """

    uid: str
    members: tuple[int, ...]  # member indices, each in [0, num_members)
    attempts: tuple[int, ...]  # attempt number per member, 0 for the first
    task: dict[str, Any] = {}


class RolloutTimings(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seconds spent in each stage of one rollout."""

    queue_s: float = 0.0  # lease received -> first token
    generate_s: float = 0.0  # first token -> last token
    reward_s: float = 0.0  # last token -> scored
    finished_at: float = 0.0  # unix time of the score


class Rollout(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # gc: it is in no cycle
    """One scored response of a group: what the generator sends and the learner trains on.

    Example: Rollout(uid="0-000017", member=3, attempt=0, response_ids=array([7, 1]), old_log_probs=array([-0.1, -0.7]),
    versions=array([4, 5]), reward=1.0, finish_reason="stop", generator="generator-1", ...): the second token was
    sampled after a weight update to version 5.
    """

    uid: str
    member: int
    attempt: int
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [T], T >= 1, the end-of-sequence token included when it was sampled
    old_log_probs: FloatArray  # [T] behaviour log-probs mu at the sampling temperature
    versions: IntArray  # [T] policy version whose weights sampled the token
    incarnation: int = 0  # learner incarnation of those versions (the oldest one, if a rollout spans two)
    reward: float = 0.0
    reward_parts: dict[str, float] = {}
    finish_reason: FinishReason = "stop"
    generator: str = ""
    timings: RolloutTimings = RolloutTimings()

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.uid, self.member, self.attempt)

    @property
    def min_version(self) -> int:
        return int(self.versions.min())

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_bytes(self) -> int:
        return int(self.prompt_ids.nbytes + self.response_ids.nbytes + self.old_log_probs.nbytes + self.versions.nbytes)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A member that could not be generated or scored; it is generated again or its group is discarded, never zeroed."""

    uid: str
    member: int
    attempt: int
    reason: str  # "reward_timeout", "reward_error", "engine_error", "unproven_weights", ...
    detail: str = ""


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The members of one uid, ready to train on."""

    uid: str
    rollouts: tuple[Rollout, ...]
    times_sampled: int = 1
    probability: float = 1.0  # with which the selector drew it; 1.0 for FIFO
    baseline: Rollout | None = (
        None  # the greedy response, for `advantage: remax`; its reward counts, nobody trains on it
    )

    @property
    def members(self) -> tuple[Rollout, ...]:
        """The rollouts, and after them the baseline if there is one."""
        return self.rollouts if self.baseline is None else (*self.rollouts, self.baseline)

    @property
    def min_version(self) -> int:
        """The oldest token of any member: the staleness bound is kept for the baseline too."""
        return min(r.min_version for r in self.members)

    @property
    def num_tokens(self) -> int:
        """Of what is trained on."""
        return sum(r.num_tokens for r in self.rollouts)

    @property
    def rewards(self) -> FloatArray:
        return np.array([r.reward for r in self.rollouts], dtype=np.float32)


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of one published version. The payload is fetched by the backend named here.

    `probe_log_probs` are the learner's own numbers for the channel's fixed probe sequences, so that a generator can
    prove that its engine now computes the same function.
    """

    incarnation: int
    policy_version: int
    backend: str
    payload: dict[str, Any]  # backend-specific, e.g. the shared segment, slot and sequence number
    probe_log_probs: list[float]  # flat, over every scored probe token
    published_at: float  # unix time


class WeightAck(msgspec.Struct, frozen=True, kw_only=True):
    """A generator's answer to one `WeightUpdate`."""

    generator: str
    incarnation: int
    policy_version: int
    ok: bool
    reason: str = ""
    transfer_s: float = 0.0  # fetched beside generation: received, checked, laid out
    drain_s: float = 0.0  # waited for running requests, with weight_sync.in_flight=drain
    pause_s: float = 0.0  # generation stood still
    load_s: float = 0.0  # the part of the pause in which the engine loaded
    probe_s: float = 0.0
    total_s: float = 0.0  # published -> proven
    num_bytes: int = 0
    probe_difference: float = 0.0  # as weight_sync/probe.py counts it: largest in float32, mean in bfloat16


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What a process waits for: one edge of the wait graph."""

    waiter: str  # "learner-0"
    waiting_for: str  # "3 more groups"
    owner: str  # who can end the wait: "generators", "buffer"
    since: float  # unix time


class GeneratorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a generator."""

    name: str
    policy_version: int = -1
    incarnation: int = 0
    running: int = 0  # members inside the engine
    scoring: int = 0  # members whose reward is being computed
    unacknowledged: int = 0  # rollouts sent, not yet acknowledged by the buffer
    generated_tokens: int = 0  # total response tokens so far
    finished_rollouts: int = 0
    failed_members: int = 0
    busy_s: float = 0.0  # total seconds with at least one member in the engine and generation not paused
    uptime_s: float = 0.0  # seconds since it began to serve
    kv_usage: float = 0.0
    syncs: int = 0  # updates that were answered, proven or not
    recent_syncs: tuple[WeightAck, ...] = ()  # the last of them, oldest first
    wait: Wait | None = None

    @property
    def last_sync(self) -> WeightAck | None:
        return self.recent_syncs[-1] if self.recent_syncs else None


class BufferStats(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger and the state of the buffer at one instant.

    The ledger adds up: issued == in_flight + buffered + trained + sum(discarded.values()).
    """

    issued: int = 0  # uids handed out
    in_flight: int = 0  # groups with members still missing
    buffered: int = 0  # complete groups, waiting to be sampled
    trained: int = 0
    discarded: dict[str, int] = {}  # by reason
    inserted_rollouts: int = 0
    duplicate_rollouts: int = 0
    rejected_rollouts: dict[str, int] = {}  # by reason: malformed, unknown uid, late
    refused_peers: int = 0  # connections without the run's keys, of another version, or of another run
    failed_members: dict[str, int] = {}  # by reason
    num_bytes: int = 0
    oldest_group_s: float = 0.0
    policy_version: int = 0
    max_staleness: int = 0
    capacity: int = 0  # groups the admission rule still allows to issue
    generated_tokens: dict[str, int] = {}  # response tokens by fate: trained, buffered, discarded
    generated_rollouts: dict[str, int] = {}  # rollouts by the same fates
    response_lengths: dict[str, dict[int, int]] = {}  # by the same fates: rollouts by length, up to this power of two
    waits: list[Wait] = []


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a learner rank."""

    rank: int
    policy_version: int = 0
    incarnation: int = 0
    phase: str = "starting"  # starting | wait_for_batch | train | publish | done
    busy_s: float = 0.0  # total seconds in train and publish
    uptime_s: float = 0.0  # seconds since the first wait for a batch
    trained_tokens: int = 0
    refused_peers: int = 0  # connections to the weight channel, as in BufferStats
    wait: Wait | None = None
