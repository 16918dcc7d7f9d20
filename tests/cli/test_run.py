from __future__ import annotations

import subprocess
import sys

import pytest


def oomguard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oomguard", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_missing_double_dash_is_told_with_the_command_to_paste():
    ran = oomguard("run", "--allow", "reduces-capacity", "python", "a b.py")
    assert ran.returncode == 2
    assert "-- is missing before the command" in ran.stderr
    assert "oomguard run --allow reduces-capacity -- python 'a b.py'" in ran.stderr


@pytest.mark.parametrize("arguments", [("run",), ("run", "--"), ("run", "--dry-run"), ("run", "--dry-run", "--")])
def test_no_command_is_told(arguments):
    ran = oomguard(*arguments)
    assert ran.returncode == 2
    assert "no command to run" in ran.stderr


@pytest.mark.parametrize(
    "options",
    [("--allow", "everything"), ("--pin", "nothing"), ("--min", "x"), ("--report", "out.pdf"), ("--max-relaunches", "-1"), ("--nonsense",), ("--journal", "/proc/no/journal")],
)  # fmt: skip
def test_a_wrong_option_is_one_message_and_the_command_is_not_started(options, tmp_path):
    marker = tmp_path / "started"
    ran = oomguard("run", *options, "--", "touch", str(marker))
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert not marker.exists()


def test_what_follows_the_dashes_belongs_to_the_command():
    ran = oomguard("run", "-q", "--", "echo", "--allow", "--help", "--", "-q")
    assert ran.stdout == "--allow --help -- -q\n"


def test_the_version_is_printed():
    import oomguard as package

    assert oomguard("--version").stdout == f"oomguard {package.__version__}\n"


def test_help_is_shown_for_every_command():
    for command in ((), ("run",), ("diagnose",), ("rules",), ("rules", "check")):
        ran = oomguard(*command, "--help")
        assert ran.returncode == 0
        assert "Usage" in ran.stdout


def test_an_unknown_command_is_status_2():
    assert oomguard("diagnos").returncode == 2


def test_secrets_of_the_command_are_not_printed():
    ran = oomguard("run", "--", "sh", "-c", "exit 1", "--api-key", "abcdefgh12345")
    assert "abcdefgh12345" not in ran.stderr
