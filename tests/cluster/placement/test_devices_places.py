"""What CUDA_VISIBLE_DEVICES leaves of the devices, as CUDA reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.placement.devices import DeviceSlot, apply_visible_devices, device_slots
from oomguard.core.errors import UsageError
from oomguard.core.facts import GIB
from oomguard.probe.nvml import Device, Gpu, MigInstance, Survey
from support.each import each

FOUR = tuple(DeviceSlot(i, f"GPU-{i}aaa", "A5000", 24 * GIB, 24 * GIB, {}) for i in range(4))
MIXED = (*FOUR[:3], DeviceSlot(3, "GPU-3aaa", "H100", 80 * GIB, 80 * GIB, {}))
VISIBLE = "CUDA_VISIBLE_DEVICES"


def indices(value: str | None, places: tuple[DeviceSlot, ...] = FOUR, **environ: str) -> list[int]:
    given = {} if value is None else {VISIBLE: value}
    return [place.index for place in apply_visible_devices(places, {**given, **environ}).places]


def test_without_the_variable_every_device_is_there():
    assert indices(None) == [0, 1, 2, 3]


@each(
    ("value", "left"),
    [
        ("2,0", [2, 0]),
        ("GPU-1aaa", [1]),
        ("GPU-1", [1]),  # so much of a UUID as no other has
        ("1,7,0", [1]),  # what stands behind a wrong entry is hidden
        ("1,-1,0", [1]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("GPU-", []),  # which of them is not said
        ("nonsense", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value, left):
    assert indices(value) == left


def test_what_is_hidden_is_said_with_the_variable():
    assert (
        apply_visible_devices(FOUR, {VISIBLE: "0,1"}).hides
        == "CUDA_VISIBLE_DEVICES=0,1 hides GPU 2, GPU 3"
    )


def test_device_numbers_are_refused_unless_in_bus_order():
    with pytest.raises(UsageError, match="the devices here differ") as error:
        apply_visible_devices(MIXED, {VISIBLE: "0"})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in (error.value.hint or "")
    assert indices("0", MIXED, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0]
    assert indices("GPU-3aaa", MIXED) == [3]


@given(
    st.lists(
        st.sampled_from(["0", "1", "2", "3", "4", "GPU-0", "GPU-2aaa", "x", "-1", ""]), max_size=6
    )
)
def test_the_variable_only_ever_takes_devices_away(entries):
    left = apply_visible_devices(FOUR, {VISIBLE: ",".join(entries)}).places
    assert {place.index for place in left} <= {0, 1, 2, 3}
    assert len({place.index for place in left}) == len(left)


def test_a_divided_gpu_is_its_instances_and_never_itself():
    instance = MigInstance(1, "MIG-b", "1g.10gb", 10 * GIB, 9 * GIB, {})
    divided = Gpu(Device(0, "H100", 80 * GIB, 80 * GIB, {}), "GPU-0", True, (instance,))
    (only,) = device_slots(Survey((divided,)))

    assert (only.index, only.instance, only.uuid, only.shown) == (
        0,
        1,
        "MIG-b",
        "instance 1 of GPU 0",
    )


def test_divided_gpu_without_instances_is_not_given():
    divided = Gpu(Device(0, "H100", 80 * GIB, 80 * GIB, {}), "GPU-0", True)
    lost = Gpu(Device(1, None, None, None, None), None, None, failure="GPU is lost")

    assert [place.cannot for place in device_slots(Survey((divided, lost)))] == [
        "MIG is on, but the GPU has no instance",
        "it does not answer: GPU is lost",
    ]


@each(
    ("free_gib", "by_pid", "is_empty"),
    [(24, {}, True), (23.5, {}, True), (22, {}, False), (23.9, {7: None}, False), (24, None, True)],
)
def test_device_with_only_the_drivers_memory_is_empty(free_gib, by_pid, is_empty):
    assert DeviceSlot(0, "GPU-0", "A", 24 * GIB, round(free_gib * GIB), by_pid).is_empty is is_empty


def test_a_gpu_that_does_not_answer_makes_no_difference_of_kind():
    places = [
        DeviceSlot(0, None, cannot="it does not answer: GPU is lost"),
        DeviceSlot(1, "GPU-1", "A"),
    ]
    assert [
        place.index
        for place in apply_visible_devices(places, {"CUDA_VISIBLE_DEVICES": "1,0"}).places
    ] == [
        1,
        0,
    ]


def test_hidden_neighbour_is_not_taken_for_the_driver():
    hidden, idle = 80 * GIB - 2 * GIB, 80 * GIB - GIB // 2
    assert not DeviceSlot(0, "GPU-0", "H100", 80 * GIB, hidden, {}).is_empty
    assert DeviceSlot(0, "GPU-0", "H100", 80 * GIB, idle, {}).is_empty
