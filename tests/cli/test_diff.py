"""``oomguard diff`` as a user runs it: exit statuses, forms, inputs."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

from support.each import each
from support.in_process import oomguard_bytes

LOGS = Path(__file__).parents[2] / "examples" / "logs"
OLD, NEW = LOGS / "vllm_0.12.0_start_worked.log", LOGS / "vllm_0.21.0_start_failed.log"


def diff(
    *arguments: object, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return oomguard_bytes("diff", *arguments, stdin=stdin, env=env)


def test_it_worked_before_the_upgrade_is_answered():
    ran = diff(OLD, NEW, env={"COLUMNS": "200"})
    assert ran.returncode == 0
    assert ran.stderr == b""
    text = " ".join(ran.stdout.decode().split())
    for words in (
        "0.12.0 -> 0.21.0: the KV cache lost 1.9 GiB; the start that worked left 0.9 GiB more than one request needs",
        "gpu_memory_utilization 0.9 0.92 +0.02",
        "KV cache 4.90 GiB 3.05 GiB -1.85 GiB",
        "1.31 GiB less for it",
        "--enforce-eager",  # the graphs take 1.31 GiB, and 0.95 GiB are missing
    ):
        assert words in text


def test_json_is_one_object_on_one_line():
    (line,) = diff("--format", "json", OLD, NEW).stdout.splitlines()
    answer = json.loads(line)
    assert answer["old"]["framework_version"] == "0.12.0"
    assert answer["new"]["incident"]["kind"] == "kv_cache_too_small_for_max_len"
    assert {"name", "old", "new", "difference", "kind"} <= answer["changes"][0].keys()


def test_markdown_begins_with_the_headline():
    assert diff("--format", "markdown", OLD, NEW).stdout.startswith(
        b"### 0.12.0 -> 0.21.0: the KV cache lost 1.9 GiB"
    )


def test_exit_code_tells_whether_they_differ_only_when_asked():
    assert diff("--exit-code", OLD, NEW).returncode == 1
    assert diff("--exit-code", OLD, OLD).returncode == 0
    assert diff(OLD, NEW).returncode == 0


def test_compressed_logs_and_standard_input_are_read(tmp_path):
    packed = tmp_path / "old.log.gz"
    packed.write_bytes(gzip.compress(OLD.read_bytes()))
    ran = diff("--format", "json", packed, "-", stdin=NEW.read_bytes())
    assert json.loads(ran.stdout)["headline"].startswith(
        "0.12.0 -> 0.21.0: the KV cache lost 1.9 GiB"
    )


@each("kept", [0.05, 0.2, 0.4, 0.6, 0.8])
def test_a_log_that_was_cut_is_compared_as_far_as_it_goes(tmp_path, kept):
    whole = NEW.read_bytes()
    (cut := tmp_path / "cut.log").write_bytes(whole[: int(kept * len(whole))])
    ran = diff("--format", "json", OLD, cut)
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["old"]["framework_version"] == "0.12.0"


def test_a_damaged_archive_is_read_as_far_as_it_goes_and_says_so(tmp_path):
    (packed := tmp_path / "new.log.gz").write_bytes(gzip.compress(NEW.read_bytes())[:-200])
    answer = json.loads(diff("--format", "json", OLD, packed).stdout)
    assert [text for text in answer["unknown"] if text.startswith("NEW: ")]


def test_which_start_is_compared_can_be_said(tmp_path):
    (both := tmp_path / "both.log").write_bytes(
        NEW.read_bytes() + b"INFO [launcher.py:1] starting again\n" * 20 + OLD.read_bytes()
    )
    answer = json.loads(
        diff("--format", "json", "--old-start", 2, "--new-start", 1, both, both).stdout
    )
    assert [answer[side]["framework_version"] for side in ("old", "new")] == ["0.12.0", "0.21.0"]
    assert [answer[side]["start"] for side in ("old", "new")] == [2, 1]


def test_a_start_that_is_not_there_is_a_mistake():
    ran = diff("--new-start", 9, OLD, NEW)
    assert ran.returncode == 2
    assert b"no start 9" in ran.stderr


def test_a_log_without_a_start_is_named_with_what_is_looked_for(tmp_path):
    (other := tmp_path / "pip.log").write_text("Collecting vllm\n")
    ran = diff(OLD, other)
    assert ran.returncode == 2
    assert ran.stdout == b""
    assert str(other).encode() in ran.stderr
    assert b"Initializing a V1 LLM engine" in ran.stderr


@each(
    "arguments",
    [("-", "-"), ("/nonexistent/a.log", OLD), (OLD,), (OLD, LOGS), ("--format", "html", OLD, NEW)],
)
def test_bad_usage_and_unreadable_input_end_with_2(arguments):
    ran = diff(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == b""
    assert ran.stderr
    assert b"Traceback" not in ran.stderr


def test_a_form_that_only_other_commands_have_is_left_to_them():
    ran = diff(OLD, NEW, env={"OOMGUARD_FORMAT": "html"})
    assert ran.returncode == 0
    assert b"What explains it" in ran.stdout


def test_secrets_of_the_settings_are_masked_unless_asked_for(tmp_path):
    text = OLD.read_text().replace(
        "'max_model_len': 32768}", "'max_model_len': 32768, 'api_key': 'hunter2'}"
    )
    (old := tmp_path / "old.log").write_text(text)
    assert b"hunter2" not in diff(old, NEW).stdout
    assert b"hunter2" in diff("--no-mask", old, NEW).stdout
