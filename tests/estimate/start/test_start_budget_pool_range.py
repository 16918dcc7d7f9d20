"""By how much a planned pool may be off: wider for what is known less well."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.estimate.start.start import VllmSettings
from oomguard.estimate.start.start_budget import spread_bytes

SETTINGS = VllmSettings(Version("0.26"), 24 << 30, 0.9)


def test_range_is_wider_for_larger_devices_and_unsure_parts():
    plain = spread_bytes(SETTINGS, 1 << 28)

    assert spread_bytes(replace(SETTINGS, gpu_total_bytes=80 << 30), 1 << 28) > plain > 1 << 28
    assert spread_bytes(SETTINGS, 1 << 30) > plain


def test_parts_that_are_known_exactly_leave_the_devices_share():
    assert 0 < spread_bytes(SETTINGS, 0) < 0.02 * SETTINGS.gpu_total_bytes
