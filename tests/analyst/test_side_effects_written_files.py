"""Files that processes hold open for writing, and which of them were written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oomguard.analyst.side_effects import written_since
from oomguard.supervisor import open_files as module
from oomguard.supervisor.open_files import OpenFiles, now_ns

LIMIT_S = 60


@contextmanager
def holding(code: str, folder: Path) -> Iterator[Callable[[], None]]:
    """A process that has run ``code``; what is yielded lets it go on to what stands behind ``wait()``."""
    before = "import sys\ndef wait():\n    print(flush=True); sys.stdin.readline()\n"
    command = [sys.executable, "-c", before + code + "\nwait()"]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:

        def go_on() -> None:
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()

        process.stdout.readline()
        try:
            yield go_on
        finally:
            process.kill()


@pytest.fixture
def names(tmp_path: Path) -> Callable[..., list[str]]:
    """The names of what was written in this test's folder: other tests' services may run in this process tree."""

    def names(files: OpenFiles, since_ns: int = 0) -> list[str]:
        written = [Path(path) for path in written_since(files.seen(), since_ns).values()]
        return sorted(path.name for path in written if path.parent == tmp_path)

    return names


@pytest.mark.parametrize("mode", ["w", "a", "r+", "x"])
def test_file_open_for_writing_is_found_once_written(mode, tmp_path, names):
    if mode == "r+":
        (tmp_path / "out").write_text("before")
    since_ns, files = now_ns(), OpenFiles(os.getpid())
    with holding(
        f"f = open('out', {mode!r}); wait(); f.write('later'); f.flush()", tmp_path
    ) as go_on:
        files.look()
        if mode != "r+":
            assert names(files, since_ns) == []
        go_on()

    assert names(files, since_ns) == ["out"]


def test_file_only_read_or_written_earlier_is_not_found(tmp_path, names):
    (tmp_path / "input").write_text("prompts")
    (tmp_path / "old").write_text("results")
    files = OpenFiles(os.getpid())
    with holding("f = open('input'); g = open('old', 'a'); g.seek(0, 2)", tmp_path):
        files.look()

    assert names(files, now_ns() + 1) == []
    assert names(files) == ["old"]


def test_file_renamed_into_place_is_found(tmp_path, names):
    files = OpenFiles(os.getpid())
    with holding(
        "f = open('x.partial', 'w'); f.write('1'); f.close(); f = open('x.partial', 'a')", tmp_path
    ):
        files.look()
    (tmp_path / "x.partial").rename(tmp_path / "x")

    assert names(files) == ["x"]


def test_what_is_gone_has_no_name_or_is_no_file_is_not_found(tmp_path, names):
    code = (
        "import os, socket, tempfile\n"
        "f = open('gone', 'w'); f.write('1'); f.flush()\n"
        "g = tempfile.TemporaryFile(dir='.'); g.write(b'1'); g.flush()\n"
        "h = os.fdopen(os.memfd_create('x'), 'w'); h.write('1'); h.flush()\n"
        "s = socket.socket(); p = os.pipe(); n = open('/dev/null', 'w')"
    )
    files = OpenFiles(os.getpid())
    with holding(code, tmp_path):
        files.look()
    (tmp_path / "gone").unlink()

    assert names(files) == []


def test_the_whole_tree_is_looked_at(tmp_path, names):
    child = "f = open('out', 'w'); f.write('1'); f.flush(); print(flush=True); import time; time.sleep(60)"
    code = (
        "import subprocess\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, start_new_session=True)\n"
        "p.stdout.readline()\nwait()\np.kill(); p.wait()"
    )
    files = OpenFiles(os.getpid())
    with holding(code, tmp_path) as go_on:
        files.look()
        go_on()

    assert names(files) == ["out"]


def test_the_thread_looks_by_itself_and_ends(tmp_path, monkeypatch, names):
    monkeypatch.setattr(module, "FIRST_S", 0.0)
    files = OpenFiles(os.getpid())
    with holding("f = open('out', 'w'); f.write('1'); f.flush()", tmp_path):
        files.start()
        deadline = now_ns() + LIMIT_S * 10**9
        while not names(files) and now_ns() < deadline:
            os.sched_yield()
        files.stop()

    assert names(files) == ["out"]


def test_what_a_look_costs_decides_when_the_next_one_is(monkeypatch):
    waits: list[float] = []
    files = OpenFiles(os.getpid())

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 4

    costs = iter([0.0001, 0.05, 0.001])
    monkeypatch.setattr(files._stopped, "wait", wait)
    monkeypatch.setattr(files, "look", lambda: next(costs))
    looking = threading.Thread(target=files._run)  # it gives its thread a low priority
    looking.start()
    looking.join()

    assert waits[:2] == [module.FIRST_S, module.LEAST_S]
    assert waits[2] >= 100 * 0.05
    assert waits[3] == module.LEAST_S
