"""Guarded starts of different processes on one device come one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomguard.engines.vllm.in_process.start import turn

HOLDS = """
import sys, time
from pathlib import Path
from oomguard.engines.vllm.in_process.start import turn
with turn(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


ROOT = str(Path(__file__).parents[4])
TAKES_TURNS = """
import sys, time
from pathlib import Path
from oomguard.engines.vllm.in_process import start as turns
turns._LOOKS_EVERY_S = 0.001
folder, number = Path(sys.argv[1]), sys.argv[2]
for _ in range(10):
    with turns.turn(folder), (folder / "rows").open("a", buffering=1) as rows:
        rows.write(number + " ")
        rows.flush()
        time.sleep(0.002)
        rows.write(number + " ")
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Hold a turn in another process that sees some devices; the one here sees others."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    children = []

    def hold(devices: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(tmp_path)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": devices, "PYTHONPATH": ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        return child

    yield hold
    for child in children:
        child.kill()
        child.communicate()


def waited_s(folder: Path, *, most_s: float = 0.5) -> float:
    began = time.monotonic()
    with turn(folder, waits_s=most_s):
        return time.monotonic() - began


def test_a_start_waits_for_one_that_sees_the_same_device(
    subtests, elsewhere, tmp_path, monkeypatch
):
    for there, here, waits in [
        ("0", "1", False),
        ("0,1", "1,2", True),
        ("", "1", True),
        ("1", "", True),
    ]:
        with subtests.test(there=there, here=here, waits=waits):
            child = elsewhere(there)
            try:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
                assert (waited_s(tmp_path) >= 0.5) is waits
            finally:
                child.kill()
                child.wait()


def test_a_start_goes_on_as_soon_as_the_other_one_has_ended(elsewhere, tmp_path):
    child = elsewhere("0")
    child.kill()
    child.wait()
    assert waited_s(tmp_path, most_s=30) < 10


def test_a_fork_that_was_made_meanwhile_does_not_hold_the_turn(tmp_path):
    read, write = os.pipe()
    with turn(tmp_path):
        pid = os.fork()
        if pid == 0:
            os.read(read, 1)
            os._exit(0)
    try:
        assert waited_s(tmp_path) < 0.5
    finally:
        os.write(write, b"x")
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_a_folder_of_somebody_else_is_not_used(tmp_path):
    place = tmp_path / f"oomguard-starts-{os.geteuid()}"
    place.mkdir()
    place.chmod(0o777)
    with turn(tmp_path):
        assert list(place.iterdir()) == []


def test_where_no_folder_can_be_made_there_is_no_lock(tmp_path):
    with turn(tmp_path / "missing" / "folder"):
        pass


def test_nothing_is_held_or_left_once_the_turn_is_over(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with turn(tmp_path):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(tmp_path.iterdir()) == []


def test_of_many_starts_at_once_never_two_go_on_together(tmp_path):
    """Each notes that it has begun and ended; who begins while another one goes on would stand between the two."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TAKES_TURNS, str(tmp_path), str(number)],
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        for number in range(4)
    ]
    assert [child.wait(60) for child in children] == [0] * 4
    rows = (tmp_path / "rows").read_text().split()
    assert len(rows) == 2 * 4 * 10
    assert all(begun == ended for begun, ended in zip(rows[::2], rows[1::2], strict=True))
