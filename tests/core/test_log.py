"""One form of log lines: the program, a sentence, then key=value; no warning twice in a row."""

from __future__ import annotations

import logging

from oomguard.core.log import get_logger
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


def test_a_warning_is_not_repeated_in_a_row(caplog):
    with caplog.at_level(logging.INFO, "oomguard"):
        for event in ["a", "a", "b", "a"]:
            get_logger().warning(event, rows=1)
        for _ in range(2):
            get_logger().info("a step")

    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "oomguard: A: rows=1",
        "oomguard: B: rows=1",
        "oomguard: A: rows=1",
        "oomguard: A step",
        "oomguard: A step",
    ]
