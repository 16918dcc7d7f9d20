"""By how much a planned pool may be off: wider for what is known less well."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.estimate.constants import pool_range
from oomguard.estimate.start.start import VllmSettings
from oomguard.estimate.start.start_budget import range_kind, spread_bytes

SETTINGS = VllmSettings(Version("0.26"), 24 << 30, 0.9)


def test_range_is_wider_for_larger_devices_and_unsure_parts():
    plain = spread_bytes(SETTINGS, 1 << 28)

    assert spread_bytes(replace(SETTINGS, gpu_total_bytes=80 << 30), 1 << 28) > plain > 1 << 28
    assert spread_bytes(SETTINGS, 1 << 30) > plain


def test_parts_that_are_known_exactly_leave_the_devices_share():
    assert 0 < spread_bytes(SETTINGS, 0) < 0.02 * SETTINGS.gpu_total_bytes


def test_the_kind_of_a_start_decides_its_range(subtests):
    for kind, changes, profiles_encoder in [
        ("one_gpu", {}, False),
        ("since_0_27", {"version": Version("0.30")}, False),
        ("ranks", {"tensor_parallel_size": 2}, False),
        ("first_engine_ranks", {"tensor_parallel_size": 2, "version": Version("0.7.3")}, False),
        ("encoder", {"tensor_parallel_size": 2}, True),
        ("other_memory", {"unified_memory": True}, True),
    ]:
        with subtests.test(kind=kind):
            start = replace(SETTINGS, **changes)
            assert range_kind(start, profiles_encoder=profiles_encoder) == kind


def test_the_best_known_kind_has_the_narrowest_range():
    widths = {
        kind: pool_range(kind)["factor_below"] + pool_range(kind)["factor_above"]
        for kind in ("one_gpu", "ranks", "first_engine_ranks", "encoder", "other_memory")
    }
    assert min(widths, key=widths.__getitem__) == "one_gpu"
