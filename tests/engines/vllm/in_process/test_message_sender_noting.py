"""What vLLM logs is noted in a file for the run that started the command, from whatever process, and never without an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.engines.vllm import plugin
from oomguard.engines.vllm.in_process import message_sender
from oomguard.engines.vllm.in_process.message_receiver import logged_lines, reported_limits

ROOT = Path(__file__).parents[4]
LOGS = """
import logging, os, sys
from oomguard.engines.vllm.plugin import register
register()
log = logging.getLogger("vllm.v1.engine.core")
logging.getLogger("vllm").setLevel(logging.INFO)
log.info("Initializing a V1 LLM engine (v0.32.0) with config: model='./m'")
logging.getLogger("others").error("not vLLM's")
try:
    raise ValueError("No available memory for the cache blocks.")
except ValueError:
    log.exception("EngineCore failed to start.")
"""


LIMIT_BYTES = 3 << 30


def run(path: Path, *before: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", LOGS],
        env={**os.environ, "PYTHONPATH": str(ROOT), plugin.LOG_FILE: str(path), **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def test_vllms_log_is_kept_with_tracebacks_and_read(tmp_path):
    run(tmp_path / "said.jsonl")
    texts = [line.text for line in logged_lines(tmp_path / "said.jsonl")]
    assert any("Initializing a V1 LLM engine" in text for text in texts)
    assert texts[-1].endswith("ValueError: No available memory for the cache blocks.")
    assert not [text for text in texts if "not vLLM's" in text]
    assert (tmp_path / "said.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_gone_is_no_matter_of_the_engine_s(tmp_path):
    assert run(tmp_path / "gone" / "said.jsonl").returncode == 0


def test_information_is_noted_up_to_a_size_and_errors_beyond_it(tmp_path, monkeypatch):
    monkeypatch.setattr(message_sender, "_MOST_INFORMATION_BYTES", 50)
    monkeypatch.setattr(message_sender, "_MOST_BYTES", 200)
    notes = message_sender.LogFile(str(tmp_path / "said.jsonl"))
    for level in ("INFO", "INFO", "ERROR", "INFO"):
        notes.sendall(json.dumps({"level": level, "text": "x" * 40}).encode() + b"\n")
    told = [
        json.loads(line)["level"] for line in (tmp_path / "said.jsonl").read_text().splitlines()
    ]
    assert told == ["INFO", "ERROR"]
    with pytest.raises(OSError, match="is full"):
        for _ in range(9):
            notes.sendall(json.dumps({"level": "ERROR", "text": "x" * 40}).encode() + b"\n")
    notes.close()


def test_survived_steps_are_noted_beyond_the_size_for_records(tmp_path, monkeypatch):
    monkeypatch.setattr(message_sender, "_MOST_RECORD_BYTES", 50)
    notes = message_sender.LogFile(str(tmp_path / "said.jsonl"))
    record = {"level": "ERROR", "text": "x" * 40}
    for row in (record, record, {"step_recovery": {"tokens": 9}}, record):
        notes.sendall(json.dumps(row).encode() + b"\n")
    notes.close()
    rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert rows == [record, {"step_recovery": {"tokens": 9}}]


def test_lines_of_a_file_that_are_none_are_left_out(tmp_path):
    (tmp_path / "said.jsonl").write_text(
        '{"half\n[]\n{"text": "kept", "level": "ERROR", "at": "a.py:1", "stamp": "s"}\n'
    )
    assert [line.text.rpartition("] ")[2] for line in logged_lines(tmp_path / "said.jsonl")] == [
        "kept"
    ]
    assert logged_lines(tmp_path / "none.jsonl") == ()


def test_wrapper_limits_are_recorded_and_nothing_without_one(tmp_path):
    run(tmp_path / "free.jsonl")
    assert reported_limits(tmp_path / "free.jsonl") == {}
    run(
        tmp_path / "limited.jsonl",
        "bash",
        "-c",
        f'ulimit -d {LIMIT_BYTES >> 10} && exec "$@"',
        "bash",
    )
    assert reported_limits(tmp_path / "limited.jsonl") == {"process_data_limit_bytes": LIMIT_BYTES}
    assert logged_lines(tmp_path / "limited.jsonl")
