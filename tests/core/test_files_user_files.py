"""The cache is one file per state of what it was made of, written whole or not at all, and never an error."""

from __future__ import annotations

import os
from pathlib import Path

from oomguard.core import files
from oomguard.core.files import cache_file, read_tables, write_cache


def test_other_state_is_another_file_and_same_state_the_same():
    assert cache_file("a-{}.json", [b"x", b"y"]) == cache_file("a-{}.json", [b"x", b"y"])
    assert cache_file("a-{}.json", [b"x", b"y"]) != cache_file("a-{}.json", [b"xy"])
    assert cache_file("a-{}.json", [b"x"]).name.startswith("a-")


def test_a_kept_file_is_whole_and_leaves_nothing_beside_it(tmp_path):
    write_cache(tmp_path / "new" / "a.json", b"first")
    write_cache(tmp_path / "new" / "a.json", b"second")

    assert [(p.name, p.read_bytes()) for p in (tmp_path / "new").iterdir()] == [
        ("a.json", b"second")
    ]


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")

    write_cache(tmp_path / "file" / "a.json", b"content")

    assert (tmp_path / "file").read_text() == "in the way"


def test_what_stands_in_a_cache_s_place_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.toml").write_text("x = 1")
    kept = cache_file("tables-{}.json", [files.state_of(tmp_path / "a.toml")])
    kept.parent.mkdir(parents=True)
    for content in ("[1]", '["x"]', "{}", "[" * 100_000, "not JSON"):
        kept.write_text(content)
        assert read_tables("tables", [tmp_path / "a.toml"]) == {tmp_path / "a.toml": {"x": 1}}
    kept.unlink()
    os.mkfifo(kept)
    assert read_tables("tables", [tmp_path / "a.toml"]) == {tmp_path / "a.toml": {"x": 1}}
