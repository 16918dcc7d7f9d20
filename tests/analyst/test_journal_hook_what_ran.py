"""By what a later run knows an attempt again: its command and files, and the engine, model and device that it turned out to have."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path
from types import MappingProxyType

import pytest

from oomguard.analyst.journal_hook import (
    chosen_by_user,
    describe_start,
    digest_of_files,
    identify_run,
    names_local_path,
)
from oomguard.core.facts import Fact
from oomguard.core.incident import Effect, EngineStart, Incident, Patch, SettingInForce
from oomguard.journal.store import RunIdentity


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_command_is_kept_masked_with_home_and_folder(folder: Path):
    kept = describe_start(["sh", "/home/alice/job.sh", "--api-key", "Hunter2"])

    assert kept == {
        "original": ["sh", "/home/alice/job.sh", "--api-key", "***"],
        "folder": str(folder),
        "files": None,
        "hides_secrets_alone": True,
        "who": getpass.getuser(),
        "host": socket.gethostname(),
    }


def test_digest_covers_programs_and_configurations(folder: Path):
    (folder / "job.py").write_text("a")
    (folder / "c.yaml").write_text("b")
    command = ["python", "job.py", "--config=c.yaml"]
    first = digest_of_files(command)

    assert first is not None
    assert digest_of_files(command) == first
    (folder / "c.yaml").write_text("c")
    assert digest_of_files(command) != first
    assert digest_of_files(["python", "missing.py", "data.csv"]) is None


def test_what_is_no_file_or_has_no_end_is_not_read(folder: Path):
    os.mkfifo(folder / "pipe.py")
    (folder / "folder.py").mkdir()

    assert digest_of_files(["python", "pipe.py", "folder.py", "bad\0name.py"]) is None


def test_local_path_differs_from_one_that_is_the_same_everywhere(folder: Path):
    (folder / "tiny").mkdir()

    assert names_local_path(["vllm", "serve", "./tiny"])
    assert names_local_path(["x", "--model=tiny"])
    assert not names_local_path(
        ["vllm", "serve", "org/model", str(folder / "tiny"), "", "a prompt " * 1000]
    )


def test_a_working_directory_that_is_gone_is_not_known(folder: Path):
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()

    assert describe_start(["true"])["folder"] is None


def test_what_ran_is_what_the_engine_told_else_what_failed_told():
    told = EngineStart(
        1, "vllm", "0.33.0", settings={"model": SettingInForce("model", "/home/alice/m", True, "x")}
    )
    failed = Incident(
        "cuda_oom", "", "torch", None, facts=MappingProxyType({"model": Fact("model", "other")})
    )

    assert identify_run(failed, told, "H100") == RunIdentity("vllm", "0.33.0", "~/m", "H100")
    assert identify_run(failed, None, None) == RunIdentity("torch", None, "other", None)
    assert identify_run(None, None, None) == RunIdentity()


def test_whose_a_setting_was_is_kept_for_what_the_plan_changes():
    plan = (
        Patch("max_model_len", 2, 1, Effect.REDUCES_CAPACITY, ""),
        Patch("max_num_seqs", 2, None, Effect.REDUCES_CAPACITY, ""),
    )
    settings = {"max_model_len": SettingInForce("max_model_len", 2, True, "command")}

    assert chosen_by_user(Incident("x", "", plan=plan, settings=settings)) == {
        "max_model_len": True
    }
    assert chosen_by_user(Incident("x", "", plan=plan[:1], settings_complete=True)) == {
        "max_model_len": False
    }
    assert chosen_by_user(Incident("x", "", plan=plan[:1])) == {"max_model_len": None}
    assert chosen_by_user(None) == {}
