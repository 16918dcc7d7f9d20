"""The allocator's rules, and its laws: it never holds less than is in use, nor more than the device has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import MIB
from oomguard.estimate.call.allocator import (
    AllocatorSegment,
    CachingAllocator,
    least_capacity,
    replay,
)

SIZES = (
    st.integers(1, 60 * MIB)
    | st.integers(1, 4096)
    | st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 20 * MIB])
)


@st.composite
def histories(draw):
    """Allocations and ends in any order, each storage ended at most once."""
    events, alive, number = [], [], 0
    for _ in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            events.append((alive.pop(draw(st.integers(0, len(alive) - 1))), 0))
        else:
            number += 1
            events.append((number, draw(SIZES)))
            alive.append(number)
    return events


def peak_in_use(events):
    sizes, most = {}, 0
    for number, size in events:
        sizes[number] = size
        most = max(most, sum(sizes.values()))
    return most


def test_segments_have_the_sizes_of_torch(subtests):
    for size, reserved in [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ]:
        with subtests.test(size=size, reserved=reserved):
            assert replay([(1, size)]) == reserved


def test_small_tensors_share_a_segment():
    assert replay([(n, 512) for n in range(1, 4097)]) == 2 * MIB


def test_a_freed_block_is_used_again_and_its_rest_too():
    assert replay([(1, 40 * MIB), (1, 0), (2, 15 * MIB), (3, 25 * MIB)]) == 40 * MIB


def test_neighbours_are_joined_when_both_are_free():
    assert (
        replay([(1, 40 * MIB), (1, 0), (2, 15 * MIB), (3, 25 * MIB), (2, 0), (3, 0), (4, 40 * MIB)])
        == 40 * MIB
    )


def test_growing_sizes_leave_segments_until_the_device_is_full():
    growing = [event for n in range(1, 20) for event in ((n, (20 + 2 * n) * MIB), (n, 0))]
    assert replay(growing) > 2 * 58 * MIB
    assert replay(growing, 58 * MIB) == 58 * MIB
    assert replay(growing, 56 * MIB) is None


def test_block_that_may_fail_is_allocated_if_it_fits():
    events = [(1, 40 * MIB), (2, -30 * MIB), (3, 20 * MIB), (2, 0)]
    assert replay(events, 100 * MIB) == 90 * MIB
    assert replay(events, 62 * MIB) == 60 * MIB
    assert replay(events, 50 * MIB) is None
    assert replay(events) == 60 * MIB


@given(histories())
def test_it_holds_at_least_what_is_in_use(events):
    assert replay(events) >= peak_in_use(events)


@given(histories(), st.integers(2, 400))
def test_it_never_holds_more_than_the_device_has(events, capacity_mib):
    found = replay(events, capacity_mib * MIB)
    assert found is None or peak_in_use(events) <= found <= capacity_mib * MIB


@given(histories())
def test_what_all_went_back_is_whole_segments_again(events):
    allocator, held = CachingAllocator(), {}
    for number, size in events:
        if size:
            held[number] = (allocator.allocate(size), size)
        else:
            allocator.release(*held.pop(number))
    for block in held.values():
        allocator.release(*block)
    reserved = allocator.reserved_bytes
    allocator.capacity_bytes = reserved
    assert allocator.allocate(reserved + 1) is None  # the attempt gives every free segment back
    assert allocator.reserved_bytes == 0


@given(histories())
def test_the_least_capacity_runs_the_history(events):
    least = least_capacity(events, peak_in_use(events))
    assert replay(events, least) is not None
    assert least <= replay(events)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30 * MIB)), max_size=80))
def test_segments_taken_over_are_those_that_were_there(steps):
    allocator, held = CachingAllocator(), {}
    for number, size in steps:
        if number in held:
            allocator.release(*held.pop(number))
        else:
            held[number] = (allocator.allocate(size), size)
    segments = allocator.segments()
    twin = CachingAllocator()
    for segment in segments:
        twin.take_over(segment.pieces, small=segment.small)

    assert sorted(twin.segments()) == sorted(segments)
    assert (twin.reserved_bytes, twin.largest_free_bytes) == (
        allocator.reserved_bytes,
        allocator.largest_free_bytes,
    )
    assert sum(segment.used_bytes for segment in segments) == sum(
        block.size for block, _ in held.values()
    )


def test_what_is_alive_leaves_less_than_its_bytes_say():
    held = AllocatorSegment(small=False, pieces=((12 * MIB, True), (8 * MIB, False)))

    assert replay([(1, 9 * MIB)], 40 * MIB, [held]) == 40 * MIB
    assert replay([(1, 9 * MIB)], 39 * MIB, [held]) is None
    assert replay([(1, 7 * MIB)], 20 * MIB, [held]) == 20 * MIB


def test_free_blocks_are_taken_at_the_lowest_address():
    allocator = CachingAllocator()
    older, newer = allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)
    allocator.release(newer, 12 * MIB)
    allocator.release(older, 12 * MIB)

    assert newer.address < older.address
    assert allocator.allocate(12 * MIB) is newer


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
