"""The time that a collector gave a line, whatever object it made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.fleet import findings_of, time_of_multiline_object, time_of_object
from oomguard.diagnosis import diagnose

AT = 1795590875.0  # 2026-11-25T07:14:35Z
STAMP = "2026-11-25T07:14:35.000000000Z"
# The stamp within has another hour in every zone that this test may run in.
SAID = (
    "(EngineCore pid=7) ERROR 11-24 03:02:01 [core.py:1510] ValueError: To serve at least one request with the model's max seq len (32768),"
    " (4.00 GiB KV cache is needed, which is larger than the available KV cache memory (0.50 GiB). Based on the available memory, the"
    " estimated maximum model length is 1792. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the"
    " engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)
OBJECTS: dict[str, dict[str, Any]] = {
    "Loki": {"labels": {"pod": "a"}, "line": SAID, "timestamp": STAMP},
    "Loki, nanoseconds": {"labels": {"pod": "a"}, "line": SAID, "timestamp": "1795590875000000000"},
    "Google Cloud": {
        "textPayload": SAID,
        "resource": {"labels": {"pod_name": "a"}},
        "timestamp": STAMP,
        "severity": "ERROR",
    },
    "Vector": {
        "kubernetes": {"pod_name": "a"},
        "message": SAID,
        "stream": "stderr",
        "timestamp": STAMP,
    },
    "CloudWatch": {
        "logStreamName": "a",
        "timestamp": 1795590875000,
        "message": SAID,
        "ingestionTime": 1795590880000,
    },
    "fluent-bit": {"log": SAID, "stream": "stderr", "time": STAMP},
    "fluent-bit, seconds": {"date": 1795590875.0, "log": SAID, "stream": "stderr"},
    "Elasticsearch": {"_index": "a", "_source": {"message": SAID, "@timestamp": STAMP}},
}


def test_the_object_of_a_line_tells_its_time():
    for name, value in OBJECTS.items():
        assert time_of_object(json.dumps(value)) == AT, name


def test_written_object_shows_the_time_of_each_line():
    for name in [name for name in OBJECTS if name != "Elasticsearch"]:
        other = {
            "message": "x",
            "timestamp": "2020-01-01T00:00:00Z",
            "time": "2020-01-01T00:00:00Z",
        }
        lines = json.dumps([other, OBJECTS[name], other], indent=2).split("\n")
        assert (
            time_of_multiline_object(
                lines, next(at for at, line in enumerate(lines) if "max seq len" in line)
            )
            == AT
        ), name


def test_failure_has_the_collectors_time_before_its_own_stamp(tmp_path: Path):
    log = tmp_path / "export.json"
    for name in [name for name in OBJECTS if name != "Elasticsearch"]:
        for text in (json.dumps(OBJECTS[name]), json.dumps([OBJECTS[name]], indent=4)):
            log.write_text(f"{text}\n")
            (finding,) = findings_of(diagnose(log), AT + 5)
            assert (finding.at, finding.clock) == (AT, "line"), text


def test_what_tells_no_time_gives_none():
    for line in [
        '{"message": "x"}',
        '{"time": 12.5, "message": "took"}',
        '{"time": true}',
        '{"timestamp": "soon"}',
        "[1795590875]",
        "{" * 5000,
        "x",
    ]:
        assert time_of_object(line) is None, line


def test_a_line_outside_an_object_has_no_time():
    assert time_of_multiline_object(["x", '  "timestamp": "2020-01-01T00:00:00Z"'], 0) is None


@given(st.lists(st.text(max_size=40), min_size=1), st.integers(0, 100))
def test_no_lines_are_too_strange(lines: list[str], at: int):
    assert time_of_multiline_object(lines, at % len(lines)) is None or any(
        "time" in line or "date" in line for line in lines
    )
    assert time_of_object(lines[0]) is None or "{" in lines[0]
