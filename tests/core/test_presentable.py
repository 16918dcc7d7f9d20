"""Records made fit to show: every text in them, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from oomguard.core.facts import Fact
from oomguard.core.incident import SettingInForce
from oomguard.core.presentable import drawn, masked, plain, well_formed


def test_a_record_without_secrets_comes_back_equal(diagnosis_of_all):
    assert masked(diagnosis_of_all) == diagnosis_of_all
    assert drawn(diagnosis_of_all) == diagnosis_of_all


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
