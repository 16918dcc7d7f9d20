"""One form of log lines: the program, a sentence, then key=value; no warning twice in a row."""

from __future__ import annotations

from oomguard.core import log
from oomguard.core.log import get_logger, write_events
from oomguard.supervisor.messages import event_line


def test_a_line_is_a_sentence_and_then_its_fields():
    for event, fields, line in [
        ("retrying", {}, "oomguard: Retrying"),
        ("Retrying.", {"rows": 36}, "oomguard: Retrying: rows=36"),
        ("retrying", {"rows": "64 -> 36"}, 'oomguard: Retrying: rows="64 -> 36"'),
        ("vLLM starts again", {"why": None}, "oomguard: vLLM starts again"),
        ("max_model_len is set", {"text": ""}, 'oomguard: max_model_len is set: text=""'),
        ("one\ntwo", {"text": 'a "b"\n'}, "oomguard: One\\ntwo: text='a \"b\"\\n'"),
        ("one", {"text": 'it\'s "b"'}, 'oomguard: One: text="it\'s \\"b\\""'),
        (
            "to run it",
            {"command": "vllm serve 'a b'", "rank": 0},
            "oomguard: To run it: rank=0 command=vllm serve 'a b'",
        ),
    ]:
        assert event_line(event, fields) == line


def test_a_warning_is_not_repeated_in_a_row():
    lines: list[str] = []
    write_events(lambda _level, event, fields: lines.append(event_line(event, fields)), 0)
    try:
        for event in ["a", "a", "b", "a"]:
            get_logger().warning(event, rows=1)
        for _ in range(2):
            get_logger().info("a step")
    finally:
        log._writer.clear()

    assert lines == [
        "oomguard: A: rows=1",
        "oomguard: B: rows=1",
        "oomguard: A: rows=1",
        "oomguard: A step",
        "oomguard: A step",
    ]
