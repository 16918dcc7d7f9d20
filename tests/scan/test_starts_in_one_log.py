"""Engines that start one after another in one log, as a loop over scripts prints them: each failure is of its own start."""

from __future__ import annotations

from typing import Final

import pytest

from oomguard.core.incident import Diagnosis
from oomguard.diagnosis import default_rules
from oomguard.scan.scan import scan
from oomguard.scan.source import Line

ECHO: Final = "{front}INFO 11-25 09:14:27 [utils.py:233] non-default args: {{'model': '{model}', 'max_model_len': {length}}}"
LENGTH: Final = "{front}INFO 11-25 09:14:31 [model.py:1510] Using max model len {length}"
BEGINS: Final = "{core}INFO 11-25 09:14:40 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='{model}', max_seq_len={length}"
MEASURED: Final = (
    "{core}INFO 11-25 09:14:50 [gpu_worker.py:298] Available KV cache memory: 0.50 GiB"
)
FAILS: Final = (
    "{core}ERROR 11-25 09:14:52 [core.py:708] ValueError: To serve at least one request with the models's max seq len ({length}),"
    " (4.00 GiB KV cache is needed, which is larger than the available KV cache memory (0.50 GiB). Based on the available memory, the"
    " estimated maximum model length is 1792. Try increasing `gpu_memory_utilization`"
)
START: Final = (ECHO, LENGTH, BEGINS, MEASURED)
CORES: Final = {
    "new": ("(EngineCore_DP0 pid=701) ", "(EngineCore_DP0 pid=802) "),
    "same": ("(EngineCore pid=7) ",) * 2,
}


def found(*starts: tuple[tuple[str, ...], str, int, str]) -> Diagnosis:
    """Diagnose a log of several starts, each of: its lines, its model, its length, the name of its core."""
    lines = [
        line.format(
            model=model,
            length=length,
            core=core,
            front="(APIServer pid=1) " if core == CORES["same"][0] else "",
        )
        for said, model, length, core in starts
        for line in said
    ]
    return scan([Line(number, 0, text) for number, text in enumerate(lines, 1)], default_rules())


def told(diagnosis: Diagnosis) -> list[tuple[int | None, object, object, object]]:
    """Return of each incident its start, its model as the settings and as the facts have it, and the length that was set."""
    return [
        (
            i.start,
            i.settings["model"].value,
            i.facts["model"].value,
            i.settings["max_model_len"].value,
        )
        for i in diagnosis.incidents
    ]


@pytest.mark.parametrize("cores", CORES)
def test_each_failure_has_the_model_of_its_own_start(cores: str):
    one, two = CORES[cores]
    diagnosis = found(((*START, FAILS), "org/A", 8192, one), ((*START, FAILS), "org/B", 4096, two))

    assert told(diagnosis) == [(1, "org/A", "org/A", 8192), (2, "org/B", "org/B", 4096)]
    assert [start.line for start in diagnosis.starts] == [1, 6]


@pytest.mark.parametrize("cores", CORES)
def test_failure_after_a_good_start_belongs_to_the_failed_start(cores: str):
    one, two = CORES[cores]
    diagnosis = found((START, "org/A", 8192, one), ((*START, FAILS), "org/B", 4096, two))

    assert told(diagnosis) == [(2, "org/B", "org/B", 4096)]
    assert [start.settings["model"].value for start in diagnosis.starts] == ["org/A", "org/B"]


def test_a_failure_at_once_takes_nothing_of_the_list_before_it():
    one, two = CORES["same"]
    diagnosis = found(
        ((ECHO, BEGINS, FAILS), "org/A", 8192, one), ((ECHO, BEGINS, FAILS), "org/B", 4096, two)
    )

    assert told(diagnosis) == [(1, "org/A", "org/A", 8192), (2, "org/B", "org/B", 4096)]


def test_repeated_settings_belong_to_the_following_start():
    one, two = CORES["new"]
    diagnosis = found((START, "org/A", 8192, one), ((*START, FAILS), "org/A", 8192, two))

    assert told(diagnosis) == [(2, "org/A", "org/A", 8192)]
    assert diagnosis.incidents[0].settings_complete


def test_earlier_starts_settings_end_with_a_new_list():
    core = CORES["new"][0]
    shared = ECHO.replace("'max_model_len'", "'gpu_memory_utilization': 0.5, 'max_model_len'")
    diagnosis = found(((shared,), "org/A", 8192, core), ((*START, FAILS), "org/B", 4096, core))

    assert "gpu_memory_utilization" not in diagnosis.incidents[0].settings


def test_ranks_of_one_job_with_equal_settings_are_one_start():
    lines = ((ECHO, LENGTH, BEGINS), "org/A", 8192, "(EngineCore_DP0 pid=701) ")
    beside = ((*START, FAILS), "org/A", 8192, "(EngineCore_DP1 pid=702) ")

    assert told(found(lines, beside)) == [(1, "org/A", "org/A", 8192)]


def test_container_starting_another_model_is_another_start():
    core = CORES["same"][0]
    diagnosis = found(
        ((BEGINS, MEASURED), "org/A", 8192, core), ((BEGINS, MEASURED, FAILS), "org/B", 4096, core)
    )

    assert [(i.start, i.facts["model"].value) for i in diagnosis.incidents] == [(2, "org/B")]
