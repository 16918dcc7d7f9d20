"""What processes told reads as a log of the same start does."""

from __future__ import annotations

from oomguard.diagnosis import default_rules
from oomguard.engines.vllm.in_process.message_receiver import (
    last_tracebacks,
    lines_of,
    requests_in_last_step,
    segments_of,
)
from oomguard.scan.scan import scan

HEAD = {
    "pid": 7,
    "process": "EngineCore",
    "level": "ERROR",
    "stamp": "11-22 18:00:00",
    "at": "core.py:1510",
}
NO_ROOM = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."


def test_each_record_line_has_its_process_exception_last():
    rows = [
        {"pid": 7, "hello": 1},
        {**HEAD, "text": "failed\nto start", "traceback": "Traceback\n  File x\nE: y"},
    ]
    lines = lines_of(rows, RuntimeError("See root cause above"))
    head = "(EngineCore pid=7) ERROR 11-22 18:00:00 [core.py:1510] "
    texts = [line.text for line in lines]
    assert texts[:5] == [
        head + text for text in ("failed", "to start", "Traceback", "  File x", "E: y")
    ]
    assert texts[-1] == "builtins.RuntimeError: See root cause above"
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))


def test_a_failure_is_found_with_the_process_that_told_it():
    (incident,) = scan(
        lines_of([{**HEAD, "text": "failed", "traceback": NO_ROOM}]), default_rules()
    ).incidents
    assert incident.kind == "kv_cache_none_left"
    assert incident.location.process == "EngineCore pid=7"


def test_last_words_are_the_last_traceback_of_each_process():
    rows = [
        {**HEAD, "text": "one", "traceback": "first"},
        {**HEAD, "text": "two", "traceback": "second"},
        {**HEAD, "text": "no traceback"},
        {**HEAD, "pid": 8, "process": "Worker", "text": "three", "traceback": "third"},
        {**HEAD, "pid": 9, "process": "", "text": "the process that starts", "traceback": "fourth"},
    ]
    assert [line.text.rpartition("] ")[2] for line in last_tracebacks(rows)] == [
        "two",
        "second",
        "three",
        "third",
    ]


def test_segments_are_those_that_were_named():
    assert segments_of([{"segment": "psm_1"}, {"segment": 3}, {"text": "x"}]) == ["psm_1"]


def test_last_steps_requests_come_from_the_last_dump():
    def dump(told):
        return {
            **HEAD,
            "text": "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[], "
            f"num_scheduled_tokens={{{told}}}, total_num_scheduled_tokens=9)",
        }

    rows = [
        dump("earlier-1: 4"),
        dump("0-9bf3: 3, cmpl-a: b: 6"),
        {**HEAD, "text": "Dumping scheduler stats"},
    ]
    assert requests_in_last_step(rows) == ("0-9bf3", "cmpl-a: b")
    assert requests_in_last_step([{**HEAD, "text": "nothing was dumped"}, {"pid": 7}]) == ()
