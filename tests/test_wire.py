"""The wire format: round trips, and everything that does not follow it is refused with a countable reason."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated
from stand_ins import make_rollout

from buffers.group import is_well_formed
from streamrl import frames as frames_module
from streamrl import wire
from streamrl.errors import WireError
from streamrl.records import Failure, Lease, Rollout, RolloutGroup, RolloutTimings

NUM_MUTATIONS = 100_000
POISON: list[dict[str, Any]] = [
    {"old_log_probs": np.array([0, np.nan, 0, 0, 0], dtype=np.float32)},
    {"old_log_probs": np.array([0, -np.inf, 0, 0, 0], dtype=np.float32)},
    {"versions": np.array([0, -1, 0, 0, 0], dtype=np.int32)},
    {"response_ids": np.array([0, -1, 0, 0, 0], dtype=np.int32)},
    {"prompt_ids": np.array([-1], dtype=np.int32)},
    {"reward": float("nan")},
    {"reward_parts": {"format": float("inf")}},
]


def same(a: Rollout, b: Rollout) -> bool:
    arrays = ("prompt_ids", "response_ids", "old_log_probs", "versions")
    scalars = (
        "uid",
        "member",
        "attempt",
        "incarnation",
        "reward",
        "reward_parts",
        "finish_reason",
        "generator",
        "timings",
    )
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays) and all(
        getattr(a, n) == getattr(b, n) for n in scalars
    )


def received(frames: list[wire.Frame]) -> list[wire.Frame]:
    """Frames as they come out of a socket."""
    return [bytes(frame) for frame in frames]


def unpacked(
    rollouts: list[Rollout], failures: Sequence[Failure] = (), *, number: int = 0
) -> tuple[wire.Delivery, list[wire.Array]]:
    """A delivery as its receiver sees it, before its rollouts are looked at."""
    parcels, failed = list(map(wire.Parcel.of, rollouts)), list(map(wire.Parcel.of, failures))
    return wire.TO_BUFFER.unpack(received(wire.encode_delivery(parcels, failed, number=number)))


def reason_of(frames: list[wire.Frame]) -> str:
    try:
        wire.decode_rollout(frames)
    except wire.FrameError as error:
        return error.reason
    return "no reason: it is well-formed"


@given(
    length=st.integers(1, 50),
    prompt=st.integers(0, 20),
    member=st.integers(0, 500),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    uid=st.text(min_size=1, max_size=30),
    parts=st.dictionaries(st.text(max_size=8), st.floats(-1, 1), max_size=3),
    seed=st.integers(0, 100),
)
@settings(max_examples=25, deadline=None)
def test_a_rollout_survives_the_wire_bit_for_bit(
    length: int, prompt: int, member: int, reward: float, uid: str, parts: dict[str, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rollout = make_rollout(
        uid,
        member,
        2,
        prompt_ids=rng.integers(0, 1 << 31, prompt, dtype=np.int32),
        response_ids=rng.integers(0, 1 << 31, length, dtype=np.int32),
        old_log_probs=-rng.random(length, dtype=np.float32),
        versions=rng.integers(0, 1 << 31, length, dtype=np.int32),
        incarnation=3,
        reward=reward,
        reward_parts=parts,
        finish_reason="length",
        generator="generator-1",
        timings=RolloutTimings(queue_s=0.1, generate_s=0.2, reward_s=0.3, finished_at=1e9),
    )
    assert same(wire.decode_rollout(received(wire.encode_rollout(rollout))), rollout)


def test_what_is_received_is_not_copied_and_cannot_be_changed() -> None:
    frames = received(wire.encode_rollout(make_rollout(length=100)))
    assert len(frames) == 2
    decoded = wire.decode_rollout(frames)
    payload = np.frombuffer(frames[1], dtype=np.uint8)
    for array in (decoded.prompt_ids, decoded.response_ids, decoded.old_log_probs, decoded.versions):
        assert np.shares_memory(array, payload) and not array.flags.writeable


def test_a_single_array_is_not_copied_at_the_sender() -> None:
    prompt_ids = np.arange(5, dtype=np.int32)
    frames = wire.encode_lease(Lease(uid="u", members=(0,), attempts=(0,)), prompt_ids)
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.int32), prompt_ids)


def test_a_header_of_one_rollout_is_small() -> None:
    assert len(wire.encode_rollout(make_rollout(length=8000))[0]) < 200


def test_a_group_survives_the_wire_with_views_of_one_buffer() -> None:
    rollouts = tuple(make_rollout(member=m, length=m + 1, version=m) for m in range(4))
    group = RolloutGroup(uid="0-000000", rollouts=rollouts, times_sampled=2, probability=0.25)
    message, arrays = wire.TO_LEARNER.unpack(received(wire.encode_group(group, request=7)))
    decoded = wire.group_from(message, arrays)
    assert (message.request, decoded.uid, decoded.times_sampled, decoded.probability) == (7, "0-000000", 2, 0.25)
    assert all(map(same, decoded.rollouts, rollouts))
    assert all(np.shares_memory(r.response_ids, arrays[0]) for r in decoded.rollouts)


def test_a_greedy_member_is_told_from_the_others_on_the_wire() -> None:
    *rollouts, baseline = (make_rollout(member=m, length=m + 1) for m in range(3))
    group = RolloutGroup(uid="0-000000", rollouts=tuple(rollouts), baseline=baseline)
    decoded = wire.group_from(*wire.TO_LEARNER.unpack(received(wire.encode_group(group, request=7))))
    assert len(decoded.rollouts) == 2 and all(map(same, decoded.rollouts, rollouts))
    assert decoded.baseline is not None and same(decoded.baseline, baseline)
    nothing = wire.GroupMessage(request=1, uid="u", times_sampled=1, probability=1.0, heads=[], has_baseline=True)
    with pytest.raises(wire.FrameError, match="a baseline is announced"):
        wire.group_from(nothing, [])


def test_a_lease_carries_its_prompt_and_its_task() -> None:
    lease = Lease(
        uid="0-000017", members=(0, 3), attempts=(0, 1), task={"source": "chain_sum", "metadata": {"a": [1, 2]}}
    )
    message, arrays = wire.TO_GENERATOR.unpack(received(wire.encode_lease(lease, np.arange(5, dtype=np.int32))))
    decoded, prompt_ids = wire.lease_from(message, arrays)
    assert decoded == lease
    assert prompt_ids.tolist() == [0, 1, 2, 3, 4]


def test_a_lease_without_one_attempt_per_member_is_refused() -> None:
    lease = Lease(uid="0-000017", members=(0, 3), attempts=(0,))
    message, arrays = wire.TO_GENERATOR.unpack(received(wire.encode_lease(lease, np.arange(5, dtype=np.int32))))
    with pytest.raises(wire.FrameError, match="2 members and 1 attempts"):
        wire.lease_from(message, arrays)


def test_a_codec_knows_only_its_own_messages() -> None:
    request = wire.Request(num_members=3)
    assert wire.TO_BUFFER.unpack(received(wire.pack(request)))[0] == request
    with pytest.raises(wire.FrameError, match="^kind: 'Request' is none of Lease"):
        wire.TO_GENERATOR.unpack(received(wire.pack(request)))


def test_another_schema_version_is_refused_with_a_sentence_whatever_else_changed() -> None:
    for header in ([9, "Delivery", [], {}], [9], [9, {"new": "shape"}], [9, 1, 2, 3, 4, 5]):
        with pytest.raises(wire.FrameError, match="schema 9, this process speaks 2; start every process") as caught:
            wire.TO_BUFFER.unpack([msgspec.msgpack.encode(header)])
        assert caught.value.reason == "schema"


def test_wrong_dtypes_shapes_and_counts_are_refused_by_reason() -> None:
    header, payload = received(wire.encode_rollout(make_rollout()))
    assert reason_of([]) == "frames"
    assert reason_of([header, payload, b""]) == "frames"
    assert reason_of([header]) == "array"
    assert reason_of([header, payload[:-1]]) == "array"
    assert reason_of([header, payload + payload]) == "array"
    assert reason_of([b"\x91" * 100_000, payload]) == "header"
    assert reason_of([b"", payload]) == "header"
    assert reason_of([b"\0" * (frames_module.MAX_HEADER_BYTES + 1), payload]) == "size"
    message = wire.Codec(wire.Delivery).unpack([header, payload])[0]
    integers, log_probs = np.zeros(13, dtype=np.int32), np.zeros(5, dtype=np.float32)
    assert reason_of(received(wire.pack(message, [integers, log_probs]))) == "no reason: it is well-formed"
    assert reason_of(received(wire.pack(message, [integers.astype(np.int64), log_probs]))) == "array"
    assert reason_of(received(wire.pack(message, [integers, log_probs.astype(np.float64)]))) == "array"
    assert reason_of(received(wire.pack(message, [integers[1:], log_probs]))) == "array"
    assert reason_of(received(wire.pack(message, [integers, log_probs[1:]]))) == "array"
    assert reason_of(received(wire.pack(message, [integers]))) == "array"
    two = [wire.Parcel.of(make_rollout(member=m)) for m in range(2)]
    assert reason_of(received(wire.encode_delivery(two, number=0))) == "header"
    assert reason_of(received(wire.encode_delivery([], number=0))) == "header"


def test_arrays_that_are_no_rollouts_are_refused_at_the_sender() -> None:
    with pytest.raises(wire.FrameError, match="^array: 0-000000/0: response_ids, versions and old_log_probs differ"):
        wire.encode_rollout(make_rollout(versions=np.zeros(4, dtype=np.int32)))
    with pytest.raises(wire.FrameError, match="^array: 0-000000/0: response_ids, versions and old_log_probs differ"):
        wire.encode_rollout(make_rollout(prompt_ids=np.zeros((2, 2), dtype=np.int32)))
    with pytest.raises(wire.FrameError, match="^array: 0-000000/0: ids and versions must be int32"):
        wire.encode_rollout(make_rollout(old_log_probs=np.zeros(5, dtype=np.float64)))


@pytest.mark.parametrize(
    "changes",
    [{"length": 0}, {"uid": ""}, {"uid": "u" * 257}, {"generator": "g" * 257}, {"member": -1}, {"attempt": 1 << 31}],
)
def test_a_head_that_would_take_its_neighbours_with_it_is_refused_at_the_sender(changes: dict[str, Any]) -> None:
    with pytest.raises(wire.FrameError, match="^header: "):
        wire.Parcel.of(make_rollout(**changes))


@pytest.mark.parametrize("changes", POISON)
def test_values_that_would_poison_training_are_refused(changes: dict[str, object]) -> None:
    assert reason_of(received(wire.encode_rollout(make_rollout(**changes)))) == "value"


def test_what_no_receiver_would_take_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(wire.FrameError, match="^size: 0-000000/0: 12[0-9]+ bytes are too many"):
        wire.encode_rollout(make_rollout(length=1000))


def test_a_failure_or_a_head_that_no_receiver_would_take_is_refused_at_the_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(wire.FrameError, match="^size: 0-000000/0: [0-9]+ bytes are too many"):
        wire.Parcel.of(make_rollout(reward_parts={"part" * 200: 1.0}))
    with pytest.raises(wire.FrameError, match="^size: u/0: [0-9]+ bytes are too many"):
        wire.Parcel.of(Failure(uid="u", member=0, attempt=0, reason="reward_error", detail="d" * 1000))


def test_a_delivery_carries_rollouts_and_failures_and_its_number() -> None:
    rollouts = [make_rollout(member=m, length=m + 1, prompt_ids=np.arange(m, dtype=np.int32)) for m in range(5)]
    failure = Failure(uid="u", member=0, attempt=0, reason="reward_error")
    message, arrays = unpacked(rollouts, [failure], number=1 << 40)
    assert (message.number, message.failures) == (1 << 40, [failure])
    decoded = wire.rollouts_from(message, arrays)
    assert len(decoded) == 5 and all(
        isinstance(d, Rollout) and same(d, r) for d, r in zip(decoded, rollouts, strict=True)
    )


def test_a_delivery_of_failures_alone_has_no_arrays() -> None:
    message, arrays = unpacked([], [Failure(uid="u", member=0, attempt=0, reason="reward_error")])
    assert arrays == [] and wire.rollouts_from(message, arrays) == []


def test_a_strided_array_is_sent_as_what_it_shows() -> None:
    rollout = make_rollout(response_ids=np.arange(10, dtype=np.int32)[::2])
    assert wire.decode_rollout(wire.encode_rollout(rollout)).response_ids.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("changes", POISON)
def test_a_rollout_that_would_poison_training_does_not_take_its_neighbours_with_it(changes: dict[str, object]) -> None:
    rollouts = [make_rollout(member=0), make_rollout(member=1, **changes), make_rollout(member=2)]
    first, second, third = wire.rollouts_from(*unpacked(rollouts))
    assert isinstance(first, Rollout) and isinstance(third, Rollout)
    assert same(first, rollouts[0]) and same(third, rollouts[2])
    assert isinstance(second, wire.FrameError) and second.reason == "value" and "0-000000/1" in str(second)


def test_a_delivery_whose_lengths_do_not_add_up_is_refused_whole() -> None:
    message, (integers, log_probs) = unpacked([make_rollout(member=m) for m in range(3)])
    for arrays in ([integers[1:], log_probs], [integers, log_probs[1:]], [integers], [log_probs, integers], []):
        with pytest.raises(wire.FrameError) as caught:
            wire.rollouts_from(message, arrays)
        assert caught.value.reason == "array"


def test_mutated_frames_never_crash_and_never_grow_memory() -> None:
    """Of every kind of message; the server's counts of them are in tests/test_buffer_server.py."""
    rng = random.Random(0)
    group = RolloutGroup(uid="0-000000", rollouts=tuple(make_rollout(member=m) for m in range(3)))
    parcels = [wire.Parcel.of(make_rollout(member=m)) for m in range(3)]
    failed = wire.Parcel.of(Failure(uid="u", member=0, attempt=0, reason="r"))
    originals = [
        received(wire.encode_rollout(make_rollout(reward_parts={"a": 1.0}, generator="generator-0"))),
        received(wire.encode_group(group, request=1)),
        received(wire.encode_lease(Lease(uid="u", members=(0,), attempts=(0,)), np.arange(3, dtype=np.int32))),
        received(wire.encode_delivery(parcels, [failed], number=7)),
        received(wire.pack(wire.Acks(number=7, others=[(1, "stale", "rolled_back")]))),
    ]
    codec = wire.Codec(wire.Delivery, wire.GroupMessage, Lease, wire.Acks)
    outcomes = {"refused": 0, "taken": 0}

    def decode(frames: list[wire.Frame]) -> None:
        try:
            message, arrays = codec.unpack(frames)
            if isinstance(message, wire.Delivery):
                taken = [r for r in wire.rollouts_from(message, arrays) if isinstance(r, Rollout)]
                assert all(map(is_well_formed, taken)), "the buffer does not check again what came over the wire"
            elif isinstance(message, wire.GroupMessage):
                wire.group_from(message, arrays)
            elif isinstance(message, Lease):
                wire.lease_from(message, arrays)
            outcomes["taken"] += 1
        except WireError:
            outcomes["refused"] += 1

    for _ in range(200):  # warm every cache before memory is counted
        decode(mutated(rng.choice(originals), rng))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(NUM_MUTATIONS):
            decode(mutated(rng.choice(originals), rng))
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outcomes["refused"] + outcomes["taken"] == NUM_MUTATIONS + 200
    assert outcomes["refused"] > 0.7 * NUM_MUTATIONS
    assert after - before < 1 << 20 and peak - before < 16 << 20
