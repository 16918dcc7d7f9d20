"""What benchmarks/limit_memory.py replays: a recorded trace, from its middle on, through the simulated allocator."""

from __future__ import annotations

import pickle
import tarfile

import pytest

import limit_memory
import record_snapshots
from oomguard.facts import MIB
from oomguard.memory.generate.caching_allocator import CachingAllocator
from support.recorded_trace import replay, traces

SEGMENT = {"device": 0, "stream": 0, "is_expandable": False, "segment_pool_id": (0, 0)}


def block(size, state="active_allocated", asked=None):
    return {"size": size, "requested_size": asked or size, "state": state}


def event(action, address, size):
    return {"action": action, "addr": address, "size": size, "stream": 0}


def written(path, segments, events):
    segments = [SEGMENT | segment | {"total_size": sum(b["size"] for b in segment["blocks"])} for segment in segments]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events]}))
    return path


# 20 MiB at 0, of which 6 MiB were in use before; then 8 MiB in its rest, the 6 MiB freed, and 12 MiB, which only a segment of its own holds.
RECORDED = (
    [
        {
            "address": 0,
            "blocks": [block(6 * MIB, "inactive"), block(8 * MIB), block(6 * MIB, "inactive")],
        },
        {"address": 100 * MIB, "blocks": [block(12 * MIB)]},
    ],
    [
        event("alloc", 6 * MIB, 8 * MIB),
        event("free_requested", 0, 6 * MIB),
        event("free_completed", 0, 6 * MIB),
        event("segment_alloc", 100 * MIB, 12 * MIB),
        event("alloc", 100 * MIB, 12 * MIB),
    ],
)


def test_a_trace_that_began_in_the_middle_is_replayed_from_what_was_there(tmp_path):
    (trace,) = traces(written(tmp_path / "snapshot.pickle", *RECORDED))
    assert (trace.segments, trace.in_use) == ({0: 20 * MIB}, {0: 6 * MIB})
    replayed = replay(trace)
    assert (replayed.allocations, replayed.segments_taken) == (2, 1)
    assert replayed.torch_bytes == replayed.simulated_bytes == 32 * MIB
    assert replayed.worst_ratio == 0


def test_an_allocator_that_did_something_else_is_told_by_how_much(tmp_path):
    segments, events = RECORDED
    more = [*segments, {"address": 200 * MIB, "blocks": [block(8 * MIB, "inactive")]}]
    (trace,) = traces(
        written(tmp_path / "snapshot.pickle", more, [event("segment_alloc", 200 * MIB, 8 * MIB), *events])
    )
    replayed = replay(trace)
    assert (replayed.torch_bytes, replayed.simulated_bytes) == (40 * MIB, 32 * MIB)
    assert replayed.worst_ratio == pytest.approx(8 / 28)


def test_what_the_simulated_allocator_does_not_know_is_no_trace(subtests, tmp_path):
    for other in [{"is_expandable": True}, {"segment_pool_id": (1, 0)}, {"stream": 7}]:
        with subtests.test(other=other):
            segments, events = RECORDED
            path = written(
                tmp_path / "snapshot.pickle", [segment | other for segment in segments[:1]] + segments[1:], events
            )
            assert list(traces(path)) == []


def test_a_snapshot_is_read_as_data_only(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"cos\nsystem\n(S'touch touched'\ntR.")
    with pytest.raises(pickle.UnpicklingError, match="is no data"):
        list(traces(path))


def test_a_segment_is_taken_over_as_it_stands():
    allocator = CachingAllocator()
    pieces = ((4 * MIB, True), (6 * MIB, False), (2 * MIB, True), (8 * MIB, False))
    used = allocator.take_over(pieces, small=False)
    assert [used_block.size for used_block in used] == [4 * MIB, 2 * MIB]
    assert (allocator.reserved_bytes, allocator.largest_free_bytes) == (20 * MIB, 8 * MIB)
    for used_block in used:
        allocator.release(used_block, used_block.size)
    assert allocator.largest_free_bytes == 20 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_what_is_recorded_of_a_snapshot_replays_as_the_whole_does(tmp_path):
    segments, events = RECORDED
    refusal = {"action": "oom", "device_free": 1, "size": 30 * MIB, "stream": 0}
    path = written(tmp_path / "whole.pickle", segments, [events[0], refusal, *events[1:]])
    snapshot = pickle.loads(path.read_bytes())
    for entry in (*snapshot["segments"], *snapshot["device_traces"][0]):
        entry |= {"frames": [{"name": "f", "filename": "a.py", "line": 1}], "time_us": 12}
    small = tmp_path / "small.pickle"
    small.write_bytes(pickle.dumps(record_snapshots.small(snapshot)))

    (whole,), (kept,) = traces(path), traces(small)
    assert (kept.segments, kept.in_use) == (whole.segments, whole.in_use)
    assert replay(kept) == replay(whole)
    assert b"frames" not in small.read_bytes()


def test_what_torch_took_of_an_h100_is_what_the_replay_takes(tmp_path):
    with tarfile.open(limit_memory.OWN) as archive:
        archive.extractall(tmp_path, filter="data")
    found = [replay(trace) for path in sorted(tmp_path.rglob("generate_*.pickle")) for trace in traces(path)]

    assert len(found) == 10
    assert max(one.worst_ratio for one in found) <= 0.001
