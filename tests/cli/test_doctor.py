"""``oomguard doctor``: what it prints of this machine, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from oomguard.cli.doctor import installed_version
from support.in_process import oomguard_text

GIB = 2**30


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return oomguard_text("doctor", *arguments, env=variables)


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
        "versions",
        "nvml",
        "torch_build",
        "left_over",
        "vllm_plugin",
        "allocator",
        "visible_devices",
        "variables",
        "wsl",
        "container",
        "cgroup",
        "host_memory",
        "shm",
        "address_space",
        "data_segment",
        "numa",
        "journal",
        "rules",
        "scanner",
    }


def test_every_problem_says_what_to_do():
    checks = found(
        VLLM_PLUGINS="mine", OOMGUARD_DISABLE="1", OOMGUARD_PINN="x", PYTORCH_ALLOC_CONF="nonsense"
    )
    problems = [check for check in checks if check["status"] == "problem"]

    assert len(problems) >= 4
    assert all(check["advice"] for check in problems)


def test_exit_status_is_1_only_on_request_and_with_a_problem():
    assert run(VLLM_PLUGINS="mine").returncode == 0
    assert run("--exit-code", VLLM_PLUGINS="mine").returncode == 1


def test_foreign_format_variable_does_not_break_doctor():
    assert run(OOMGUARD_FORMAT="markdown").returncode == 0
    assert json.loads(run(OOMGUARD_FORMAT="json").stdout)["schema"] == 1
    assert run(OOMGUARD_FORMAT="html").returncode == 0
    assert run("--format", "html").returncode == 2


def test_no_library_of_the_engines_is_imported():
    code = (
        "import sys\nfrom oomguard.cli import main\n"
        "try:\n    main(['doctor'])\nfinally:\n    print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout.splitlines()[-1] == "set()"


def test_a_secret_in_a_variable_is_masked_unless_told_not_to():
    ran = run(OOMGUARD_HF_TOKEN="hf_abcdefghijklmnopqrstuvwxyz")

    assert "OOMGUARD_HF_TOKEN" in ran.stdout
    assert "hf_abcdef" not in ran.stdout
    assert "hf_abcdef" in run("--no-mask", OOMGUARD_HF_TOKEN="hf_abcdefghijklmnopqrstuvwxyz").stdout


def test_unread_variable_is_an_error_with_the_nearest_name():
    check = next(c for c in found(OOMGUARD_MAX_ATTEMPT="2") if c["id"] == "variables")

    assert check["status"] == "problem"
    assert "did you mean OOMGUARD_MAX_ATTEMPTS?" in check["text"]
    assert check["advice"] == "unset OOMGUARD_MAX_ATTEMPT"


def test_variables_that_a_command_reads_are_fine():
    checks = found(OOMGUARD_MAX_ATTEMPTS="2", OOMGUARD_GPU_MEMORY="8GiB")

    assert [c["status"] for c in checks if c["id"] == "variables"] == ["ok", "ok"]


def test_the_scanning_library_is_named():
    (check,) = [c for c in found() if c["id"] == "scanner"]

    installed = installed_version("hyperscan")
    assert check["text"] == (
        f"fast scanning: hyperscan {installed}"
        if installed
        else "fast scanning: hyperscan is not installed, so oomguard uses its plain scanner"
    )


def test_doctor_is_named_by_the_help_page():
    done = subprocess.run(
        [sys.executable, "-m", "oomguard", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "doctor" in done.stdout
