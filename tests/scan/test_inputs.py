from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from oomguard.scan.inputs import find_inputs, is_url

UID = "0b5cf621-1f52-4d3c-9b8f-2f6e0f1c9a11"


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a line\n")


def found(*paths: str) -> list[str]:
    return [one.path for one in find_inputs(paths).found]


def test_folder_means_its_files_then_those_of_subfolders(tmp_path: Path):
    make(
        tmp_path,
        "b.log",
        "a.log",
        "z/c.log",
        "logs/old/d.log",
        "logs/e.log",
        f"pods/prod_a_{UID}/engine/0.log",
    )
    below = ("logs/e.log", "logs/old/d.log", f"pods/prod_a_{UID}/engine/0.log", "z/c.log")
    assert found(str(tmp_path)) == [str(tmp_path / name) for name in ("a.log", "b.log", *below)]


def test_hidden_binary_and_source_files_are_left_out(tmp_path: Path):
    make(
        tmp_path,
        "serve.py",
        ".hidden.log",
        ".git/log.txt",
        "run/serve.py",
        "run/.x.log",
        "run/out.log",
    )
    (tmp_path / "run/model.bin").write_bytes(b"PK\x03\x04\0\0")
    (tmp_path / "run/old.log.gz").write_bytes(gzip.compress(b"a line\n"))
    (tmp_path / "run/wide.log").write_bytes("a line\n".encode("utf-16"))
    (tmp_path / "run/memory.pickle").write_bytes(b"\x80\x04\x95\0\0")
    inputs = find_inputs([str(tmp_path)])
    read = ("run/memory.pickle", "run/old.log.gz", "run/out.log", "run/wide.log")
    assert [one.path for one in inputs.found] == [
        str(tmp_path / name) for name in (".hidden.log", "serve.py", *read)
    ]
    assert inputs.no_logs == 3


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path):
    session = "ray/session_2026-11-20_10-00-00_123456_77"
    make(tmp_path, f"{session}/logs/raylet.out")
    (tmp_path / "ray/session_latest").symlink_to(tmp_path / session)
    assert found(str(tmp_path / "ray")) == [str(tmp_path / f"{session}/logs/raylet.out")]


def test_a_pattern_means_the_files_that_match_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make(tmp_path, "x/1.log", "x/y/2.log", "x/3.txt")
    monkeypatch.chdir(tmp_path)
    assert found("x/**/*.log") == ["x/1.log", "x/y/2.log"]
    assert not any(one.is_named for one in find_inputs(["x/*.log"]).found)


def test_a_file_named_like_a_pattern_is_that_file(tmp_path: Path):
    make(tmp_path, "a[1].log", "a1.log")
    (one,) = find_inputs([str(tmp_path / "a[1].log")]).found
    assert (one.path, one.is_named) == (str(tmp_path / "a[1].log"), True)


def test_a_pattern_that_matches_nothing_is_an_error_with_advice(tmp_path: Path):
    (error,) = find_inputs([str(tmp_path / "*.log")]).errors
    assert "no file matches" in str(error)
    assert error.hint is not None


def test_inputs_follow_the_paths_with_size_and_time(tmp_path: Path):
    make(tmp_path, "b.log", "a.log")
    inputs = find_inputs([str(tmp_path / "b.log"), str(tmp_path / "a.log"), "-"]).found
    assert [Path(one.path).name for one in inputs] == ["b.log", "a.log", "-"]
    assert [one.size_bytes for one in inputs] == [7, 7, None]
    assert inputs[0].modified_at == (tmp_path / "b.log").stat().st_mtime


def test_an_empty_folder_is_told(tmp_path: Path):
    assert find_inputs([str(tmp_path)]).empty == [str(tmp_path)]


def test_a_local_file_comes_before_a_url_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make(tmp_path, "s3:/bucket/x.log")
    monkeypatch.chdir(tmp_path)
    assert not is_url("s3://bucket/x.log")
    assert is_url("s3://bucket/y.log")
    assert not is_url("C:/logs/y.log")


def test_links_that_lead_nowhere_are_no_inputs_and_known(tmp_path: Path):
    make(tmp_path, "a.log", f"pods/prod_a_{UID}/engine/0.log")
    (tmp_path / "gone.log").symlink_to("nowhere")
    (tmp_path / f"pods/prod_a_{UID}/engine/1.log").symlink_to("nowhere")
    for paths in ([tmp_path], [tmp_path / "**/*.log"]):
        inputs = find_inputs(map(str, paths))
        assert len(inputs.found) == 2
        assert [Path(path).name for path in inputs.dangling] == ["gone.log", "1.log"]
