"""Record <-> frames: a msgspec header and raw array buffers. No pickle, no sockets.

A message is one or two frames. Frame 0 is msgpack: `[schema, kind, [[dtype, length], ...], body]`; frame 1, if there
are arrays, is their bytes end to end, 1-d and little-endian. One frame for all of them, because at the size of a
rollout a frame costs more than its bytes (bench/bench_wire.py). The schema version always comes first, so that a
message of another version is refused with a sentence whatever else changed. `Codec` serves any set of msgspec Structs;
the rollout stream's messages and its records with arrays (`Rollout`, `RolloutGroup`, a `Lease` with its prompt) are
defined here.

Everything that arrives is untrusted: `unpack` and the `*_from` functions check dtypes, lengths, limits and finiteness,
and raise `FrameError` (a `WireError`) with a short countable `reason`, never anything else. Arrays are views of the
received frame and therefore read-only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from streamrl.errors import WireError
from streamrl.records import Failure, FinishReason, Lease, Rollout, RolloutGroup, RolloutTimings

SCHEMA_VERSION = 1
MAX_FRAME_BYTES = 64 << 20  # 4M tokens with all they carry; also the socket's own limit
MAX_FRAMES = 2
MAX_ARRAYS = 16
MAX_HEADER_BYTES = 4 << 20

Frame: TypeAlias = bytes | memoryview
Array: TypeAlias = npt.NDArray[Any]

_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "|u1")}

Uid = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Index = Annotated[int, Meta(ge=0, le=1 << 30)]


class FrameError(WireError):
    """A message that does not follow the format.

    `reason` is the word to count it by: `schema`, `header`, `kind`, `frames`, `array`, `value`, `size`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class _Header(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    kind: str
    arrays: Annotated[tuple[tuple[str, Index], ...], Meta(max_length=MAX_ARRAYS)]
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)


def pack(message: msgspec.Struct, arrays: Sequence[Array] = ()) -> list[Frame]:
    """A Struct and its 1-d arrays as frames. A single array is not copied: leave it unchanged until it is sent.

    Raises:
        FrameError: reason `size`, if a frame would be longer than a receiver accepts.
    """
    return _frames(message, [(array.dtype.str, len(array)) for array in arrays], arrays)


def _frames(message: msgspec.Struct, specs: Sequence[tuple[str, int]], chunks: Sequence[Array]) -> list[Frame]:
    """`chunks`, end to end, are the arrays that `specs` announce."""
    body = msgspec.Raw(_encoder.encode(message))
    header = _encoder.encode((SCHEMA_VERSION, type(message).__name__, specs, body))
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError("size", f"a header of {len(header)} bytes is above the limit of {MAX_HEADER_BYTES}")
    if not specs:
        return [header]
    buffers = [(c if c.flags.c_contiguous else np.ascontiguousarray(c)).data for c in chunks if len(c)]
    payload: Frame = buffers[0].cast("B") if len(buffers) == 1 else b"".join(buffers)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError("size", f"arrays of {len(payload)} bytes are above the limit of {MAX_FRAME_BYTES}")
    return [header, payload]


class Codec:
    """Unpacks the messages of one channel: the Struct types it knows, and no others.

    Example: Codec(Ack, Cancel).unpack(pack(Cancel(uid="0-000017"))) == (Cancel(uid="0-000017"), []).
    """

    def __init__(self, *types: type[msgspec.Struct]) -> None:
        self._bodies: dict[str, msgspec.msgpack.Decoder[msgspec.Struct]] = {
            t.__name__: msgspec.msgpack.Decoder(t) for t in types
        }

    def unpack(self, frames: Sequence[Frame]) -> tuple[Any, list[Array]]:
        """The message and its arrays, as read-only views of the frames.

        Raises:
            FrameError: whatever the frames hold, this is the only error.
        """
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise FrameError("frames", f"{len(frames)} frames, at most {MAX_FRAMES} are allowed")
        if len(frames[0]) > MAX_HEADER_BYTES:
            raise FrameError("size", f"a header of {len(frames[0])} bytes is above the limit of {MAX_HEADER_BYTES}")
        try:
            header = _header_decoder.decode(frames[0])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _refuse_other_schema(_schema_of(frames[0]))
            raise FrameError("header", f"not a header: {error}") from None
        _refuse_other_schema(header.schema)
        decoder = self._bodies.get(header.kind)
        if decoder is None:
            raise FrameError("kind", f"{header.kind[:64]!r} is none of {', '.join(self._bodies)}")
        try:
            message = decoder.decode(header.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("header", f"not a {header.kind}: {error}") from None
        return message, _arrays(header.arrays, frames[1] if len(frames) > 1 else b"")


def _arrays(specs: Sequence[tuple[str, int]], frame: Frame) -> list[Array]:
    arrays: list[Array] = []
    offset = 0
    for name, length in specs:
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise FrameError("array", f"dtype {name[:16]!r} is none of {', '.join(_DTYPES)}")
        end = offset + length * dtype.itemsize
        if end > len(frame):
            raise FrameError("array", f"{length} numbers of {name} announced, {len(frame) - offset} bytes came")
        arrays.append(np.frombuffer(frame, dtype, length, offset))
        offset = end
    if offset != len(frame):
        raise FrameError("array", f"{offset} bytes of arrays announced, {len(frame)} came")
    return arrays


def _schema_of(frame: Frame) -> int | None:
    """The first number of a header whose shape this version does not know."""
    try:
        value = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value[0] if isinstance(value, list) and value and isinstance(value[0], int) else None


def _refuse_other_schema(schema: int | None) -> None:
    if schema is not None and schema != SCHEMA_VERSION:
        raise FrameError(
            "schema",
            f"the message has wire schema {schema}, this process speaks {SCHEMA_VERSION}; "
            "start every process of the run from the same streamrl version",
        )


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


class Ack(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The buffer has taken charge of (uid, member, attempt): the generator may forget it."""

    uid: Uid
    member: Index
    attempt: Index
    status: str  # accepted | duplicate | stale | rejected | failed
    reason: str = ""


class Acks(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What was settled since the last message of this kind."""

    acks: list[Ack]


class Cancel(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The group is gone; abort the members of it that still run."""

    uid: Uid


class End(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The run is over."""

    reason: str


class _RolloutHead(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    uid: Uid
    member: Index
    attempt: Index
    incarnation: Index
    reward: float
    reward_parts: dict[str, float]
    finish_reason: FinishReason
    generator: Annotated[str, Meta(max_length=256)]
    timings: tuple[float, float, float, float]
    num_prompt: Index
    num_response: Annotated[int, Meta(ge=1, le=1 << 30)]


class RolloutMessage(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One rollout. Arrays: prompt_ids, response_ids and versions end to end [P + 2T] i4, old_log_probs [T] f4."""

    head: _RolloutHead


def encode_rollout(rollout: Rollout) -> list[Frame]:
    """Two frames.

    Raises:
        FrameError: reason `array` for arrays that are no rollout's, reason `size` if it is too long for the wire.
    """
    message = RolloutMessage(head=_head(rollout))
    return _frames(message, _specs([rollout]), _chunks([rollout]))


def rollout_from(message: RolloutMessage, arrays: list[Array]) -> Rollout:
    """The rollout of an unpacked message.

    Raises:
        FrameError: reason `array` or `value`.
    """
    return _rollouts_from([message.head], arrays)[0]


def decode_rollout(frames: Sequence[Frame]) -> Rollout:
    """The inverse of `encode_rollout`; nothing is copied."""
    message, arrays = _rollout_codec.unpack(frames)
    return rollout_from(message, arrays)


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
    """One group; the two arrays of its rollouts (see `RolloutMessage`) are laid end to end, member by member."""

    request: Index
    uid: Uid
    times_sampled: Index
    probability: float
    heads: list[_RolloutHead]


class Answer(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The answer to `Advance` (`done`), or to a `Sample` without a shard."""

    request: Index
    status: str  # done | end | refused
    detail: str = ""


def encode_group(group: RolloutGroup, *, request: int) -> list[Frame]:
    """Two frames."""
    rollouts = group.rollouts
    message = GroupMessage(
        request=request,
        uid=group.uid,
        times_sampled=group.times_sampled,
        probability=group.probability,
        heads=[_head(r) for r in rollouts],
    )
    return _frames(message, _specs(rollouts), _chunks(rollouts))


def group_from(message: GroupMessage, arrays: list[Array]) -> RolloutGroup:
    """The group of an unpacked message; its rollouts are views of the two arrays."""
    return RolloutGroup(
        uid=message.uid,
        rollouts=tuple(_rollouts_from(message.heads, arrays)),
        times_sampled=message.times_sampled,
        probability=message.probability,
    )


def _head(rollout: Rollout) -> _RolloutHead:
    t = rollout.timings
    return _RolloutHead(
        uid=rollout.uid,
        member=rollout.member,
        attempt=rollout.attempt,
        incarnation=rollout.incarnation,
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        finish_reason=rollout.finish_reason,
        generator=rollout.generator,
        timings=(t.queue_s, t.generate_s, t.reward_s, t.finished_at),
        num_prompt=len(rollout.prompt_ids),
        num_response=len(rollout.response_ids),
    )


def _specs(rollouts: Sequence[Rollout]) -> list[tuple[str, int]]:
    num_prompt = num_response = 0
    for r in rollouts:
        length = len(r.response_ids)
        if not len(r.versions) == len(r.old_log_probs) == length:
            raise FrameError("array", f"{r.uid}/{r.member}: response_ids, versions, old_log_probs differ in length")
        if (
            not r.prompt_ids.dtype == r.response_ids.dtype == r.versions.dtype == _INT
            or r.old_log_probs.dtype != _FLOAT
        ):
            raise FrameError("array", f"{r.uid}/{r.member}: ids and versions must be int32, old_log_probs float32")
        num_prompt += len(r.prompt_ids)
        num_response += length
    return [("<i4", num_prompt + 2 * num_response), ("<f4", num_response)]


def _chunks(rollouts: Sequence[Rollout]) -> list[Array]:
    chunks: list[Array] = []
    for r in rollouts:
        chunks += (r.prompt_ids, r.response_ids, r.versions)
    return [*chunks, *(r.old_log_probs for r in rollouts)]


def _rollouts_from(heads: list[_RolloutHead], arrays: list[Array]) -> list[Rollout]:
    if [a.dtype for a in arrays] != [_INT, _FLOAT]:
        raise FrameError("array", f"rollouts come with i4 and f4, not {[a.dtype.str for a in arrays]}")
    integers, old_log_probs = arrays
    if len(integers) and np.minimum.reduce(integers) < 0:
        raise FrameError("value", "a token id or a policy version below 0")
    if not np.logical_and.reduce(np.isfinite(old_log_probs)):
        raise FrameError("value", "a log-prob that is not finite")
    rollouts: list[Rollout] = []
    p = t = 0
    for head in heads:
        if not (math.isfinite(head.reward) and all(map(math.isfinite, head.reward_parts.values()))):
            raise FrameError("value", "a reward that is not finite")
        response = p + head.num_prompt
        versions, end = response + head.num_response, response + 2 * head.num_response
        rollouts.append(
            Rollout(
                uid=head.uid,
                member=head.member,
                attempt=head.attempt,
                prompt_ids=integers[p:response],
                response_ids=integers[response:versions],
                old_log_probs=old_log_probs[t : t + head.num_response],
                versions=integers[versions:end],
                incarnation=head.incarnation,
                reward=head.reward,
                reward_parts=head.reward_parts,
                finish_reason=head.finish_reason,
                generator=head.generator,
                timings=RolloutTimings(
                    queue_s=head.timings[0],
                    generate_s=head.timings[1],
                    reward_s=head.timings[2],
                    finished_at=head.timings[3],
                ),
            )
        )
        p, t = end, t + head.num_response
    if p != len(integers) or t != len(old_log_probs):
        raise FrameError("array", f"{p} and {t} numbers announced, {len(integers)} and {len(old_log_probs)} came")
    return rollouts


_rollout_codec = Codec(RolloutMessage)
TO_BUFFER = Codec(RolloutMessage, Failure, Report, Request, Sample, Advance)
TO_GENERATOR = Codec(Lease, Acks, Cancel, End)
TO_LEARNER = Codec(ShardHead, GroupMessage, Answer, End)
HELLO_TO_BUFFER = Codec(GeneratorHello, LearnerHello)
WELCOME_FROM_BUFFER = Codec(GeneratorWelcome)
