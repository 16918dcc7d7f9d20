"""Shared memory that an attempt left behind: told where nobody has it, and never removed."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from oomguard.analyst.restart_gate import FOLDER, describe_segments, known_segments, segments_since

NAMES = ("psm_*", "vllm_*")
MIB = 2**20


def made(folder: Path, name: str, size_bytes: int = MIB) -> Path:
    path = folder / name
    path.write_bytes(b"x" * size_bytes)
    return path


def test_new_unowned_segments_are_left_largest_first(tmp_path):
    made(tmp_path, "psm_before")
    before = known_segments(NAMES, tmp_path)
    made(tmp_path, "psm_small")
    made(tmp_path, "vllm_offload_1.mmap", 4 * MIB)
    made(tmp_path, "another program's")
    (tmp_path / "psm_link").symlink_to(tmp_path / "psm_before")
    (tmp_path / "psm_folder").mkdir()
    left = segments_since(before, NAMES, tmp_path)
    assert [segment.name for segment in left] == ["vllm_offload_1.mmap", "psm_small"]
    assert left[0].bytes >= 4 * MIB


def test_a_name_that_was_made_anew_is_left(tmp_path):
    old = made(tmp_path, "psm_a")
    before = known_segments(NAMES, tmp_path)
    made(tmp_path, "psm_b").replace(old)
    assert [segment.name for segment in segments_since(before, NAMES, tmp_path)] == ["psm_a"]


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_what_a_process_has_is_not_left(tmp_path, how):
    path = made(tmp_path, "psm_used")
    code = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "if sys.argv[2] == 'mapped':\n    mapped = mmap.mmap(file.fileno(), 0); file.close()\n"
        "print('READY', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path), how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "READY\n"
        assert segments_since(frozenset(), NAMES, tmp_path) == ()
        process.communicate()
    assert [segment.name for segment in segments_since(frozenset(), NAMES, tmp_path)] == [
        "psm_used"
    ]


def test_shared_memory_of_python_is_seen_while_mapped_and_after():
    before = known_segments(NAMES, FOLDER)
    segment = shared_memory.SharedMemory(create=True, size=MIB)
    try:
        assert segment.name not in {left.name for left in segments_since(before, NAMES, FOLDER)}
        segment.buf[:] = b"x" * MIB
        segment.close()
        assert {left.name: left.bytes for left in segments_since(before, NAMES, FOLDER)}[
            segment.name
        ] == MIB
    finally:
        segment.unlink()


def test_what_is_said_names_the_command_that_removes_it(tmp_path):
    made(tmp_path, "psm_a b")
    said = describe_segments(segments_since(frozenset(), NAMES, tmp_path), tmp_path)
    assert said == {"segments": "psm_a b (1.00 MiB)", "remove": f"rm '{tmp_path}/psm_a b'"}


def test_of_many_only_the_largest_are_named(tmp_path):
    for number in range(12):
        made(tmp_path, f"psm_{number}", 4096 * (number + 1))
    said = describe_segments(segments_since(frozenset(), NAMES, tmp_path), tmp_path)
    assert said["segments"].startswith("psm_11 ")
    assert said["segments"].endswith(", 4 more")


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert known_segments(NAMES, tmp_path / "none") == frozenset()
    assert known_segments((), tmp_path) == frozenset()
