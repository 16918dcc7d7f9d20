"""Files that changed while a command ran, where it works and where its arguments point."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from oomguard.analyst import side_effects as module
from oomguard.analyst.side_effects import ResultPaths, changed_files
from oomguard.supervisor.open_files import now_ns


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
    places = ResultPaths(argv, {"HOME": "/none"}, str(work))
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


def test_results_in_subfolders_are_found_in_new_and_old_ones(work):
    (work / "runs" / "old").mkdir(parents=True)
    (work / "runs" / "old" / "all.jsonl").write_text("before")
    since_ns = later()
    (work / "runs" / "new" / "today").mkdir(parents=True)
    (work / "runs" / "new" / "today" / "out.jsonl").write_text("1")
    with (work / "runs" / "old" / "all.jsonl").open("a") as file:
        file.write("1")

    assert found(work, since_ns) == ["runs/new/today/out.jsonl", "runs/old/all.jsonl"]


def test_hidden_folders_and_caches_are_not_looked_into(work):
    since_ns = later()
    for name in (".git/x", "sub/.venv/x", "sub/__pycache__/x", "sub/models--a/x"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("1")

    assert found(work, since_ns) == []


def test_link_to_a_folder_is_followed_once(work):
    since_ns = later()
    (work / "sub" / "round").symlink_to(work)
    (work / ".kept" / "out").mkdir(parents=True)
    (work / ".kept" / "out" / "new.jsonl").write_text("1")
    (work / "sub" / "out").symlink_to(work / ".kept" / "out")

    assert found(work, since_ns) == [".kept/out/new.jsonl"]


def test_the_nearest_are_looked_at_first(work, monkeypatch):
    since_ns = later()
    for folder in ("a", "b", "c"):
        (work / folder / "deep").mkdir(parents=True)
        for number in range(20):
            (work / folder / "deep" / f"{number}.jsonl").write_text("1")
        (work / folder / "near.jsonl").write_text("1")
    monkeypatch.setattr(module, "MOST_ENTRIES", 12)

    assert found(work, since_ns) == ["a/near.jsonl", "b/near.jsonl", "c/near.jsonl"]


def test_a_slow_file_system_is_looked_at_for_a_moment_only(work, monkeypatch):
    since_ns = later()
    (work / "sub" / "new.jsonl").write_text("1")
    monkeypatch.setattr(module, "LIMIT_S", 0.0)

    assert found(work, since_ns) == []


def test_of_a_home_only_its_own_entries_are_looked_at(work):
    since_ns = later()
    (work / "sub" / "new.jsonl").write_text("1")
    (work / "new.jsonl").write_text("1")
    home = ResultPaths(("x",), {"HOME": str(work)}, str(work))

    assert changed_files(home, since_ns, frozenset()) == (str(work / "new.jsonl"),)


def test_a_folder_that_is_named_is_looked_into(work, tmp_path):
    (tmp_path / "out").mkdir()
    since_ns = later()
    (tmp_path / "out" / "new.jsonl").write_text("1")
    with (work / "sub" / "old.jsonl").open("a") as file:
        file.write("1")

    assert found(work, since_ns, "--out", str(tmp_path / "out"), "sub") == [
        "../out/new.jsonl",
        "sub/old.jsonl",
    ]


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
