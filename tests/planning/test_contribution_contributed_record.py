"""Records that strangers contribute: read where they are numbers and an engine's words, refused where they name anybody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomguard.core.errors import InputError
from oomguard.planning.contribution import contribution, read_record

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORD = contribution(
    str(EXAMPLES / "logs" / "vllm_0.12.0_start_worked.log"),
    str(EXAMPLES / "models" / "llama-3.1-8b.json"),
)


def changed(**fields):
    return json.dumps({**RECORD, **fields})


def test_what_report_writes_is_read():
    assert read_record(json.dumps(RECORD), "starts.jsonl, line 1") == RECORD


def test_what_is_no_start_of_nobody_is_refused_with_its_place(subtests):
    for line, said in [
        ("{", "no JSON"),
        ("[]", "not a record of a start"),
        (changed(host="gpu7.example.org"), "host missing or unknown"),
        (changed(schema=2), "schema is 2"),
        (changed(vllm_version="mine"), "vllm_version is not a version"),
        (changed(gpu="/dev/nvidia0 of mary"), "gpu is not the name of a GPU"),
        (changed(gpu_total_gib=-1), "gpu_total_gib is -1"),
        (changed(gpu_total_gib=True), "gpu_total_gib is True"),
        (
            changed(config={**RECORD["config"], "_name_or_path": "/home/mary/model"}),
            "config has texts",
        ),
        (
            changed(config={**RECORD["config"], "token": "hf_abcdefghijklmnop"}),
            "config has texts",
        ),
        (changed(flags=["--api-key", "secret"]), "not a setting of the estimator"),
        (changed(flags=["--dtype", "/home/mary/dtype"]), "may be private"),
        (
            changed(flags=["--speculative-config", '{"model": "/home/mary/draft"}']),
            "may be private",
        ),
        (changed(flags="--dtype half"), "not a list of words"),
        (changed(printed={"weights_gib": 1e9}), "printed.weights_gib is 1000000000.0"),
        (changed(printed={"weights_gib": -3}), "printed.weights_gib is -3"),
        (changed(printed={"weights_gib": float("nan")}), "printed.weights_gib is nan"),
        (
            changed(printed={"weights_gib": 20, "available_kv_gib": 20}),
            "40.00 GiB on a device of 23.64 GiB",
        ),
        (changed(printed={"who": 1}), "numbers that no start prints"),
    ]:
        with subtests.test(line=line, said=said):
            with pytest.raises(InputError, match=r"starts\.jsonl, line 3") as refused:
                read_record(line, "starts.jsonl, line 3")
            assert said in str(refused.value)
            assert "mary" not in str(refused.value)
