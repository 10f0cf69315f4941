"""The shared segment: what is written is read, and nothing else ever is."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pathlib
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from streamrl.errors import WeightSyncError
from streamrl.weight_sync import segment
from streamrl.weight_sync.segment import (
    SegmentReader,
    SegmentWriter,
    Shadow,
    TornReadError,
    segment_path,
    unlink_segment,
)

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def run_name() -> Iterator[str]:
    name = f"test_shm {uuid.uuid4()}"
    yield name
    unlink_segment(name)


def whole(reader: SegmentReader, sequence: int) -> list[tuple[str, torch.Tensor]]:
    """A copy of one version, as a generator makes it, and read as its engine reads it."""
    shadow = Shadow(reader.layout)
    try:
        reader.copy(sequence, shadow.begin(sequence))
        shadow.finish(sequence)
        seen = SegmentReader.open(shadow.path, writable=True)
        tensors = [(name, tensor.clone()) for name, tensor in seen.view(sequence)]
        seen.close()
        return tensors
    finally:
        shadow.close()


def some_parameters() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "odd.weight": torch.randn(7, 3),
        "half.weight": torch.randn(5, 2).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "counts": torch.arange(11),
        "slice.weight": torch.randn(6, 8)[:, ::2],  # not contiguous
    }


def test_what_was_written_is_read_bit_for_bit(run_name: str) -> None:
    parameters = some_parameters()
    writer = SegmentWriter.create(run_name, world_size=1, parameters=parameters)
    written = writer.write(1, parameters)
    read = dict(whole(SegmentReader.open(writer.path), 1))
    assert list(read) == list(parameters)
    for name, tensor in parameters.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    assert written == sum(t.numel() * t.element_size() for t in parameters.values())


def test_the_payload_can_have_a_dtype_of_its_own(run_name: str) -> None:
    parameters = {"weight": torch.randn(16, 4)}
    writer = SegmentWriter.create(run_name, world_size=1, parameters=parameters, dtype=torch.bfloat16)
    writer.write(1, parameters)
    (_, read), *_ = whole(SegmentReader.open(writer.path), 1)
    assert torch.equal(read, parameters["weight"].bfloat16())


def test_a_parameter_that_changes_later_does_not_change_what_was_published(run_name: str) -> None:
    parameters = {"weight": torch.ones(4)}
    writer = SegmentWriter.create(run_name, world_size=1, parameters=parameters)
    writer.write(1, parameters)
    parameters["weight"].zero_()
    assert whole(SegmentReader.open(writer.path), 1)[0][1].tolist() == [1.0] * 4


def test_a_version_that_not_every_rank_has_written_is_refused(run_name: str) -> None:
    parameters = {"weight": torch.ones(4)}
    writer = SegmentWriter.create(run_name, world_size=2, parameters=parameters)
    other = SegmentWriter.attach(run_name, rank=1)
    reader = SegmentReader.open(writer.path)
    writer.write(1, parameters)
    with pytest.raises(TornReadError, match="not whole"):
        whole(reader, 1)
    other.write(1, parameters)
    assert whole(reader, 1)[0][1].tolist() == [1.0] * 4


def test_the_version_before_stays_readable_while_the_next_is_written(run_name: str) -> None:
    parameters = {"weight": torch.ones(4)}
    writer = SegmentWriter.create(run_name, world_size=1, parameters=parameters)
    reader = SegmentReader.open(writer.path)
    writer.write(1, parameters)
    writer.write(2, {"weight": torch.full((4,), 2.0)})
    assert reader.holds(1) and reader.holds(2)
    writer.write(3, {"weight": torch.full((4,), 3.0)})
    assert not reader.holds(1)
    with pytest.raises(TornReadError):
        whole(reader, 1)
    assert whole(reader, 2)[0][1].tolist() == [2.0] * 4


def test_a_writer_that_overtakes_the_copy_is_noticed(run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"weight": torch.ones(4)}
    writer = SegmentWriter.create(run_name, world_size=1, parameters=parameters)
    reader = SegmentReader.open(writer.path)
    writer.write(1, parameters)
    copy = segment.np.copyto

    def overtaken(target: Any, source: Any) -> None:
        copy(target, source)
        writer.write(3, {"weight": torch.full((4,), 3.0)})

    monkeypatch.setattr(segment.np, "copyto", overtaken)
    with pytest.raises(TornReadError):
        whole(reader, 1)


def _write_for(run_name: str, seconds: float) -> None:
    """Versions without a pause; every element of version v is v."""
    writer = SegmentWriter.attach(run_name, rank=0)
    weight = torch.empty(1 << 20)
    sequence, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        sequence += 1
        writer.write(sequence, {"weight": weight.fill_(sequence)})


def test_a_reader_beside_a_writer_in_a_hurry_gets_whole_versions_only(run_name: str) -> None:
    shape = {"weight": torch.empty(1 << 20)}
    reader = SegmentReader.open(SegmentWriter.create(run_name, world_size=1, parameters=shape).path)
    process = SPAWN.Process(target=_write_for, args=(run_name, 2.0))
    process.start()
    copies = torn = newest = 0
    while process.is_alive():
        counters = [int(reader._end[slot][0]) for slot in range(segment.NUM_SLOTS)]
        try:
            (_, weight), *_ = whole(reader, max(counters))
        except TornReadError:
            torn += max(counters) > 0
            continue
        low, high = weight.min().item(), weight.max().item()
        assert low == high == max(counters), "a copy mixed two versions"
        assert high >= newest
        copies, newest = copies + 1, int(high)
    process.join()
    assert process.exitcode == 0
    print(f"{copies} whole copies, {torn} torn and refused, {newest} versions written")
    assert copies > 10 and newest > 10


def _write_shards(rank: int, world_size: int, run_name: str, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    parameters = sharded_tensors(rank, world_size)
    if rank == 0:
        SegmentWriter.create(run_name, world_size=world_size, parameters=parameters)
    dist.barrier()
    writer = SegmentWriter.attach(run_name, rank=rank)
    assert isinstance(parameters["rows7"], DTensor)
    written = writer.write(1, parameters)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([written]))
    payload = sum(t.numel() * t.element_size() for t in parameters.values())
    assert sum(int(s) for s in sizes) == payload, "a byte was written by no rank, or by two"
    dist.destroy_process_group()


def sharded_tensors(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """`sharded_parameters`, and one of them placed in every other way, on this rank of a process group."""
    mesh = init_device_mesh("cpu", (world_size,))
    full = sharded_parameters()
    parameters: dict[str, torch.Tensor] = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in full.items()}
    parameters["columns"] = distribute_tensor(full["rows7"], mesh, [Shard(1)])
    parameters["replicated"] = distribute_tensor(full["rows7"], mesh, [Replicate()])
    parameters["plain"] = full["rows7"] if rank == 0 else torch.zeros_like(full["rows7"])  # rank 0's counts
    return parameters


def sharded_parameters() -> dict[str, torch.Tensor]:
    """Over 3 ranks: 3, 3, 1 rows; 2, 2, 0; 1, 0, 0; and an even one."""
    torch.manual_seed(2)
    return {"rows7": torch.randn(7, 5), "rows4": torch.randn(4, 2), "row": torch.randn(1, 4), "even": torch.randn(9)}


def test_ranks_write_uneven_shards_each_to_its_place(run_name: str, tmp_path: pathlib.Path) -> None:
    world_size = 3
    ranks = [
        SPAWN.Process(target=_write_shards, args=(rank, world_size, run_name, str(tmp_path / "rendezvous")))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * world_size
    read = dict(whole(SegmentReader.open(segment_path(run_name)), 1))
    full = sharded_parameters()
    for name, tensor in full.items():
        assert torch.equal(read[name], tensor), name
    for name in ("columns", "replicated", "plain"):
        assert torch.equal(read[name], full["rows7"]), name


def test_a_new_life_of_the_learner_replaces_the_segment_and_old_mappings_stay_valid(run_name: str) -> None:
    parameters = {"weight": torch.ones(4)}
    old = SegmentWriter.create(run_name, world_size=1, parameters=parameters)
    reader = SegmentReader.open(old.path)
    old.write(1, parameters)
    new = SegmentWriter.create(run_name, world_size=1, parameters=parameters)
    assert new.nonce != old.nonce and SegmentReader.open(new.path).nonce == new.nonce
    assert whole(reader, 1)[0][1].tolist() == [1.0] * 4
    old.unlink()
    assert new.path.exists(), "the old life must not remove the segment of the new one"
    new.unlink()
    assert not new.path.exists()


def test_leftovers_of_a_crash_are_removed_by_name(run_name: str) -> None:
    SegmentWriter.create(run_name, world_size=1, parameters={"weight": torch.ones(4)}).close()
    assert unlink_segment(run_name)
    assert not segment_path(run_name).exists()
    assert not unlink_segment(run_name)


def test_a_full_shared_memory_is_a_sentence_and_leaves_nothing_behind(
    run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(WeightSyncError, match="/dev/shm has no room for .* MB of weights.*--shm-size"):
        SegmentWriter.create(run_name, world_size=1, parameters={"weight": torch.ones(4)})
    assert set(os.listdir("/dev/shm")) == before


def test_a_file_that_is_no_segment_is_refused(tmp_path: pathlib.Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_bytes(bytes(4096))
    with pytest.raises(WeightSyncError, match="not a weight segment"):
        SegmentReader.open(stranger)


def test_the_segment_is_private_to_the_user(run_name: str) -> None:
    writer = SegmentWriter.create(run_name, world_size=1, parameters={"weight": torch.ones(4)})
    assert writer.path.stat().st_mode & 0o077 == 0


def test_two_run_names_never_share_a_segment() -> None:
    assert segment_path("a b") != segment_path("a-b")
    assert segment_path("x" * 300).name != segment_path("x" * 301).name
    assert len(segment_path("x" * 300).name) < 100
