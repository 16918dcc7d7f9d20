"""Devices whose memory is not the engine's alone have ceilings of their own."""

from __future__ import annotations

import pytest

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB
from oomguard.estimate.constants import free_at_start, kind_of
from oomguard.supervisor.host_memory import default_reserve


def test_the_kind_follows_the_gpu_then_the_host(subtests):
    for name, on_wsl2, kind in [
        ("H100", False, "discrete"),
        (None, False, "discrete"),
        ("RTX 5090", True, "wsl2"),
        ("NVIDIA GB10", False, "unified"),
        ("DGX Spark", True, "unified"),
        ("Jetson AGX Orin", False, "unified"),
    ]:
        with subtests.test(name=name, on_wsl2=on_wsl2, kind=kind):
            assert kind_of(name, on_wsl2=on_wsl2) == kind


def test_discrete_gpu_has_no_ceiling_except_its_context():
    assert free_at_start(24 * GIB, "discrete") == (None, "")


def test_under_wsl2_as_much_is_free_as_was_printed_there():
    free, source = free_at_start(round(31.84 * GIB), "wsl2")
    assert free == pytest.approx(30.12 * GIB, rel=0.001)
    assert "wsl2" in source


def test_replicas_of_a_time_sliced_gpu_share_what_is_free():
    assert free_at_start(48 * GIB, "discrete", 2)[0] == 24 * GIB
    assert 2 * free_at_start(48 * GIB, "unified", 2)[0] == free_at_start(48 * GIB, "unified")[0]


def test_unified_memory_keeps_what_run_keeps():
    for total in (8 * GIB, 24 * GIB, 130663642563):
        free, reason = free_at_start(total, "unified")
        assert free == pytest.approx(0.83 * total - default_reserve(total), abs=2)
        assert "host reserve takes" in reason
    assert free_at_start(48 * GIB, "discrete") == (None, "")


def test_an_unknown_kind_is_refused():
    with pytest.raises(SettingError, match="memory_kind"):
        free_at_start(GIB, "borrowed")
