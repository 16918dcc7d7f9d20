"""Which files hold results of a command, and which only what it makes again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oomguard.analyst.side_effects import ResultPaths
from support.each import each


def places(argv: tuple[str, ...] = (), folder: str | None = "/work/job", **env: str) -> ResultPaths:
    return ResultPaths(("python", "x.py", *argv), {"HOME": "/home/me", **env}, folder)


@each(
    "path",
    [
        "/work/job/results.jsonl",
        "/work/job/a/b/results.jsonl",
        "/data/results.jsonl",
        "/home/me/results.db",
        "/home/me/results.db-wal",
        "/work/job/tmp/results.jsonl",
        "/srv/logs/results.jsonl",
        "/work/job/temporary",
    ],
)
def test_a_file_counts_wherever_it_lies(path):
    assert places().counts(path)


@each(
    "path",
    [
        "/home/me/.cache/vllm/torch_compile_cache/x",
        "/home/me/.triton/cache/x",
        "/home/me/.nv/ComputeCache/x",
        "/home/me/.config/vllm/usage_stats.json",
        "/home/me/.local/state/oomguard/journal.sqlite3-wal",
        "/tmp/x",
        "/tmp/torchinductor_me/x",
        "/dev/shm/psm_1234",
        "/run/user/1000/x",
        "/work/job/__pycache__/x.cpython-311.pyc",
        "/work/job/.cache/x",
        "/work/job/run.log",
        "/work/job/run.log.1",
        "/work/job/nohup.out",
        "/work/job/slurm-123.out",
        "/work/job/results.jsonl.lock",
        "/work/job/tmpab12cd_4",
        "/data/hub/models--org--model/blobs/x",
    ],
)
def test_caches_logs_locks_and_temporary_files_do_not_count(path):
    assert not places().counts(path)


@each(
    ("name", "path"),
    [
        ("HF_HOME", "/data/hf/x"),
        ("XDG_CACHE_HOME", "/data/hf/x"),
        ("VLLM_CACHE_ROOT", "/data/hf/x"),
        ("TRITON_CACHE_DIR", "/data/hf/x"),
        ("TORCHINDUCTOR_CACHE_DIR", "/data/hf/x"),
        ("TMPDIR", "/data/hf/x"),
        ("VLLM_RPC_BASE_PATH", "/data/hf/x"),
    ],
)
def test_a_variable_names_a_folder_that_does_not_count(name, path):
    assert places().counts(path)
    assert not places(**{name: "/data/hf"}).counts(path)
    assert places(**{name: "/"}).counts(path)


def test_the_longest_folder_decides():
    assert places(folder="/tmp/job").counts("/tmp/job/results.jsonl")
    assert places(folder="/tmp/job").counts("/tmp/job/deep/results.jsonl")
    assert not places(folder="/tmp/job").counts("/tmp/other/results.jsonl")
    assert not places(folder="/home/me").counts("/home/me/.cache/x")
    assert places(folder="/home/me/.cache/job").counts("/home/me/.cache/job/results.jsonl")
    assert not places(folder="/tmp/job", TMPDIR="/tmp/job/tmp").counts("/tmp/job/tmp/x")


def test_temporary_working_folder_counts_its_own_entries():
    here = places(folder="/tmp")
    assert here.counts("/tmp/results.jsonl")
    assert not here.counts("/tmp/tmpab12cd_4")
    assert not here.counts("/tmp/ray/session/x")


def test_without_a_working_folder_the_rest_holds():
    assert places(folder=None).counts("/data/results.jsonl")
    assert not places(folder=None).counts("/tmp/x")


@pytest.mark.parametrize(
    "words",
    [
        ("--output", "{}"),
        ("--output={}",),
        ("{}",),
        ("-c", "run > '{}' 2>&1"),
        ("out.dir={}",),
        ("--no-cache", "-o", "{}"),
    ],
)
def test_what_an_argument_names_counts(words, tmp_path):
    named = tmp_path / "results.jsonl"
    named.write_text("1")
    found = places(tuple(word.format(named) for word in words))

    assert str(named) in found.named
    assert found.counts(str(named))


@pytest.mark.parametrize(
    "flag", ["--cache-dir", "--download-dir", "--hf_cache", "--log-file", "--tmpdir"]
)
@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_flag_of_a_cache_log_or_temporary_folder_does_not_count(flag, form, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    found = places(tuple(form.format(flag, folder).split(" ")))

    assert found.named == ()
    assert not found.counts(str(folder / "x"))


def test_a_name_in_the_working_folder_is_read_from_there(tmp_path):
    (tmp_path / "results.jsonl").write_text("1")
    assert places(("results.jsonl",), folder=str(tmp_path)).named == (
        str(tmp_path / "results.jsonl"),
    )


def test_root_home_and_parents_are_not_named_by_chance(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    words = ("python", "-c", "x / y; '..'; '.'", "/", "~", str(tmp_path))
    assert ResultPaths(words, {"HOME": str(Path.home())}, str(folder)).named == ()


def test_a_link_to_a_cache_is_the_cache(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").symlink_to(tmp_path / "scratch")
    found = ResultPaths((), {"HOME": str(tmp_path / "home")}, str(tmp_path))

    assert not found.counts(os.path.realpath(tmp_path / "scratch" / "x"))


def test_words_that_are_no_path_are_passed_over():
    assert places(("a\0b", "x" * 100_000, "~nobody/x", "", "=", "--", "é" * 300)).named == ()


def test_sources_and_hidden_files_may_be_changed_by_others():
    found = places()
    assert found.may_be_changed_by_others("/work/job/train.py")
    assert found.may_be_changed_by_others("/work/job/.results.swp")
    assert not found.may_be_changed_by_others("/work/job/results.jsonl")


def test_every_data_folder_is_absolute_or_starts_at_a_home():
    import tomllib

    import oomguard

    root = Path(oomguard.__file__).parent
    for path in (root / "analyst" / "no_effects.toml", *root.glob("engines/*/effects.toml")):
        table = tomllib.loads(path.read_text())
        folders = [*table["caches"], *table.get("temporary", ())]
        assert folders
        assert [folder for folder in folders if folder[0] not in "/~$"] == []
