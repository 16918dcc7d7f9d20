"""What a snapshot says, in the forms of torch 2.0 to 2.13: who holds what, where there is room, what was refused."""

from __future__ import annotations

from typing import Any

import pytest

from oomguard.scan import snapshot
from oomguard.scan.snapshot import KEPT_FRAMES, KEPT_GROUPS, KEPT_STACKS, RefusedError, summarize
from support.made_snapshots import example

MIB = 2**20
MADE = example()
STEP = MADE.stack(("/job/train.py", 10, "step"), ("/job/main.py", 3, "main"))


def recorded(*segments: Any, refused: int | None = None, **options: Any) -> dict[str, Any]:
    made = MADE.Recorder(2)
    for blocks in segments:
        made.segment(blocks, **options)
    if refused is not None:
        made.refuse(refused, 100 * MIB, STEP)
    whole: dict[str, Any] = made.snapshot()
    return whole


def test_live_free_and_waiting_bytes_add_up_to_reserved():
    device = summarize(
        recorded(
            [(30 * MIB, "active_allocated", STEP), (10 * MIB, "inactive", [])],
            [(20 * MIB, "inactive", [])],
            [(8 * MIB, "active_pending_free", STEP), (2 * MIB, "active_awaiting_free", STEP)],
        )
    ).devices[0]
    assert (
        device.allocated_bytes,
        device.split_bytes,
        device.free_bytes,
        device.waiting_bytes,
    ) == (
        30 * MIB,
        10 * MIB,
        20 * MIB,
        10 * MIB,
    )
    assert device.reserved_bytes == 70 * MIB
    assert device.requested_bytes == 30 * MIB - 100
    assert device.largest_free_bytes == 20 * MIB


def test_blocks_are_counted_by_program_lines_not_torchs():
    other = MADE.stack(("/job/eval.py", 4, "score"))
    device = summarize(
        recorded([(2 * MIB, "active_allocated", STEP)] * 3 + [(9 * MIB, "active_allocated", other)])
    ).devices[0]
    assert [
        (stack.bytes, stack.blocks, [str(frame) for frame in stack.frames])
        for stack in device.stacks
    ] == [
        (9 * MIB, 1, ["job/eval.py:4 score"]),
        (6 * MIB, 3, ["job/train.py:10 step", "job/main.py:3 main"]),
    ]


def test_equal_stacks_noted_apart_are_one():
    again = [dict(frame) for frame in STEP]
    device = summarize(
        recorded([(MIB, "active_allocated", STEP), (MIB, "active_allocated", again)])
    ).devices[0]
    assert [stack.blocks for stack in device.stacks] == [2]


def test_of_a_deep_stack_the_innermost_lines_count():
    deep = MADE.stack(*((f"/job/part_{number}.py", number, "call") for number in range(40)))
    device = summarize(recorded([(MIB, "active_allocated", deep)])).devices[0]
    assert [frame.line for frame in device.stacks[0].frames] == list(range(KEPT_FRAMES))


def test_more_stacks_and_groups_than_are_kept_are_told_together():
    many = [MADE.stack(("/job/a.py", number, "f")) for number in range(KEPT_STACKS + 5)]
    made = MADE.Recorder()
    for number in range(KEPT_GROUPS + 3):
        made.segment([(MIB, "active_allocated", many[number % len(many)])], stream=number)
    device = summarize(made.snapshot()).devices[0]
    assert (len(device.stacks), device.other_stacks) == (KEPT_STACKS, 5)
    assert (
        sum(stack.bytes for stack in device.stacks) + device.other_stacks_bytes
        == device.allocated_bytes
    )
    assert (len(device.groups), device.other_groups) == (KEPT_GROUPS, 3)


def test_refused_size_is_shown_next_to_usable_blocks():
    made = MADE.Recorder()
    made.segment(
        [
            (50 * MIB, "active_allocated", STEP),
            (10 * MIB, "inactive", []),
            (20 * MIB, "inactive", []),
        ]
    )
    made.segment(
        [(MIB // 2, "active_allocated", STEP), (3 * MIB // 2, "inactive", [])]
    )  # small blocks
    made.segment([(MIB, "active_allocated", STEP), (90 * MIB, "inactive", [])], stream=7)
    made.segment([(5 * MIB, "active_allocated", STEP), (80 * MIB, "inactive", [])], pool=(0, 1))
    made.refuse(3 * MIB, 0, STEP)
    made.refuse(25 * MIB, 4 * MIB, STEP)
    device = summarize(made.snapshot()).devices[0]
    refusal = device.refusal
    assert refusal is not None
    assert (refusal.tried_bytes, refusal.device_free_bytes, device.refusals) == (
        25 * MIB,
        4 * MIB,
        2,
    )
    assert (refusal.free_blocks_bytes, refusal.largest_free_bytes) == (30 * MIB, 20 * MIB)
    assert str(refusal.frames[0]) == "job/train.py:10 step"
    assert device.private_pool_bytes == 5 * MIB


def test_each_device_has_its_own_figures():
    made = MADE.Recorder(2)
    made.segment([(4 * MIB, "active_allocated", STEP)], device=1)
    made.refuse(8 * MIB, 0, STEP, device=1)
    made.segment([(4 * MIB, "active_allocated", STEP)] * 2)
    zero, one = summarize(made.snapshot()).devices
    assert (zero.allocated_bytes, zero.refusal) == (8 * MIB, None)
    assert (one.index, one.allocated_bytes, one.refusal is not None) == (1, 4 * MIB, True)


def test_the_form_of_torch_2_0_keeps_the_stack_in_the_history():
    history = [{"addr": 0, "real_size": 1000, "frames": STEP}, {"addr": 0, "real_size": 500}]
    block = {"size": 1024, "requested_size": 1000, "state": "active_allocated", "history": history}
    old = {
        "segments": [
            {"device": 0, "address": 0, "total_size": 1024, "stream": 0, "blocks": [block]}
        ],
        "device_traces": [],
    }
    snapshot = summarize(old)
    device = snapshot.devices[0]
    assert (device.requested_bytes, str(device.stacks[0].frames[0])) == (
        1000,
        "job/train.py:10 step",
    )
    assert (snapshot.settings, device.groups[0].is_large) == (None, None)


def test_options_of_the_allocator_are_told_as_they_were_set():
    whole = recorded([(MIB, "active_allocated", STEP)])
    assert summarize(whole).settings == ""
    assert (
        summarize({**whole, "allocator_settings": {"expandable_segments": True}}).settings
        == "expandable_segments:True"
    )
    set_by_user = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert (
        summarize({**whole, "allocator_settings": set_by_user}).settings == "max_split_size_mb:512"
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "no segments"),
        ({"segments": {}}, "no segments"),
        ({"segments": [1]}, "segment 0 is not a dict"),
        ({"segments": [{"blocks": 3}]}, "blocks of segment 0 is not a list"),
        ({"segments": [{"blocks": [3]}]}, "a block of segment 0 is not a dict"),
        ({"segments": [{"blocks": [{"size": -1, "state": "inactive"}]}]}, "has the size -1"),
        ({"segments": [{"blocks": [{"size": True, "state": "inactive"}]}]}, "has the size True"),
        ({"segments": [{"blocks": [{"size": 1, "state": "lost"}]}]}, "has the state 'lost'"),
        (
            {"segments": [{"blocks": [{"size": 1, "state": ["inactive"]}]}]},
            "has the state of type list",
        ),
        ({"segments": [{"device": "x", "blocks": []}]}, "the device 'x'"),
        ({"segments": [], "device_traces": [[{"action": "oom"}]]}, "has the size None"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_what_is_wrong_in_it(raw: object, reason: str):
    with pytest.raises(RefusedError, match=reason):
        summarize(raw)


def test_one_block_that_a_list_refers_to_without_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "MOST_CONTAINERS", 1000)
    block = {"size": 512, "state": "inactive"}
    with pytest.raises(RefusedError, match="more than 1,000 entries"):
        summarize({"segments": [{"blocks": [block] * 1000}]})


def test_notes_say_why_a_snapshot_has_no_refusal():
    without_history = recorded([(MIB, "active_allocated", [])])
    without_history["device_traces"] = [[]]
    assert [note.partition(" (")[0] for note in summarize(without_history).notes] == [
        "without a recorded history",
        "no live block has a Python stack, so it is unknown who allocated them",
    ]
    assert (
        "none of the 1 recorded" in summarize(recorded([(MIB, "active_allocated", STEP)])).notes[0]
    )
    assert "no segment" in summarize({"segments": []}).notes[0]


def test_wrong_total_is_reported_and_the_blocks_count():
    for total, told in [
        (9 << 30, "9,663,676,416"),
        (float("nan"), "nan"),
        (MIB, "1,048,576"),
        (-1, "no size"),
        ([], "of type list"),
    ]:
        raw = recorded(*[[(30 * MIB, "active_allocated", STEP), (10 * MIB, "inactive", [])]] * 2)
        raw["segments"][1]["total_size"] = total
        seen = summarize(raw)
        assert seen.devices[0].reserved_bytes == 80 * MIB, (total, told)
        assert (
            f"segment 1 has the total_size {told}, but its blocks have 41,943,040 bytes"
            in seen.notes[0]
        ), (
            total,
            told,
        )


@pytest.mark.parametrize("is_same_object", [False, True], ids=["a copy", "the same object"])
def test_a_segment_that_stands_in_it_twice_counts_once(is_same_object: bool):
    raw = recorded(*[[(30 * MIB, "active_allocated", STEP)]] * 2)
    first = raw["segments"][0]
    raw["segments"].append(first if is_same_object else {**first, "blocks": [*first["blocks"]]})
    seen = summarize(raw)
    assert (seen.devices[0].reserved_bytes, seen.devices[0].segments) == (60 * MIB, 2)
    assert "segment 2 has the address of an earlier one" in seen.notes[0]
