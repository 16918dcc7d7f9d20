"""This process's memory on the host, beside what psutil reads of it."""

from __future__ import annotations

import psutil

from oomguard.observe.resident import peak_resident_bytes, resident_bytes

MIB = 2**20


def test_resident_memory_is_what_psutil_reads():
    assert abs(resident_bytes() - psutil.Process().memory_info().rss) < 16 * MIB


def test_the_peak_never_falls_and_is_never_below_what_is_there():
    before = peak_resident_bytes()
    block = bytearray(32 * MIB)
    at_most = peak_resident_bytes()
    del block

    # The kernel adds up what each thread counts, now and then: what it tells falls by a few hundred kilobytes.
    assert before <= at_most + MIB
    assert peak_resident_bytes() >= at_most - MIB
    assert at_most >= resident_bytes() - 16 * MIB
