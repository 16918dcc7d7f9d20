"""The attempts of oomguard run, with a script that fails in vLLM's words (the real engine: tests/vllm)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from oomguard.journal.store import Journal

ENGINE = Path(__file__).with_name("fake_engine.py")


def run(
    *options: str, engine: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        *options,
        "--",
        sys.executable,
        str(ENGINE),
        *engine,
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **(env or {})},
    )


def test_untouched_setting_is_lowered_and_the_result_appears():
    ran = run()
    assert ran.returncode == 0, ran.stderr
    assert "RESULT 1792" in ran.stdout
    assert "Ran with reduced settings: max_model_len 32768 -> 1792" in ran.stderr


def test_what_the_user_set_is_not_lowered_without_permission():
    ran = run(engine=("--max-model-len", "32768"))
    assert ran.returncode == 1
    assert "RESULT" not in ran.stdout
    assert "you set it; --allow reduces-capacity permits it" in " ".join(ran.stderr.split())
    assert ran.stderr.count("oomguard[OG201]: ") == 1  # the cause, shown once
    assert "engine_dead" not in ran.stderr
    assert '"max_model_len": 1792' in ran.stderr


def test_with_permission_it_is_lowered_too():
    ran = run("--allow", "reduces-capacity", engine=("--max-model-len", "32768"))
    assert ran.returncode == 0
    assert "RESULT 1792" in ran.stdout


def test_worker_killed_by_a_signal_is_reported_and_unchanged():
    died = "(EngineCore pid=2) ERROR [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor."
    command = ["sh", "-c", 'echo "$0"; exit 1', died]
    ran = subprocess.run(
        [sys.executable, "-m", "oomguard", "run", "--", *command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.count("oomguard: Attempt ended") == 1
    said = " ".join(line.strip("│ ") for line in ran.stderr.splitlines())
    assert (
        "SIGILL ended a process of the engine: it used a CPU instruction that is missing or disabled"
        in said
    )
    assert "Memory did not run out" in said
    assert "Not retried: oomguard has no permitted change left" in said


def test_a_pinned_setting_stays():
    ran = run("--pin", "max_model_len")
    assert ran.returncode == 1
    assert "pinned" in ran.stderr
    # No command with it stands ready to be pasted.
    assert "max-model-len 1792" not in ran.stderr
    assert '"max_model_len": 1792' not in ran.stderr


def test_dry_run_shows_the_changed_command_and_runs_nothing(tmp_path):
    count = tmp_path / "count.log"
    ran = run("--dry-run", engine=("--count", str(count)))
    assert ran.returncode == 1
    assert count.read_text().split() == ["32768"]
    assert "OOMGUARD_VLLM_OVERRIDES='{\"max_model_len\": 1792}'" in ran.stderr


def test_no_relaunch_when_none_is_allowed(tmp_path):
    count = tmp_path / "count.log"
    assert run("--max-attempts", "1", engine=("--count", str(count))).returncode == 1
    assert len(count.read_text().split()) == 1


def test_same_value_is_never_tried_twice_and_attempts_end(tmp_path):
    """The engine's estimate is wrong here: it fails again at what it asked for."""
    count = tmp_path / "count.log"
    ran = run(
        "--max-attempts",
        "10",
        engine=("--count", str(count), "--fits", "100", "--estimate", "1792"),
    )
    tried = count.read_text().split()
    assert ran.returncode == 1
    assert tried == ["32768", "1792"]


def test_after_the_deadline_nothing_is_run_again(tmp_path):
    count = tmp_path / "count.log"
    slowly = [
        "sh",
        "-c",
        'sleep 3; exec "$@"',
        "sh",
        sys.executable,
        str(ENGINE),
        "--count",
        str(count),
    ]
    command = [sys.executable, "-m", "oomguard", "run", "--deadline", "2", "--", *slowly]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 1
    assert "Not retried: the deadline has passed: attempts=1 deadline_s=2.0" in ran.stderr
    assert len(count.read_text().split()) == 1


def test_the_journal_holds_one_record_of_each_attempt(tmp_path):
    path = tmp_path / "journal.sqlite3"
    run("--journal", str(path))
    first, second = Journal(path).records()
    assert (first.number, first.exit_status, first.incident["kind"]) == (
        1,
        1,
        "kv_cache_too_small_for_max_len",
    )
    assert (second.number, second.exit_status, second.incident) == (2, 0, None)
    assert first.session == second.session
    assert second.settings == {"max_model_len": 1792}
    assert second.patches[0]["setting"] == "max_model_len"
    assert second.predicted == {"kv_cache_capacity_tokens": 1792}
    assert second.ended_at >= second.started_at


def test_a_report_is_written(tmp_path):
    path = tmp_path / "report.json"
    run("--report", str(path))
    text = path.read_text()
    assert "1792" in text
    answer = json.loads(text)
    assert answer["incidents"][0]["kind"] == "kv_cache_too_small_for_max_len"
    assert [attempt["exit_status"] for attempt in answer["attempts"]] == [1, 0]
    assert "Ran with reduced settings" in text


def test_failure_without_a_signature_is_reported_and_not_rerun(tmp_path):
    script = f"echo run >> {tmp_path}/runs; echo 'ERROR arena: grow refused: out of device memory' >&2; exit 5"
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--allow",
        "changes-outputs",
        "--",
        "sh",
        "-c",
        script,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 5
    assert (tmp_path / "runs").read_text() == "run\n"
    assert "CUDA out of memory" in ran.stderr
    assert "No signature matches its wording" in " ".join(ran.stderr.split())


def test_a_failure_that_the_script_handled_does_not_run_it_again(tmp_path):
    code = (
        "import sys, traceback\n"
        "try:\n"
        "    raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.52 GiB')\n"
        "except RuntimeError:\n"
        "    traceback.print_exc()\n"
        "open('/no/such/file')"
    )
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "-v",
        "--report",
        str(tmp_path / "r.json"),
        "--",
        sys.executable,
        "-c",
        code,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 1
    assert (
        'The command ended with an exception without memory failure: exception="FileNotFoundError'
        in ran.stderr
    )
    assert "OutOfMemory" not in ran.stderr.replace(code, "")
    assert json.loads((tmp_path / "r.json").read_text())["incidents"] == []


def test_a_relaunch_reads_the_file_of_the_option_again(tmp_path):
    (tmp_path / "prompts").write_text("".join(f"prompt {n}\n" for n in range(500)))
    run = [sys.executable, "-m", "oomguard", "run", "--input", str(tmp_path / "prompts")]
    command = [*run, "--", sys.executable, str(ENGINE), "--mode", "prompts"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert "RESULT 1792 500" in ran.stdout


def test_a_relaunch_that_could_not_read_the_same_is_refused():
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--",
        sys.executable,
        str(ENGINE),
        "--mode",
        "prompts",
    ]
    ran = subprocess.run(command, input=b"one\ntwo\n", capture_output=True, check=False)

    assert ran.returncode == 1
    assert b"RESULT" not in ran.stdout
    said = b"the command read its standard input from a pipe, which cannot be read twice"
    assert said in ran.stderr
    assert b"--input" in ran.stderr
