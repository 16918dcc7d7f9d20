"""Messages of TensorRT-LLM and of lmdeploy's C++ engine: each failure is found with an accepted kind, nothing else is taken for one.

benchmarks/engine_messages.py has those of SGLang, transformers and lmdeploy too, from wheels that it downloads.
"""

from __future__ import annotations

import tomllib

import pytest

from engine_messages import DATA, LEVELS, as_log
from oomguard.diagnosis import diagnose
from support.vllm_texts import Text

ENGINES = tomllib.loads(DATA.read_text(encoding="utf-8"))
WHOLE = {name: rows for name, rows in ENGINES.items() if "versions" not in rows}


def test_every_failure_is_found_with_an_accepted_kind():
    failures = [(engine, *row) for engine, rows in WHOLE.items() for row in rows["failures"]]
    missed = [
        f"{engine}: {log}"
        for engine, log, *accepted in failures
        if not {one.kind for one in diagnose(log).incidents} & set(accepted)
    ]

    assert not missed, "\n".join(missed)


def test_nothing_else_is_taken_for_a_failure():
    others = [(engine, log) for engine, rows in WHOLE.items() for log in rows["others"]]
    alarms = [f"{engine}: {log}" for engine, log in others if diagnose(log).verdict == "oom"]

    assert not alarms, "\n".join(alarms)


@pytest.mark.parametrize(
    ("form", "log"),
    [
        ("print", "needs 7 blocks"),
        ("WARNING", "[2026-01-01 00:00:00 TP0] needs 7 blocks"),
        (
            "ValueError",
            'Traceback (most recent call last):\n  File "/site-packages/sglang/pool.py", line 100, in run\n    self.step()\nValueError: needs 7 blocks',
        ),
    ],
)
def test_a_text_stands_as_its_engine_prints_it(form, log):
    text = Text("sglang/pool.py", ("needs ", ("7", "1.25"), " blocks"), "needs \0 blocks")

    assert (form in LEVELS) == (form == "WARNING")
    assert as_log("sglang", form, text) == log
