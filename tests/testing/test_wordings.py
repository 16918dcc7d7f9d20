"""The words of each version of torch, and that oomguard's own rules read back the bytes that stand in them."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.core.facts import number_of
from oomguard.diagnosis import diagnose

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory, oom_error  # noqa: E402
from oomguard.testing.wordings import find_wording, wordings  # noqa: E402

GIB, MIB = 2**30, 2**20
FIGURES = {
    "tried": "640 MiB",
    "capacity": "24 GiB",
    "allocated": "18.5 GiB",
    "reserved": "20.25 GiB",
    "other_processes": "3.5 GiB",
}
# What a platform's message tells, as facts of the registry.
TOLD = {
    "tried_bytes": ("{tried}", 640 * MIB),
    "device_total_bytes": ("{capacity} ", 24 * GIB),
    "device_free_bytes": ("{free}", 256 * MIB),
    "process_in_use_bytes": ("{in_use}", 20.25 * GIB),
    "reserved_unallocated_bytes": ("{unallocated}", 1.75 * GIB),
    "other_process_in_use_bytes": ("{neighbour}", 3.5 * GIB),
    "allowed_bytes": ("max allowed: {capacity}", 24 * GIB),
    "non_torch_bytes": ("other allocations: {others}", 3.5 * GIB),
}


def test_oomguard_reads_back_what_each_wording_tells(subtests):
    for wording in wordings():
        with subtests.test(wording=wording):
            version = wording.versions.split(",")[0].removeprefix(">=")
            error = oom_error(f"{wording.platform} {version}", **FIGURES)
            assert type(error).__name__ == wording.raises
            (incident,) = diagnose(error).incidents
            assert incident.kind == f"{wording.platform}_oom"
            told = {
                fact: expected for fact, (place, expected) in TOLD.items() if place in wording.text
            }
            assert len(told) >= 3
            assert {fact: number_of(incident.facts, fact) for fact in told} == told
            mps = wording.platform == "mps"
            assert number_of(incident.facts, "allocated_bytes") == (20.25 if mps else 18.5) * GIB
            if "{reserved} reserved in total" in wording.text:
                assert number_of(incident.facts, "reserved_total_bytes") == 20.25 * GIB


def test_every_row_names_the_file_of_torch_that_it_is_from():
    assert all(".cpp" in row.source or ".mm" in row.source for row in wordings())


def test_each_version_of_torch_from_2_0_on_has_one_wording(subtests):
    for minor in range(14):
        for platform in ["cuda", "mps"]:
            with subtests.test(minor=minor, platform=platform):
                version = Version(f"2.{minor}.1")
                (row,) = [
                    row
                    for row in wordings()
                    if row.platform == platform and version in SpecifierSet(row.versions)
                ]
                assert find_wording(f"{platform} {version}") is row


def test_a_wording_is_named_by_platform_and_version(subtests):
    for name, said in [
        (None, "PYTORCH_ALLOC_CONF"),
        ("cuda", "PYTORCH_ALLOC_CONF"),
        ("2.13.0", "PYTORCH_ALLOC_CONF"),
        ("cuda 2.6", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments"),
        ("2.1.2", "capacty"),
        ("CUDA 2.0", "already allocated"),
        ("hip 2.4", "PYTORCH_HIP_ALLOC_CONF"),
        ("mps 2.7.1", "24.00 GB"),
        ("mps", "24.00 GiB"),
    ]:
        with subtests.test(name=name, said=said):
            assert said in str(oom_error(name, **FIGURES))


def test_a_wording_that_is_not_known_names_those_that_are(subtests):
    for name in [3, "tpu", "cuda 1.13", "cuda 2.1 2.2", "cuda x", "", "xpu 2.0"]:
        with subtests.test(name=name):
            with pytest.raises(SettingError) as caught:
                find_wording(name)
            assert "cuda >=2.13" in caught.value.hint


def test_a_device_fails_in_the_words_that_were_asked_for():
    with (
        limit_memory("8 MiB", wording="mps"),
        pytest.raises(RuntimeError, match="MPS backend out of memory"),
    ):
        torch.zeros(4 * MIB)
    with (
        limit_memory("8 MiB", wording="2.1"),
        pytest.raises(torch.OutOfMemoryError, match="total capacty of"),
    ):
        torch.zeros(4 * MIB)


def test_an_error_with_figures_that_cannot_be_is_refused(subtests):
    for sizes in [
        {"allocated": "9 GiB"},
        {"allocated": "7 GiB", "reserved": "6 GiB"},
        {"allocated": "7 GiB", "other_processes": "2 GiB"},
        {"other_processes": "9 GiB"},
        {"tried": "much"},
    ]:
        with subtests.test(sizes=sizes), pytest.raises(SettingError):
            oom_error("cuda", **sizes)


def test_what_is_not_given_fits_what_is(subtests):
    for sizes, free in [
        ({}, "1024.00 MiB"),
        ({"tried": 0, "capacity": "1 GiB"}, "0 bytes"),
        ({"tried": "640 MiB", "capacity": "1 GiB"}, "128.00 MiB"),
        ({"capacity": "80 GiB", "other_processes": "16 GiB"}, "1024.00 MiB"),
        ({"reserved": "6 GiB"}, "2.00 GiB"),
    ]:
        with subtests.test(sizes=sizes, free=free):
            assert f"of which {free} is free" in str(oom_error("cuda", **sizes)).replace(
                "1.00 GiB", "1024.00 MiB"
            )


def test_figures_that_do_not_fit_name_the_argument_to_change():
    with pytest.raises(SettingError) as caught:
        oom_error(capacity="1 GiB", allocated="7 GiB")
    assert "allocated=" in caught.value.hint
