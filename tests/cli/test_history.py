"""oomguard history: lists, shows, prints the command as it was, forgets, and says what is no journal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.journal.store import default_path
from support.each import each
from support.in_process import oomguard_text

ENGINE = Path(__file__).parents[1] / "analyst" / "fake_engine.py"
OLD = Path(__file__).parents[1] / "journal" / "schema_1.sqlite3"


def oomguard(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-m", "oomguard", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        **more,
    )


def history(*arguments: str, journal: Path | None = OLD) -> subprocess.CompletedProcess[str]:
    return oomguard_text(
        "history", *arguments, *(() if journal is None else ("--journal", str(journal)))
    )


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD, tmp_path / "journal.sqlite3"))


def test_table_has_the_newest_first_with_change_and_result():
    ran = history()
    text = " ".join(ran.stdout.split())

    assert ran.returncode == 0
    assert text.index(" 4 2026") < text.index(" 3 2026") < text.index(" 1 2026")
    assert "kv_cache_too_small_for_max_len:" in text
    assert "max_model_len 32768 -> 1792" in text
    assert "KV tokens 1,792 -> not printed" in text
    assert ran.stderr == ""


def test_json_is_a_line_per_run_with_predicted_and_measured():
    rows = [json.loads(line) for line in history("--format", "json").stdout.splitlines()]

    assert [(row["run"], row["result"], row["exit_status"]) for row in rows] == [
        (4, "failed", 1),
        (3, "failed", 1),
        (2, "ran", 0),
        (1, "repaired", 0),
    ]
    first, second = rows[-1]["attempts"]
    assert (first["kind"], first["cause"]) == (
        "kv_cache_too_small_for_max_len",
        "max_model_len_too_large",
    )
    assert second["predicted"] == {"kv_cache_capacity_tokens": 1792}
    assert second["settings"] == {"max_model_len": 1792}
    assert rows[-1]["command"] == ["python3", "./fake_engine.py", "--api-key", "***"]


def test_the_filters_work_together_and_nothing_found_is_no_error():
    rows = history(
        "--failed", "--command", "fake_VLLM.py serve", "--format", "json"
    ).stdout.splitlines()
    assert [json.loads(row)["run"] for row in rows] == [4]
    nothing = history("--command", "no such", "--failed")
    assert (nothing.returncode, nothing.stdout) == (
        0,
        f"no recorded run matches these options in {OLD}\n",
    )
    assert history("--since", "0s").stdout.startswith("no recorded run")


def test_what_the_limit_leaves_out_is_told_beside_the_table():
    ran = history("--limit", "1", "--format", "json")

    assert len(ran.stdout.splitlines()) == 1
    assert ran.stderr == "oomguard: showing the last run; --limit 0 shows all\n"
    assert len(history("--limit", "0", "--format", "json").stdout.splitlines()) == 4
    assert history("--limit", "4").stderr == ""
    assert (
        history("--limit", "1", "--failed", "--command", "fake_vllm.py serve").stderr == ""
    )  # of these there is no other


def test_one_run_is_shown_in_full_with_attempts_and_failure():
    shown = history("1").stdout

    assert "run 1: repaired, exit 0" in shown
    assert "What oomguard did" in shown
    assert "One request of 32768 tokens needs about" in shown
    assert "oomguard history 1 --original" in shown
    assert json.loads(history("1", "--format", "json").stdout)["attempts"][0]["incident"][
        "message"
    ].startswith("To serve")


def test_a_run_that_is_not_there_is_told_with_the_last_one():
    ran = history("9")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "there is no run 9: the last one is 4" in ran.stderr


def test_what_is_forgotten_is_never_more_than_what_is_asked_for(old: Path):
    assert (
        history("--forget", "--all", "--yes", "--command", "no such", journal=old).returncode == 2
    )
    by_variable = {**os.environ, "OOMGUARD_FAILED": "1"}
    assert (
        oomguard_text(
            "history", "--forget", "--all", "--yes", "--journal", str(old), env=by_variable
        ).returncode
        == 2
    )
    rows = [
        json.loads(line) for line in history("--format", "json", journal=old).stdout.splitlines()
    ]
    assert not any(row["forgotten"] for row in rows)


def test_history_without_runs_names_the_place():
    ran = history(journal=None)
    assert (ran.returncode, ran.stdout) == (
        0,
        f"no run is recorded in {default_path()}; oomguard run records there\n",
    )
    assert not default_path().exists()


@each("arguments", [(), ("1",), ("--original", "1"), ("--forget", "1", "--yes")])
def test_what_is_no_journal_is_one_message(tmp_path: Path, arguments: tuple[str, ...]):
    (tmp_path / "j").write_text("dear diary, " * 200)
    ran = history(*arguments, journal=tmp_path / "j")

    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"{tmp_path / 'j'}: file is not a database" in ran.stderr
    assert "Traceback" not in ran.stderr


@each(
    "arguments",
    [
        ("--original",),
        ("--all",),
        ("--yes",),
        ("--model", "m"),
        ("--forget",),
        ("--forget", "1", "--all"),
        ("--forget", "--all", "--yes", "--command", "vllm"),
        ("--forget", "--all", "--yes", "--since", "7d"),
        ("--forget", "1", "--yes", "--failed"),
        ("--forget", "1", "--yes", "--original"),
        ("1", "--command", "x"),
        ("1", "--limit", "3"),
        ("--original", "1", "--format", "json"),
        ("--original", "1", "--failed"),
        ("99999999999999999999999",),
        ("--original", "9223372036854775808"),
        ("--forget", "9223372036854775808", "--yes"),
        ("--since", "yesterday"),
        ("--since", "nand"),
        ("--limit", "-1"),
        ("--format", "html"),
        ("0",),
    ],
)
def test_a_wrong_option_is_one_message(arguments: tuple[str, ...]):
    ran = history(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


def test_the_original_command_is_what_was_given_ready_to_paste(tmp_path: Path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    words = (
        sys.executable,
        str(ENGINE),
        "--mode",
        "",
        "--note",
        "it's $HOME",
        "--api-key",
        "Hunter2",
    )
    ran = oomguard("run", "--", *words, cwd=folder)
    assert "RESULT 1792" in ran.stdout

    original = history("--original", "1", journal=None)
    again = subprocess.run(
        ["sh", "-c", f"set -- {original.stdout.strip()}; printf '%s\\n' \"$@\""],
        capture_output=True,
        text=True,
        check=True,
    )

    assert again.stdout.splitlines() == [*words[:-1], "***"]
    assert "*** replaces a secret" in original.stderr
    assert f"the command was started in {folder}" in original.stderr
    assert "Hunter2" not in history("1", journal=None).stdout
    assert b"Hunter2" not in default_path().read_bytes()


def test_the_original_of_a_reused_change_is_the_command_as_given():
    for _ in range(2):
        oomguard("run", "--reuse", "--", sys.executable, str(ENGINE))
    rows = [
        json.loads(line) for line in history("--format", "json", journal=None).stdout.splitlines()
    ]

    assert [len(row["attempts"]) for row in rows] == [1, 2]
    assert rows[0]["attempts"][0]["patches"][0]["to"] == 1792
    assert (
        history("--original", "2", journal=None).stdout
        == history("--original", "1", journal=None).stdout
    )


def test_home_folder_of_an_old_journal_is_pasted_unquoted():
    ran = history("--original", "3")
    assert ran.stdout == "python3 ./fake_engine.py ~/data\n"
    assert "~ replaces a home folder" in ran.stderr


def test_forgotten_runs_are_announced_and_stay_in_history(old: Path):
    asked = history("--forget", "1", journal=old)
    assert asked.returncode == 2
    assert "run 1 of " in asked.stdout
    assert "max_model_len = 1792" in asked.stdout
    assert "confirm with --yes" in asked.stderr

    assert history("--forget", "1", "--yes", journal=old).stdout.endswith(
        "oomguard forgot these settings; the runs stay in the history\n"
    )

    row = json.loads(history("1", "--format", "json", journal=old).stdout)
    assert (row["forgotten"], row["result"]) == (True, "repaired")
    assert (
        history("--forget", "1", "--yes", journal=old).stdout
        == "nothing to forget: oomguard learned nothing from run 1\n"
    )


def calibrations(*entries: dict[str, object]) -> Path:
    path = default_path().with_name("calibrations.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    correction = {
        "source": "a start of vLLM 0.33.0, oomguard run on 2026-11-25",
        "weights_bytes": 1,
        "peak_activation_bytes": 1,
        "cudagraph_bytes": 1,
        "non_torch_bytes": 1,
        "uncertainty_bytes": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "enforce_eager": False,
    }
    rows = [
        {
            "of": {"gpu_total_bytes": 2**34 + i},
            "correction": correction | entry.pop("correction", {}),
            **entry,
        }
        for i, entry in enumerate(entries)
    ]  # type: ignore[operator]
    path.write_text(json.dumps({"schema": 1, "calibrations": rows}))
    return path


@each(
    ("arguments", "left"),
    [
        (("2",), ["s1", None]),
        (("--model", "./m"), ["s2", None]),
        (("--all",), [None]),
    ],
)
def test_learned_calibrations_are_dropped_and_users_stay(
    arguments: tuple[str, ...], left: list[str]
):
    from oomguard.journal.store import AttemptRow, Journal

    for session in ("s1", "s2"):
        Journal(default_path()).begin(AttemptRow(session, 1, ["vllm", "serve", "x"], {}, []))
    path = calibrations(
        {"session": "s1", "model": "./m"},
        {"session": "s2", "model": "./other"},
        {"correction": {"source": "a start of vLLM 0.33.0, good.log"}},
    )
    ran = history("--forget", *arguments, "--yes", journal=None)

    assert ran.returncode == 0, ran.stderr
    assert "calibration of ./" in ran.stdout
    assert [entry.get("session") for entry in json.loads(path.read_text())["calibrations"]] == left


def test_the_journal_may_be_named_by_a_variable():
    ran = oomguard_text(
        "history", "--format", "json", env={**os.environ, "OOMGUARD_JOURNAL": str(OLD)}
    )
    assert len(ran.stdout.splitlines()) == 4
