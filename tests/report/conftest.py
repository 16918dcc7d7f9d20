"""One incident with every field filled, and one healthy start: what the forms of a report are tried on."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import (
    Alternative,
    Budget,
    BudgetPart,
    Cause,
    Diagnosis,
    Effect,
    EngineStart,
    Evidence,
    Incident,
    Location,
    Patch,
    SettingInForce,
)
from oomguard.remedy.actions import with_actions
from oomguard.rules.rule_files import ActionTable


def gib(size: float) -> int:
    return round(size * GIB)


@pytest.fixture
def incident() -> Incident:
    line = Evidence("(Worker_TP0 pid=7) ValueError: 5.00 GiB KV cache is needed (3.25 GiB)", 61)
    planned = Incident(
        "kv_cache_too_small_for_max_len",
        "5.00 GiB KV cache is needed",
        "vllm",
        "0.32.0",
        "kv_cache_init",
        Location(61, 1000, "Worker_TP0 pid=7"),
        2,
        facts={
            name: Fact(name, value)
            for name, value in (
                ("kv_cache_needed_bytes", 5 * GIB),
                ("kv_cache_available_bytes", gib(3.25)),
                ("max_model_len_tokens", 40960),
                ("model", "org/m"),
            )
        },
        settings={"max_model_len": SettingInForce("max_model_len", 40960, True, "printed")},
        evidence=(line,),
        causes=(
            Cause(
                "max_model_len_too_large",
                "OG201",
                0.9,
                (line,),
                "One request needs more.",
                "It does not fit",
            ),
            Cause("unknown", "", 0.3, (), "It may be something else.", "Something else"),
        ),
        plan=(
            Patch(
                "max_model_len",
                40960,
                26624,
                Effect.REDUCES_CAPACITY,
                "26624 tokens fit",
                as_flag="--max-model-len 26624",
                as_kwarg="max_model_len=26624",
                tradeoff="Longer requests are refused.",
            ),
            Patch(
                "kv_cache_dtype",
                "auto",
                None,
                Effect.CHANGES_OUTPUTS,
                "model configuration: not printed",
            ),
        ),
        alternatives=(
            Alternative(
                "kv_cache_memory_bytes",
                5 * GIB,
                "a byte count you set",
                "--kv-cache-memory-bytes 5368709120",
            ),
        ),
        budget=Budget(24 * GIB, (BudgetPart("weights", 15 * GIB), BudgetPart("free", 6 * GIB))),
        unknown=("model configuration: not printed",),
        start=2,
        also_in=("Worker_TP1", "Worker_TP2"),
        wrappers=(Evidence("See root cause above", 120),),
    )
    return with_actions(planned, ActionTable())


@pytest.fixture
def start() -> EngineStart:
    return EngineStart(
        1,
        "vllm",
        "0.32.0",
        14,
        {
            name: Fact(name, value)
            for name, value in (
                ("model", "org/m"),
                ("dtype", "bfloat16"),
                ("kv_cache_capacity_tokens", 29040),
                ("max_model_len_tokens", 8192),
            )
        },
        {"max_model_len": SettingInForce("max_model_len", 8192, True, "printed")},
        True,
        Budget(
            24 * GIB,
            (
                BudgetPart("weights", 15 * GIB),
                BudgetPart("KV cache", 4 * GIB),
                BudgetPart("free", GIB),
            ),
        ),
    )


@pytest.fixture
def diagnosis_of_all(incident: Incident, start: EngineStart) -> Diagnosis:
    return Diagnosis("error.log", (incident,), ("a note",), (start,))
