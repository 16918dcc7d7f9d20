"""What --gpus asks for."""

from __future__ import annotations

import pytest

from oomguard.cluster.placement.devices import DeviceSlot
from oomguard.cluster.placement.need import DeviceRequest, read_gpus
from oomguard.core.errors import UsageError
from support.each import each

THREE = tuple(DeviceSlot(i, f"GPU-{i}aaa") for i in range(3))


@each(
    ("text", "asked"),
    [
        ("auto", DeviceRequest()),
        ("2", DeviceRequest(2)),
        ("1,", DeviceRequest(1, ("1",))),
        ("0,1", DeviceRequest(2, ("0", "1"))),
        (" GPU-0aaa, 2 ", DeviceRequest(2, ("GPU-0aaa", "2"))),
        ("MIG-1f-2", DeviceRequest(1, ("MIG-1f-2",))),
    ],
)
def test_it_is_auto_a_number_or_a_list(text, asked):
    assert read_gpus(text) == asked
    assert read_gpus(asked.shown) == asked


@each("text", ["", "all", "0", "-1", "0;1", "0,,1", "1,1", "GPU", "0,x"])
def test_anything_else_is_a_mistake_with_what_is_understood(text):
    with pytest.raises(UsageError) as error:
        read_gpus(text)
    assert "auto" in (error.value.hint or "")


def test_a_list_takes_those_devices_and_no_others():
    assert [place.index for place in read_gpus("2,GPU-0").among(THREE)] == [2, 0]


def test_one_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(UsageError, match=r"names 7, but .*: GPU 0, GPU 1, GPU 2"):
        read_gpus("7,").among(THREE)


def test_one_that_is_hidden_is_told_with_what_hides_it():
    with pytest.raises(
        UsageError, match=r"names 2, but .*: GPU 0; CUDA_VISIBLE_DEVICES=0 hides GPU 1, GPU 2"
    ):
        read_gpus("2,").among(THREE[:1], hidden="CUDA_VISIBLE_DEVICES=0 hides GPU 1, GPU 2")


@each("text", ["0,GPU-0aaa", "GPU-0aaa,0", "GPU-0,GPU-0aaa"])
def test_one_that_is_named_in_two_ways_is_named_twice(text):
    with pytest.raises(UsageError, match=r"names a device twice: \S+ is GPU 0"):
        read_gpus(text).among(THREE)


def test_named_device_that_was_lost_is_refused_with_the_reason():
    lost = DeviceSlot(1, None, cannot="it does not answer: GPU is lost")
    for entry in ("1", "GPU-1a"):
        (place,) = read_gpus(f"{entry},").among((THREE[0], lost), meant={entry: [THREE[1]]})
        assert place.cannot == "it does not answer: GPU is lost"
    (place,) = read_gpus("GPU-1a,").among((THREE[0],), meant={"GPU-1a": [THREE[1]]})
    assert (place.key, place.cannot) == ("GPU-1aaa", "it has gone")
