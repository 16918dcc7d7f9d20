"""This process's memory on the host, beside what psutil reads of it."""

from __future__ import annotations

import os

import psutil

from oomguard.probe.host import Resident, peak_resident_bytes, resident_bytes

MIB = 2**20


def rss() -> int:
    return psutil.Process().memory_info().rss


def open_files() -> int:
    return psutil.Process().num_fds()


def test_resident_memory_is_what_psutil_reads():
    kept = Resident()
    assert abs(resident_bytes() - rss()) < 16 * MIB
    assert abs(kept.bytes() - rss()) < 16 * MIB
    kept.end()


def test_open_file_shows_present_content_and_is_closed():
    files = open_files()
    kept = Resident()
    before = kept.bytes()
    block = bytearray(64 * MIB)
    after = kept.bytes()
    kept.end()

    assert after - before > 48 * MIB
    assert len(block) == 64 * MIB
    assert open_files() == files
    assert kept.bytes() is None


def test_reused_descriptor_is_neither_read_nor_closed(
    tmp_path,
):
    kept = Resident()
    number = kept._file
    os.close(number)
    assert abs(kept.bytes() - rss()) < 16 * MIB
    (tmp_path / "mine").write_text("not numbers at all")
    file = os.open(tmp_path / "mine", os.O_RDONLY)
    os.dup2(file, number)
    assert abs(kept.bytes() - rss()) < 16 * MIB
    kept.end()
    assert os.read(number, 100) == b"not numbers at all"
    for one in {file, number}:
        os.close(one)


def test_the_peak_never_falls_and_is_never_below_what_is_there():
    before = peak_resident_bytes()
    block = bytearray(32 * MIB)
    at_most = peak_resident_bytes()
    del block

    # The kernel adds up what each thread counts, now and then: what it tells falls by a few hundred kilobytes.
    assert before <= at_most + MIB
    assert peak_resident_bytes() >= at_most - MIB
    assert at_most >= resident_bytes() - 16 * MIB
