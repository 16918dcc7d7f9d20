"""The key of a job's own file that gives a setting is told, so that a change that worked can be kept."""

from __future__ import annotations

import os

import pytest

from oomguard.analyst import attempt_settings
from oomguard.analyst.attempt_settings import (
    SettingLocation,
    find_setting_locations,
    log_setting_locations,
)
from oomguard.core.incident import Effect, Incident, Patch

JOB = """\
# the seed's form
engine:
  gpu_memory_utilization: 0.9
  max-model-len: 32768
speculative_decoding:
  num_tokens: 5
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return ("python", "serve.py", "--config=job.yaml")


@pytest.mark.parametrize(
    ("setting", "value", "line", "key"),
    [
        ("gpu_memory_utilization", 0.9, 3, "engine.gpu_memory_utilization"),
        ("max_model_len", 32768, 4, "engine.max-model-len"),
    ],
)
def test_a_key_in_a_section_of_its_own_is_found(job, setting, value, line, key):
    assert find_setting_locations(job, setting, value, "vllm") == [
        SettingLocation("job.yaml", line, key)
    ]


def test_key_with_another_value_is_not_the_engines_argument(job):
    assert find_setting_locations(job, "max_model_len", 8192, "vllm") == []


def test_json_is_read_and_of_a_repeated_key_the_last_one_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text('{"llm": {"max_num_seqs": 8,\n "max_num_seqs": 16}}')
    assert find_setting_locations(["c.json"], "max_num_seqs", 16, "vllm") == [
        SettingLocation("c.json", 2, "llm.max_num_seqs")
    ]
    assert find_setting_locations(["c.json"], "max_num_seqs", 8, "vllm") == []


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n- 2", "", "\0", "just words", "a: &a {b: *a}", "--- 1\n--- 2"]
)
def test_a_file_that_holds_no_settings_has_no_place(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    assert find_setting_locations(["a.yaml"], "max_num_seqs", 8, "vllm") == []


def test_a_file_that_never_ends_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    assert find_setting_locations(["pipe.yaml", "missing.yaml"], "max_num_seqs", 8, "vllm") == []


def test_names_for_parts_that_stand_for_endless_ones_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    assert find_setting_locations(["a.yaml"], "max_num_seqs", 8, "vllm") == []


def test_only_what_was_solved_and_may_be_done_is_told(job, monkeypatch):
    told = []

    class Log:
        def info(self, event, **fields):
            told.append((event, fields))

    monkeypatch.setattr(attempt_settings, "get_logger", Log)
    raised = Patch("gpu_memory_utilization", 0.9, 0.95, Effect.OUTPUT_PRESERVING, "")
    pinned = Patch("max_model_len", 32768, 8192, Effect.REDUCES_CAPACITY, "", blocked_by="pinned")
    log_setting_locations(
        job, Incident("kv_cache_none_left", "boom", framework="vllm", plan=(raised, pinned))
    )
    assert [(fields["key"], fields["then"]) for _event, fields in told] == [
        ("engine.gpu_memory_utilization", 0.95)
    ]
