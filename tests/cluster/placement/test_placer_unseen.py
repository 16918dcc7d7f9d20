"""Devices that --gpus names where NVML does not answer."""

from __future__ import annotations

import pytest

from oomguard.cluster.placement.devices import VISIBLE
from oomguard.cluster.placement.need import read_gpus
from oomguard.cluster.placement.placer import devices_without_nvml
from oomguard.core.errors import UsageError
from support.each import each


@each(("visible", "indices"), [(None, [2, 0]), ("0,2", [2, 0]), ("2,1,0", [2, 0])])
def test_list_of_numbers_is_used_in_the_order_of_the_variable(visible, indices):
    places = devices_without_nvml(read_gpus("2,0"), {} if visible is None else {VISIBLE: visible})
    assert [place.index for place in places or ()] == indices


@each("visible", ["3", "", "-1", "0", "0,-1,2", "0,0,2"])
def test_hidden_device_is_refused_as_with_nvml(visible):
    with pytest.raises(
        UsageError, match=f"names [02], but the devices here are: .*{VISIBLE}={visible}"
    ):
        devices_without_nvml(read_gpus("2,0"), {VISIBLE: visible})


@each(
    ("asked", "visible"),
    [("auto", "0"), ("2", "0,1"), ("GPU-1,", "0"), ("0,", "GPU-1"), ("0,", "MIG-1-2")],
)
def test_where_nothing_tells_which_are_meant_none_is_returned(asked, visible):
    assert devices_without_nvml(read_gpus(asked), {VISIBLE: visible}) is None
