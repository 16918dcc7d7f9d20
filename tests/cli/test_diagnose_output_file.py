"""``diagnose --output FILE`` where the disk is full: the file is named, and no half of a page or of a line stays behind."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

LOG = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def written(output: Path, most_bytes: int, *paths: Path) -> subprocess.CompletedProcess[bytes]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    command = [
        sys.executable,
        "-B",
        "-m",
        "oomguard",
        "diagnose",
        "--output",
        str(output),
        *map(str, paths),
    ]
    return subprocess.run(command, capture_output=True, check=False, preexec_fn=limit)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "error.log"
    path.write_text(LOG)
    return path


def test_a_page_that_finds_no_room_is_told_by_name_and_removed(log: Path, tmp_path: Path):
    page = tmp_path / "o.html"
    ran = written(page, 2048, log)
    assert ran.returncode == 2
    assert f"--output {page}: File too large".encode() in ran.stderr
    assert b"standard output" not in ran.stderr
    assert not page.exists()


def test_of_json_the_lines_that_were_written_whole_stay(log: Path, tmp_path: Path):
    written(tmp_path / "one.json", 1 << 20, log)
    line_bytes = (tmp_path / "one.json").stat().st_size
    ran = written(tmp_path / "two.json", line_bytes + 300, log, log)
    assert ran.returncode == 2
    (line,) = (tmp_path / "two.json").read_text().splitlines()
    assert json.loads(line)["verdict"] == "oom"
