"""A fix that cannot be what its author means is told at load, with file, key and line, and the nearest name that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomguard.core.errors import RuleError
from oomguard.remedy import from_log
from oomguard.rules import rule_files as fix_module
from oomguard.rules.rule_files import load_rules

RULE = """\
schema = 1
code = "XX101"
cause = "lora"
title = "Adapters take the memory"
since = "0.1.0"
status = "stable"
kinds = ["cuda_oom"]
when = ["tried_bytes > 1.0"]
confidence = [ {{ base = 0.5 }} ]
[explain]
summary = "{{tried_bytes:GiB}} was asked for."
why = "Adapters are loaded whole."
confirm = "Count them."
[[fix]]
setting = "{setting}"
effect = "{effect}"
{way}
[[reference]]
note = "a note"
[[test]]
kind = "cuda_oom"
facts = {{ tried_bytes = 2 }}
"""


def load(folder: Path, setting: str, way: str, effect: str) -> None:
    (folder / "mine.toml").write_text(RULE.format(setting=setting, way=way, effect=effect))
    load_rules([folder])


@pytest.mark.parametrize(
    ("setting", "way", "effect", "key", "said", "hint"),
    [
        (
            "batch_sise",
            'value = "1.0"',
            "output-preserving",
            "setting",
            "unknown setting 'batch_sise'",
            "'batch_size'",
        ),
        (
            "max-model-len",
            'value = "1.0"',
            "reduces-capacity",
            "setting",
            "unknown setting",
            "'max_model_len'",
        ),
        (
            "max_model_len",
            "solve = 'printed_estimat'",
            "reduces-capacity",
            "solve",
            "not a known",
            "'printed_estimate'",
        ),
        (
            "max_model_len",
            "value = \"'8k'\"",
            "reduces-capacity",
            "value",
            "is int, but the value is a text",
            "a number",
        ),
        (
            "max_model_len",
            'value = "True"',
            "reduces-capacity",
            "value",
            "is int, but the value is a bool",
            "a number",
        ),
        (
            "enforce_eager",
            'value = "1.0"',
            "output-preserving",
            "value",
            "is bool, but the value is a number",
            "True or False",
        ),
        (
            "dtype",
            'value = "tried_bytes"',
            "changes-outputs",
            "value",
            "is str, but the value is a number",
            "in single quotes",
        ),
        (
            "max_num_seqs",
            'value = "0.0"',
            "reduces-capacity",
            "value",
            "max_num_seqs is never 0",
            "above zero",
        ),
        (
            "max_num_seqs",
            'value = "-8.0"',
            "reduces-capacity",
            "value",
            "max_num_seqs is never -8",
            "above zero",
        ),
        (
            "max_num_seqs",
            'value = "1.5"',
            "reduces-capacity",
            "value",
            "max_num_seqs is never 1.5",
            "above zero",
        ),
        (
            "max_num_seqs",
            'value = "8.0"',
            "changes-outputs",
            "effect",
            "max_num_seqs = 8.0 is never changes-outputs",
            "it is reduces-capacity",
        ),
        (
            "kv_cache_dtype",
            "value = \"'fp8'\"",
            "output-preserving",
            "effect",
            "is never output-preserving",
            "it is changes-outputs",
        ),
        (
            "enable_lora",
            'value = "False"',
            "output-preserving",
            "effect",
            "enable_lora = False is never",
            "it is changes-outputs",
        ),
        (
            "dtype",
            'lever = "l"\nmissing = "m"',
            "reduces-capacity",
            "effect",
            "is never reduces-capacity",
            "it is changes-outputs",
        ),
    ],
)
def test_error_in_a_fix_names_its_key_and_the_likely_one(
    tmp_path, setting, way, effect, key, said, hint
):
    with pytest.raises(RuleError) as caught:
        load(tmp_path, setting, way, effect)

    error = caught.value
    assert (error.path, error.key) == (str(tmp_path / "mine.toml"), f"fix[0].{key}")
    assert error.line == {"setting": 15, "effect": 16}.get(key, 17)
    assert said in str(error)
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("setting", "way", "effect"),
    [
        ("max_model_len", 'value = "-1.0"', "reduces-capacity"),
        ("gpu_memory_utilization", 'value = "0.5"', "reduces-capacity"),
        ("gpu_memory_utilization", 'value = "0.95"', "output-preserving"),
        ("max_num_seqs", 'value = "tried_bytes / 2.0"', "reduces-capacity"),
        ("enforce_eager", 'value = "tried_bytes > 1.0"', "output-preserving"),
        ("dtype", "value = \"'bfloat16'\"", "changes-outputs"),
        ("cache_implementation", "value = \"'offloaded'\"", "output-preserving"),
        ("max_model_len", "solve = 'printed_estimate'", "reduces-capacity"),
        ("enable_lora", 'lever = "l"\nmissing = "m"', "output-preserving"),
    ],
)
def test_a_fix_that_may_hold_is_accepted(tmp_path, setting, way, effect):
    load(tmp_path, setting, way, effect)


def test_the_known_solvers_are_those_of_the_planner():
    assert set(fix_module.SOLVERS) == set(from_log.SOLVERS)
