"""A snapshot dumped after the failure: what happened since is undone, or the blocks are told as those of a later moment."""

from __future__ import annotations

import copy
import random
from typing import Any

from oomguard.core.measurements import DeviceMemory
from oomguard.scan.snapshot import KEPT_REFUSALS, summarize
from support.made_snapshots import example

MIB = 2**20
MADE = example()
STEP = MADE.stack(("/job/train.py", 10, "step"), ("/job/main.py", 3, "main"))
AT = MADE.FIRST_ADDRESS


def event(action: str, size: int, addr: int = AT, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": [], **more}


def full(*, refused: int = 20 * MIB) -> Any:
    """Return a device with 90 MiB in use beside 10 MiB that are free, where an allocation failed."""
    made = MADE.Recorder()
    made.segment([(90 * MIB, "active_allocated", STEP), (10 * MIB, "inactive", [])])
    made.refuse(refused, 3 * MIB, STEP)
    return made


def device_of(made: Any) -> DeviceMemory:
    return summarize(made.snapshot()).devices[0]


def freed_since(made: Any) -> Any:
    """Free the 90 MiB after the refusal, as an except block does."""
    made.traces[0] += [event("free_requested", 90 * MIB), event("free_completed", 90 * MIB)]
    made.segments[0]["blocks"] = [{"size": 100 * MIB, "state": "inactive", "frames": []}]
    return made


def test_blocks_freed_since_the_failure_count_as_used():
    device = device_of(freed_since(full()))
    assert device.refusal is not None
    assert (device.allocated_bytes, device.split_bytes) == (90 * MIB, 10 * MIB)
    assert (device.refusal.free_blocks_bytes, device.refusal.largest_free_bytes) == (
        10 * MIB,
        10 * MIB,
    )
    assert str(device.stacks[0].frames[0]) == "job/train.py:10 step"
    assert (device.later_events, device.is_later) == (2, False)


def test_a_segment_given_back_since_the_refusal_is_there_again():
    made = freed_since(full())
    made.traces[0].append(event("segment_free", 100 * MIB))
    made.segments.clear()
    device = device_of(made)
    assert (device.segments, device.reserved_bytes, device.allocated_bytes) == (
        1,
        100 * MIB,
        90 * MIB,
    )
    assert device.groups[0].is_large


def test_what_was_allocated_since_the_refusal_is_gone():
    made = full()
    made.traces[0].append(event("segment_alloc", 40 * MIB, AT + 500 * MIB))
    made.traces[0].append(event("alloc", 30 * MIB, AT + 500 * MIB))
    blocks = [
        {"size": 30 * MIB, "state": "active_allocated"},
        {"size": 10 * MIB, "state": "inactive"},
    ]
    made.segments.append({"device": 0, "address": AT + 500 * MIB, "stream": 0, "blocks": blocks})
    device = device_of(made)
    assert (device.segments, device.allocated_bytes) == (1, 90 * MIB)


def test_a_block_that_was_freed_and_still_waits_was_in_use():
    made = full()
    made.traces[0].append(event("free_requested", 90 * MIB))
    made.segments[0]["blocks"][0]["state"] = "active_pending_free"
    assert (device_of(made).allocated_bytes, device_of(made).waiting_bytes) == (90 * MIB, 0)


def test_broken_history_links_no_free_block_to_the_refusal():
    for later in [
        event("segment_unmap", 20 * MIB),
        event("not heard of", 20 * MIB),
        event("alloc", 20 * MIB, AT + 95 * MIB),
        event("free_completed", 20 * MIB),
        event("free_completed", 20 * MIB, AT + 80 * MIB),
        event("free_completed", 20 * MIB, AT + 900 * MIB),
        event("free_requested", 20 * MIB),
        event("segment_alloc", 20 * MIB),
        event("segment_alloc", 100 * MIB),
        event("segment_free", 20 * MIB),
        event("alloc", 20 * MIB, [[[]]]),  # type: ignore[arg-type]
        {"action": "free_completed"},
    ]:
        made = full()
        made.traces[0].append(later)
        snapshot = summarize(made.snapshot())
        device = snapshot.devices[0]
        assert device.is_later, later
        assert device.refusal is not None, later
        assert (device.refusal.free_blocks_bytes, device.refusal.largest_free_bytes) == (
            None,
            None,
        ), later
        assert any(
            "not of the failure, because the history since then (events: 1)" in note
            for note in snapshot.notes
        ), later


def test_events_that_move_no_memory_leave_the_blocks_as_they_are():
    made = full()
    made.traces[0] += [event("snapshot", 0, 0), event("user_defined", 0, 0)]
    assert (device_of(made).later_events, device_of(made).is_later) == (0, False)


def test_any_history_leads_back_to_the_blocks_that_were_there():
    for seed in range(20):
        chance, made = random.Random(seed), MADE.Recorder()
        slots = [
            (chance.randrange(1, 9) * 512, chance.choice(["active_allocated", "inactive"]))
            for _ in range(60)
        ]
        made.segment([(size, state, STEP) for size, state in slots])
        made.refuse(20 * MIB, 0, STEP)
        before = device_of(made)
        later = copy.deepcopy(made)
        for _ in range(200):
            block = chance.choice(later.segments[0]["blocks"])
            if block["state"] == "inactive":
                later.traces[0].append(event("alloc", block["size"] - 100, block["address"]))
                block["state"] = "active_allocated"
            else:
                for action in ("free_requested", "free_completed"):
                    later.traces[0].append(event(action, block["size"] - 100, block["address"]))
                block["state"] = "inactive"
        after = device_of(later)
        assert not after.is_later, seed
        assert (after.allocated_bytes, after.split_bytes) == (
            before.allocated_bytes,
            before.split_bytes,
        ), seed
        assert after.refusal is not None, seed
        assert before.refusal is not None, seed
        assert after.refusal.free_blocks_bytes == before.refusal.free_blocks_bytes, seed
        assert [(stack.bytes, stack.blocks) for stack in after.stacks] == [
            (s.bytes, s.blocks) for s in before.stacks
        ], seed


def test_earlier_refusals_keep_size_and_stack():
    made = full(refused=100 * MIB)
    for _ in range(KEPT_REFUSALS + 5):
        made.refuse(7 * MIB, 0, STEP)
    device = device_of(made)
    assert (device.refusals, len(device.earlier_refusals)) == (KEPT_REFUSALS + 6, KEPT_REFUSALS)
    assert (device.earlier_refusals[0].tried_bytes, str(device.earlier_refusals[0].frames[0])) == (
        100 * MIB,
        "job/train.py:10 step",
    )
