"""Patterns of paths: what glob finds, and each folder once where links lead back."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from oomguard.scan.inputs import matching

TREE = ("a/x.log", "a/b/y.log", "a/b/c/z.log", "a/.hidden/h.log", "a/[1]/w.log", "logs/b/q.txt")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(paths: list[str]) -> set[str]:
    return {path for path in paths if Path(path).is_file()}


def test_without_links_it_finds_what_glob_finds(tree: Path):
    for pattern in [
        "**/*.log",
        "./**/*.log",
        "a/**",
        "**/b/**/*.log",
        "*/b/*.log",
        "a/**/c/z.log",
        "**",
        "a/*",
        "**/b/*",
        "x/**/y",
    ]:
        for written in (pattern, f"{tree}/{pattern}"):
            assert files(matching(written)) == files(glob.glob(written, recursive=True)), pattern  # noqa: PTH207 - what it is held against


def test_link_to_a_parent_folder_is_not_followed(tree: Path):
    (tree / "a/up").symlink_to("..")
    (tree / "a/self").symlink_to(".")
    (tree / "a/b/self").symlink_to(".")
    (tree / "logs/aside").symlink_to("../a/b")
    assert matching("**/y.log") == ["a/b/y.log", "logs/aside/y.log"]


def test_folder_matched_by_its_link_is_found_under_it(tree: Path):
    (tree / "current").symlink_to("a")
    assert matching("**/current/*.log") == ["current/x.log"]
