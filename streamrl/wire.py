"""The messages of the rollout stream, and its records with arrays as frames.

How a message becomes frames is in `frames.py`; here is what is said between generator, buffer and learner ranks, and
how `Rollout`, `RolloutGroup` and a `Lease` with its prompt travel. Everything that arrives is untrusted: the `*_from`
functions check dtypes, lengths, limits and finiteness, and raise `FrameError` with a short countable `reason`, never
anything else. What they return are views of the received frame, and read-only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from streamrl.frames import MAX_FRAME_BYTES, MAX_HEADER_BYTES, MAX_INDEX, Index, encode, frames_of
from streamrl.frames import Array as Array
from streamrl.frames import Codec as Codec
from streamrl.frames import Frame as Frame
from streamrl.frames import FrameError as FrameError
from streamrl.frames import pack as pack
from streamrl.records import Failure, FinishReason, Lease, Rollout, RolloutGroup, RolloutTimings

MAX_DELIVERED = 1 << 14  # rollouts and failures of one message
MAX_NAME = 256  # characters

Uid = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Number = Annotated[int, Meta(ge=0)]  # of a delivery, counted by its sender

_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")

# -- every link: the first message of a session (streamrl/transport.py) ----------------------------------------------


class Hello(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """`life` is random per Connection: it tells a reconnect from a new process of the same name."""

    name: Name
    life: str
    payload: bytes


HELLO = Codec(Hello)

# -- the rollout stream: generator <-> buffer ------------------------------------------------------------------------


class GeneratorHello(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a generator says each time its link comes up: the buffer reconciles its leases with `held`."""

    incarnation: Index
    policy_version: Annotated[int, Meta(ge=-1)]  # -1: not reported yet
    credit: Index  # members asked for and not leased yet
    held: list[tuple[Uid, Index, Index]]  # (uid, member, attempt) leased and not yet acknowledged


class GeneratorWelcome(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The credit of a generator: what it may have sent without an acknowledgement."""

    window_rollouts: Annotated[int, Meta(ge=1)]
    window_bytes: Annotated[int, Meta(ge=1)]


class Report(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The version a generator has proven and now serves."""

    incarnation: Index
    policy_version: Index


class Request(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Credit for that many more members."""

    num_members: Annotated[int, Meta(ge=1, le=1 << 20)]


class Acks(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The buffer has taken charge of everything in `Delivery` number so-and-so: the generator may forget it.

    The rollouts were `accepted` and the failures `failed`, but for `others`: (place among the rollouts, status
    duplicate | stale | rejected, reason).
    """

    number: Number
    others: list[tuple[Index, str, str]]


class Cancel(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The group is gone; abort the members of it that still run."""

    uid: Uid


class End(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The run is over."""

    reason: str


class _RolloutHead(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    uid: Uid
    member: Index
    attempt: Index
    incarnation: Index
    reward: float
    reward_parts: dict[str, float]
    finish_reason: FinishReason
    generator: Annotated[str, Meta(max_length=MAX_NAME)]
    timings: RolloutTimings
    num_prompt: Index
    num_response: Annotated[int, Meta(ge=1, le=MAX_INDEX)]


class Delivery(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a generator had ready at one moment: rollouts and failures, answered by one `Acks`.

    Arrays: of every rollout prompt_ids, response_ids and versions, end to end [sum of P + 2T] i4; of every rollout
    old_log_probs [sum of T] f4. So a thousand short rollouts are checked in one pass, and cost one message.
    """

    number: Number
    heads: Annotated[list[_RolloutHead], Meta(max_length=MAX_DELIVERED)]
    failures: Annotated[list[Failure], Meta(max_length=MAX_DELIVERED)]


class Parcel(msgspec.Struct, frozen=True, gc=False):
    """A rollout or a failure that is ready to go into a `Delivery`: checked, and encoded but for its arrays."""

    content: Rollout | Failure
    head: msgspec.Raw
    num_bytes: int

    @classmethod
    def of(cls, content: Rollout | Failure) -> Parcel:
        """Raises FrameError, reason `array`, `header` or `size`, for what no receiver would take: here it can still be
        blamed on one rollout."""
        if isinstance(content, Rollout):
            _check(content)
            head = encode(_head(content))
            num_bytes = len(head) + content.num_bytes
        else:
            head = encode(content)
            num_bytes = len(head)
        if len(head) > MAX_HEADER_BYTES // 2 or num_bytes > MAX_FRAME_BYTES:
            raise FrameError(
                "size", f"{content.uid[:64]}/{content.member}: {num_bytes} bytes are too many for the wire"
            )
        return cls(content, msgspec.Raw(head), num_bytes)


def encode_delivery(
    rollouts: Sequence[Parcel], failures: Sequence[Parcel] = (), *, number: int, room: Array | None = None
) -> list[Frame]:
    """Two frames, or one without rollouts.

    Args:
        room: int32; if the arrays fit into it they are laid out there, and the frame is a view of it. Fresh memory for
            each delivery costs more than the copy. It may be used again when the frames are sent: a send copies them.

    Raises:
        FrameError: reason `size`, if they are too many for one message.
    """
    body = (number, [parcel.head for parcel in rollouts], [parcel.head for parcel in failures])
    contents = [p.content for p in rollouts if isinstance(p.content, Rollout)]
    return frames_of(Delivery, body, *_laid_out(contents, room))


def rollouts_from(message: Delivery, arrays: list[Array]) -> list[Rollout | FrameError]:
    """The rollouts of an unpacked message, in order; in the place of one with a value that must not be trained on the
    error, reason `value`. Its neighbours are not touched by it.

    Raises:
        FrameError: reason `array`: the lengths do not add up, so no rollout can be told from the next.
    """
    return _rollouts_from(message.heads, arrays)


def _check(rollout: Rollout) -> None:
    r, shape = rollout, rollout.response_ids.shape
    if not r.versions.shape == r.old_log_probs.shape == shape or not r.prompt_ids.ndim == len(shape) == 1:
        raise FrameError("array", f"{r.uid}/{r.member}: response_ids, versions and old_log_probs differ in shape")
    if not r.prompt_ids.dtype == r.response_ids.dtype == r.versions.dtype == _INT or r.old_log_probs.dtype != _FLOAT:
        raise FrameError("array", f"{r.uid}/{r.member}: ids and versions must be int32, old_log_probs float32")
    if shape[0] < 1 or not 1 <= len(r.uid) <= MAX_NAME or len(r.generator) > MAX_NAME:
        raise FrameError("header", f"{r.uid[:64]!r}/{r.member}: no response, or names not within {MAX_NAME} characters")
    if not (0 <= r.member <= MAX_INDEX and 0 <= r.attempt <= MAX_INDEX and 0 <= r.incarnation <= MAX_INDEX):
        raise FrameError("header", f"{r.uid}/{r.member}: member, attempt or incarnation is not in [0, {MAX_INDEX}]")


def encode_rollout(rollout: Rollout) -> list[Frame]:
    """A delivery of one, number 0. Raises FrameError, see `Parcel.of`."""
    return encode_delivery([Parcel.of(rollout)], number=0)


def decode_rollout(frames: Sequence[Frame]) -> Rollout:
    """The inverse of `encode_rollout`; nothing is copied."""
    message, arrays = _rollout_codec.unpack(frames)
    rollouts = rollouts_from(message, arrays)
    if len(rollouts) != 1:
        raise FrameError("header", f"a delivery of {len(rollouts)} rollouts, not of one")
    return _sound(rollouts)[0]


def encode_lease(lease: Lease, prompt_ids: npt.NDArray[np.int32]) -> list[Frame]:
    return pack(lease, (prompt_ids,))


def lease_from(message: Lease, arrays: list[Array]) -> tuple[Lease, npt.NDArray[np.int32]]:
    """A lease and its prompt_ids [P]."""
    if [a.dtype for a in arrays] != [_INT]:
        raise FrameError("array", "a lease comes with one int32 array, its prompt")
    if len(message.members) != len(message.attempts):
        raise FrameError("value", f"a lease of {len(message.members)} members and {len(message.attempts)} attempts")
    return message, arrays[0]


# -- shards: buffer <-> learner rank ---------------------------------------------------------------------------------


class LearnerHello(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A learner rank introduces itself."""

    rank: Index
    world_size: Annotated[int, Meta(ge=1)]


class Sample(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Rank asks for its shard of one chunk of step `policy_version`. A later request replaces an earlier one of the
    same rank."""

    request: Index
    policy_version: Index
    chunk: Index  # counted from 0


class Advance(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The learner's version is now `policy_version`; with `commit`, steps below it are final."""

    request: Index
    policy_version: Index
    commit: bool


class ShardHead(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The answer to `Sample`; `num_shard_groups` GroupMessages follow. The totals are of the global batch as far as it
    has been handed out, this chunk included."""

    request: Index
    num_shard_groups: Index
    num_groups: Index
    num_rollouts: Index
    num_tokens: Index
    num_response_tokens: Index
    is_last: bool  # chunk of the step


class GroupMessage(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One group; the two arrays of its members, the baseline last, are laid end to end as in a `Delivery`."""

    request: Index
    uid: Uid
    times_sampled: Index
    probability: float
    heads: list[_RolloutHead]
    has_baseline: bool


class Answer(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The answer to `Advance` (`done`), or to a `Sample` without a shard."""

    request: Index
    status: str  # done | end | refused
    detail: str = ""


def encode_group(group: RolloutGroup, *, request: int) -> list[Frame]:
    """Two frames."""
    members = group.members
    message = GroupMessage(
        request=request,
        uid=group.uid,
        times_sampled=group.times_sampled,
        probability=group.probability,
        heads=list(map(_head, members)),
        has_baseline=group.baseline is not None,
    )
    return frames_of(GroupMessage, message, *_laid_out(members))


def group_from(message: GroupMessage, arrays: list[Array]) -> RolloutGroup:
    """The group of an unpacked message; its rollouts are views of the two arrays."""
    members = tuple(_sound(_rollouts_from(message.heads, arrays)))
    if message.has_baseline and not members:
        raise FrameError("value", f"{message.uid}: a baseline is announced, and nothing came")
    return RolloutGroup(
        uid=message.uid,
        rollouts=members[:-1] if message.has_baseline else members,
        baseline=members[-1] if message.has_baseline else None,
        times_sampled=message.times_sampled,
        probability=message.probability,
    )


def _head(rollout: Rollout) -> _RolloutHead:
    return _RolloutHead(
        uid=rollout.uid,
        member=rollout.member,
        attempt=rollout.attempt,
        incarnation=rollout.incarnation,
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        finish_reason=rollout.finish_reason,
        generator=rollout.generator,
        timings=rollout.timings,
        num_prompt=len(rollout.prompt_ids),
        num_response=len(rollout.response_ids),
    )


def _laid_out(rollouts: Sequence[Rollout], room: Array | None = None) -> tuple[list[tuple[str, int]], list[Array]]:
    """The two arrays of these rollouts: what a header says of them, and their numbers in one buffer."""
    if not rollouts:
        return [], []
    integers = [array for r in rollouts for array in (r.prompt_ids, r.response_ids, r.versions)]
    log_probs = [r.old_log_probs for r in rollouts]
    num_integers, num_log_probs = sum(map(len, integers)), sum(map(len, log_probs))
    length = num_integers + num_log_probs
    buffer = np.empty(length, _INT) if room is None or length > len(room) else room[:length]
    np.concatenate(integers, out=buffer[:num_integers])
    np.concatenate(log_probs, out=buffer[num_integers:].view(_FLOAT))
    return [(_INT.str, num_integers), (_FLOAT.str, num_log_probs)], [buffer]


def _rollouts_from(heads: list[_RolloutHead], arrays: list[Array]) -> list[Rollout | FrameError]:
    if not heads and not arrays:
        return []
    if [a.dtype for a in arrays] != [_INT, _FLOAT]:
        raise FrameError("array", f"rollouts come with i4 and f4, not {[a.dtype.str for a in arrays]}")
    integers, old_log_probs = arrays
    num_log_probs = sum([head.num_response for head in heads])
    num_integers = sum([head.num_prompt for head in heads]) + 2 * num_log_probs
    if num_integers != len(integers) or num_log_probs != len(old_log_probs):
        came = f"{len(integers)} and {len(old_log_probs)} came"
        raise FrameError("array", f"{num_integers} and {num_log_probs} numbers announced, {came}")
    sound = _fault_in(integers, old_log_probs) is None  # if they are as a whole, each is
    rollouts: list[Rollout | FrameError] = []
    p = t = 0  # where the rollout's integers and log-probs begin
    for head in heads:
        response = p + head.num_prompt
        versions = response + head.num_response
        end, last = versions + head.num_response, t + head.num_response
        fault = None if sound else _fault_in(integers[p:end], old_log_probs[t:last])
        if not math.isfinite(head.reward) or (head.reward_parts and not _all_finite(head.reward_parts)):
            fault = "a reward that is not finite"
        if fault is None:
            rollouts.append(
                Rollout(
                    uid=head.uid,
                    member=head.member,
                    attempt=head.attempt,
                    prompt_ids=integers[p:response],
                    response_ids=integers[response:versions],
                    old_log_probs=old_log_probs[t:last],
                    versions=integers[versions:end],
                    incarnation=head.incarnation,
                    reward=head.reward,
                    reward_parts=head.reward_parts,
                    finish_reason=head.finish_reason,
                    generator=head.generator,
                    timings=head.timings,
                )
            )
        else:
            rollouts.append(FrameError("value", f"{head.uid}/{head.member}: {fault}"))
        p, t = end, last
    return rollouts


def _all_finite(reward_parts: dict[str, float]) -> bool:
    return all(map(math.isfinite, reward_parts.values()))


def _fault_in(integers: Array, old_log_probs: Array) -> str | None:
    if len(integers) and np.minimum.reduce(integers) < 0:
        return "a token id or a policy version below 0"
    return None if np.logical_and.reduce(np.isfinite(old_log_probs)) else "a log-prob that is not finite"


def _sound(rollouts: list[Rollout | FrameError]) -> list[Rollout]:
    """All of them, or the first error."""
    sound: list[Rollout] = []
    for rollout in rollouts:
        if isinstance(rollout, FrameError):
            raise rollout
        sound.append(rollout)
    return sound


_rollout_codec = Codec(Delivery)
TO_BUFFER = Codec(Delivery, Report, Request, Sample, Advance)
TO_GENERATOR = Codec(Lease, Acks, Cancel, End)
TO_LEARNER = Codec(ShardHead, GroupMessage, Answer, End)
HELLO_TO_BUFFER = Codec(GeneratorHello, LearnerHello)
WELCOME_FROM_BUFFER = Codec(GeneratorWelcome)
