"""Records made fit to show: every text in them, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomguard.core.facts import Fact
from oomguard.core.incident import Cause, Diagnosis, Evidence, Incident, SettingInForce
from oomguard.core.presentable import drawn, masked, plain, well_formed


@pytest.fixture
def incident() -> Incident:
    line = Evidence("ValueError: 5.00 GiB KV cache is needed (3.25 GiB)", 61)
    return Incident(
        "kv_cache_too_small_for_max_len",
        "5.00 GiB KV cache is needed",
        "vllm",
        facts={"model": Fact("model", "org/m")},
        settings={"max_model_len": SettingInForce("max_model_len", 40960, True, "printed")},
        evidence=(line,),
        causes=(Cause("unknown", "", 0.3, (line,), "It may be something else.", "Unknown"),),
    )


def test_a_record_without_secrets_comes_back_equal(incident):
    diagnosis = Diagnosis("error.log", incidents=(incident,))
    assert masked(diagnosis) == diagnosis
    assert drawn(diagnosis) == diagnosis


def test_the_record_itself_is_not_changed(incident):
    laden = replace(incident, message="api_key=abc")

    assert masked(laden).message == "api_key=***"
    assert laden.message == "api_key=abc"


def test_setting_is_masked_by_its_name_whatever_its_value(incident):
    laden = replace(
        incident, settings={"api_key": SettingInForce("api_key", "abc", True, "printed")}
    )

    assert masked(laden).settings["api_key"].value == "***"


def test_a_fact_that_is_no_text_keeps_its_value_and_type():
    for value in [8192, 0.9, True, 2**64]:
        assert masked(Fact("x", value)) == Fact("x", value), value
        assert type(masked(Fact("x", value)).value) is type(value), value


def test_plain_text_keeps_its_lines_and_its_script():
    for text, shown in [
        ("a\x1b[31mb\nc\x07", "ab\nc"),
        ("a\ud800b", "a\ufffdb"),
        ("日本 😀", "日本 😀"),
    ]:
        assert plain(text) == shown, (text, shown)


def test_a_well_formed_text_can_be_encoded():
    assert well_formed("a\udcff\U0001f600").encode("utf-8") == "a\ufffd\U0001f600".encode()
