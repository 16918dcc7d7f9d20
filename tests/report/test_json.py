"""The JSON contract, schema 1: keys may be added, never renamed or dropped."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import Fact
from oomguard.core.incident import (
    Alternative,
    Diagnosis,
    Effect,
    EngineStart,
    Incident,
    Patch,
    SettingInForce,
)
from oomguard.diagnosis import diagnose_lines
from oomguard.report.json import to_dict, to_json
from oomguard.scan.source import Line

LOG = [
    (
        "(APIServer pid=770) INFO 03-04 10:00:00 [utils.py:233] non-default args: {'model': 'org/m', 'max_model_len': "
        "40960}"
    ),
    (
        "(EngineCore_DP0 pid=771) ERROR 03-04 10:00:07 [core.py:708] ValueError: To serve at least one request with "
        "the model's max seq len (40960), (5.00 GiB KV cache is needed, which is larger than the available KV cache "
        "memory (3.25 GiB). Based on the available memory, the estimated maximum model length is 26624. Try increasing "
        "`gpu_memory_utilization`."
    ),
]
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 512.00 MiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 100.00 MiB is "
    "reserved by PyTorch but unallocated."
)

# Every key of the contract and the types of its values, as the design writes them.
NUMBER = (int, float)
TOP = {"schema": int, "source": str, "verdict": str, "incidents": list, "starts": list}
INCIDENT = {
    "kind": str,
    "is_oom": bool,
    "framework": str,
    "framework_version": (str, type(None)),
    "phase": str,
    "message": str,
    "location": dict,
    "repeated": int,
    "facts": dict,
    "causes": list,
    "plan": list,
    "budget": dict,
    "alternatives": list,
    "unknown": list,
    "start": int,
    "also_in": list,
    "wrappers": list,
    "certainty": (float, type(None)),
}
LOCATION = {"line": (int, type(None)), "byte": (int, type(None)), "process": (str, type(None))}
CAUSE = {"id": str, "rule": str, "confidence": NUMBER, "evidence": list, "explanation": str}
PATCH = {
    "setting": str,
    "from": object,
    "to": object,
    "effect": str,
    "as_flag": (str, type(None)),
    "as_kwarg": (str, type(None)),
    "as_env": (str, type(None)),
    "reason": str,
    "predicted_freed_bytes": (int, type(None)),
}
BUDGET = {"device_total_bytes": (int, type(None)), "parts": list}
PART = {"name": str, "bytes": int, "source": str}
ALTERNATIVE = {"setting": str, "to": object, "why_not": str}


def diagnosis(*log: str, source: str = "error.log") -> Diagnosis:
    return diagnose_lines([Line(number, 0, text) for number, text in enumerate(log, 1)], source)


def parsed(*log: str, **kwargs) -> dict:
    return json.loads(to_json(diagnosis(*log, **kwargs)))


def keeps(value: dict, contract: dict) -> None:
    assert set(contract) <= set(value)
    for key, kind in contract.items():
        assert isinstance(value[key], kind), key


def test_every_key_of_the_contract_is_there_with_its_type():
    for log in [LOG, [CUDA], ["all is well"], []]:
        result = parsed(*log)

        keeps(result, TOP)
        for incident in result["incidents"]:
            keeps(incident, INCIDENT)
            keeps(incident["location"], LOCATION)
            keeps(incident["budget"], BUDGET)
            for rows, contract in (
                ("causes", CAUSE),
                ("plan", PATCH),
                ("alternatives", ALTERNATIVE),
            ):
                for row in incident[rows]:
                    keeps(row, contract)
            for part in incident["budget"]["parts"]:
                keeps(part, PART)


def test_the_contract_is_exercised_by_these_logs():
    kv, cuda = parsed(*LOG)["incidents"][0], parsed(CUDA)["incidents"][0]

    assert kv["causes"]
    assert kv["plan"]
    assert cuda["budget"]["parts"]


def test_the_diagnosis_is_one_line():
    assert "\n" not in to_json(diagnosis(*LOG))


def test_the_values_are_those_of_the_log():
    result = parsed(*LOG)
    (incident,) = result["incidents"]

    assert (result["schema"], result["source"], result["verdict"]) == (1, "error.log", "oom")
    assert (incident["kind"], incident["is_oom"]) == ("kv_cache_too_small_for_max_len", True)
    assert incident["location"] == {"line": 2, "byte": 0, "process": "EngineCore_DP0 pid=771"}
    assert incident["facts"]["max_model_len_tokens"] == 40960
    assert incident["facts"]["kv_cache_needed_bytes"] == 5 * 2**30
    assert incident["causes"][0]["id"] == "max_model_len_too_large"
    assert incident["causes"][0]["evidence"][0].startswith("line 2: ")


def test_a_patch_that_is_not_solved_has_no_value():
    (incident,) = parsed(*LOG)["incidents"]

    unsolved = [patch for patch in incident["plan"] if patch["to"] is None]
    assert unsolved
    assert all(patch["reason"] and patch["applicable"] is False for patch in unsolved)


def test_a_healthy_log_has_no_incident():
    expected = {
        "schema": 1,
        "source": "error.log",
        "verdict": "no_oom",
        "incidents": [],
        "starts": [],
    }
    assert parsed("all is well") == expected


def test_the_source_is_exactly_as_it_was_given():
    for source in ["a b.log", "-", "", "日本.log", "api_key=abcdefgh.log", 'quote".log']:
        assert parsed(CUDA, source=source)["source"] == source, source


def test_facts_are_in_order_of_their_names():
    facts = parsed(*LOG)["incidents"][0]["facts"]

    assert list(facts) == sorted(facts)


def test_an_alternative_is_written():
    incident = Incident(
        "cuda_oom",
        "boom",
        alternatives=(Alternative("kv_cache_memory_bytes", 5, "a byte count you set", "--x 5"),),
    )

    (alternative,) = to_dict(Diagnosis("", (incident,)))["incidents"][0]["alternatives"]

    assert alternative["setting"] == "kv_cache_memory_bytes"
    assert (alternative["to"], alternative["why_not"]) == (5, "a byte count you set")


def test_notes_are_written_where_there_are_any():
    assert to_dict(Diagnosis("", notes=("left out",)))["notes"] == ["left out"]


def test_a_secret_in_a_message_or_a_fact_is_hidden():
    incident = replace(
        diagnosis(CUDA).incidents[0],
        message="boom --api-key=abcdefgh",
        facts={"model": Fact("model", "hf_" + "a" * 20)},
    )

    text = to_json(Diagnosis("", (incident,)))

    assert "abcdefgh" not in text
    assert "a" * 20 not in text


def test_text_of_the_log_cannot_break_out_of_the_json():
    line = f'{CUDA} "}}]}} \u2028 \\" end'

    assert parsed(line)["incidents"][0]["causes"][0]["evidence"][0].endswith('"}]} \u2028 \\" end')


def test_new_incident_keys_hold_start_ranks_and_parents(diagnosis_of_all):
    (incident,) = json.loads(to_json(diagnosis_of_all))["incidents"]

    assert incident["start"] == 2
    assert incident["also_in"] == ["Worker_TP1", "Worker_TP2"]
    assert incident["wrappers"] == ["line 120: See root cause above"]


VALUES = st.one_of(
    st.text(st.characters(), max_size=40),  # lone surrogates among them
    st.floats(),
    st.integers(),
    st.sampled_from([10**400, -(10**5000), float("nan"), float("-inf"), 2**64]),
    st.booleans(),
)


def refuse(constant: str) -> None:
    raise ValueError(constant)


@settings(deadline=None, max_examples=100)
@given(
    text=st.text(st.characters()),
    value=VALUES,
    notes=st.lists(st.text(st.characters()), max_size=2),
)
def test_the_output_is_valid_json_whatever_the_log_holds(text, value, notes):
    patch = Patch(
        "dtype", value, value, Effect.CHANGES_OUTPUTS, text, predicts={"peak_bytes": value}
    )
    incident = Incident(
        text, text, facts={"model": Fact("model", value)}, plan=(patch,), unknown=(text,)
    )
    in_force = {text: SettingInForce(text, value, None, "given")}

    line = to_json(Diagnosis(text, (incident,), tuple(notes), (EngineStart(1, settings=in_force),)))

    assert json.loads(line.encode("utf-8"), parse_constant=refuse)["source"] == text
    assert len(line.splitlines()) == 1


def test_a_number_that_json_cannot_hold_is_null():
    for value in [float("nan"), float("inf"), 10**400, -(10**5000)]:
        incident = Incident("cuda_oom", "boom", facts={"tried_bytes": Fact("tried_bytes", value)})

        assert to_dict(Diagnosis("", (incident,)))["incidents"][0]["facts"] == {
            "tried_bytes": None
        }, value


def test_an_underflowed_size_keeps_every_digit():
    incident = Incident(
        "cuda_oom", "boom", facts={"tried_bytes": Fact("tried_bytes", 2**64 - 2**20)}
    )

    assert (
        json.loads(to_json(Diagnosis("", (incident,))))["incidents"][0]["facts"]["tried_bytes"]
        == 2**64 - 2**20
    )


def test_a_source_that_is_no_text_can_be_read_back():
    assert json.loads(to_json(Diagnosis("\udcff.log")))["source"] == "\udcff.log"
