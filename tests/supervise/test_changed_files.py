"""Files that changed while a command ran, where it works and where its arguments point."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from oomguard.supervise import changed_files as module
from oomguard.supervise.changed_files import changed_files
from oomguard.supervise.places import Places
from oomguard.supervise.written_files import identity, now_ns


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "sub").mkdir(parents=True)
    for name in ("old.jsonl", "sub/old.jsonl"):
        (folder / name).write_text("before")
    return folder


def later() -> int:
    """A moment behind every stamp that a file has by now."""
    now = time.time_ns()
    while (since_ns := now_ns()) <= now:
        time.sleep(0.001)
    return since_ns


def found(work: Path, since_ns: int, *argv: str, known: frozenset = frozenset()) -> list[str]:
    places = Places(argv, {"HOME": "/none"}, str(work))
    return [os.path.relpath(path, work) for path in changed_files(places, since_ns, known)]


def test_what_did_not_change_is_not_found(work):
    assert found(work, later(), str(work / "old.jsonl"), "sub") == []


def test_what_was_added_or_written_is_found(work):
    since_ns = later()
    (work / "new.jsonl").write_text("1")
    with (work / "old.jsonl").open("a") as file:
        file.write("1")

    assert found(work, since_ns) == ["new.jsonl", "old.jsonl"]


def test_what_was_put_in_place_under_an_old_time_is_found(work):
    since_ns = later()
    partial = work.parent / "partial"
    partial.write_text("1")
    os.utime(partial, (1, 1))
    partial.rename(work / "new.jsonl")

    assert found(work, since_ns) == ["new.jsonl"]


def test_a_time_in_the_future_is_no_change(work):
    os.utime(work / "old.jsonl", (4e9, 4e9))
    assert found(work, later()) == []


def test_a_folder_in_which_a_name_changed_is_looked_into_and_another_is_not(work):
    since_ns = later()
    with (work / "sub" / "old.jsonl").open("a") as file:
        file.write("1")
    assert found(work, since_ns) == []

    (work / "sub" / "new.jsonl").write_text("1")
    assert found(work, since_ns) == ["sub/new.jsonl", "sub/old.jsonl"]


def test_of_a_home_only_its_own_entries_are_looked_at(work):
    since_ns = later()
    (work / "sub" / "new.jsonl").write_text("1")
    (work / "new.jsonl").write_text("1")
    home = Places(("x",), {"HOME": str(work)}, str(work))

    assert changed_files(home, since_ns, frozenset()) == (str(work / "new.jsonl"),)


def test_a_folder_that_is_named_is_looked_into(work, tmp_path):
    (tmp_path / "out").mkdir()
    since_ns = later()
    (tmp_path / "out" / "new.jsonl").write_text("1")
    with (work / "sub" / "old.jsonl").open("a") as file:
        file.write("1")

    assert found(work, since_ns, "--out", str(tmp_path / "out"), "sub") == ["../out/new.jsonl", "sub/old.jsonl"]


def test_what_is_known_empty_or_no_file_is_not_found(work):
    since_ns = later()
    (work / "known").write_text("1")
    (work / "empty").write_text("")
    (work / "link").symlink_to("nowhere")
    os.mkfifo(work / "pipe")

    assert found(work, since_ns, known=frozenset({identity((work / "known").stat())})) == []


def test_what_another_process_holds_open_is_that_one_s(work):
    """The command's processes have ended when this is asked."""
    since_ns = later()
    with (work / "out.txt").open("w") as file:
        file.write("1")
        file.flush()
        assert found(work, since_ns) == []
    assert found(work, since_ns) == ["out.txt"]


def test_no_more_than_so_many_entries_are_looked_at(work, monkeypatch):
    since_ns = later()
    for number in range(20):
        (work / f"{number}.jsonl").write_text("1")
    monkeypatch.setattr(module, "MOST_ENTRIES", 10)

    assert len(found(work, since_ns)) <= 10


def test_a_folder_that_is_gone_is_passed_over(tmp_path):
    assert changed_files(Places(("x",), {}, None), 0, frozenset()) == ()
    assert changed_files(Places(("x",), {}, str(tmp_path / "gone")), 0, frozenset()) == ()
