"""The registry of facts, and sizes read and written without claiming more digits than were printed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import SettingError
from oomguard.core.facts import (
    GIB,
    MIB,
    REGISTRY,
    Fact,
    coerce,
    format_gib,
    format_rounded,
    parse_size,
)
from oomguard.core.text import render
from support.each import each


def facts(**values) -> dict[str, Fact]:
    return {
        name: value if isinstance(value, Fact) else Fact(name, value)
        for name, value in values.items()
    }


@each("spec", REGISTRY.values())
def test_a_fact_s_unit_is_the_end_of_its_name(spec):
    expected = {"bytes": "int", "tokens": "int", "ratio": "float", "set": "bool"}.get(
        spec.name.rpartition("_")[2]
    )

    assert expected is None or spec.type == expected or spec.name == "max_new_tokens"
    assert spec.meaning


@each(
    ("text", "size", "slack"),
    [
        ("8GiB", 8 * GIB, 0.5 * GIB),
        ("24.56 MiB", round(24.56 * MIB), 0.005 * MIB),
        ("1000000", 1_000_000, 0),
        ("12 bytes", 12, 0),
        ("-0.5 GiB", -GIB // 2, 0.05 * GIB),
        (".5 GiB", GIB // 2, 0.05 * GIB),
        ("2 GB", 2 * GIB, 0.5 * GIB),
        ("1,024 KiB", MIB, 512),
        ("0.0 GiB", 0, 0.05 * GIB),
        (" 3 gib ", 3 * GIB, 0.5 * GIB),
    ],
)
def test_a_size_is_read_with_half_of_its_last_digit(text, size, slack):
    read = parse_size(text)

    assert read.bytes == size
    assert read.slack_bytes == pytest.approx(slack)


@each(
    "text",
    [
        "",
        "GiB",
        "8 apples",
        "1.2.3 GiB",
        "five",
        "8 GiB of memory",
        "5. GiB",
        "1e5",
        "9" * 400,
        "nan",
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SettingError, match="is not a size"):
        parse_size(text)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_a_size_or_is_refused(text):
    try:
        size = parse_size(text)
    except SettingError:
        return
    assert isinstance(size.bytes, int)
    assert size.slack_bytes >= 0


@settings(deadline=None)
@given(st.integers(-(2**50), 2**50), st.integers(0, 4))
def test_the_true_size_is_within_the_slack_of_the_printed_one(size, digits):
    printed = parse_size(f"{size / GIB:.{digits}f} GiB")

    assert abs(printed.bytes - size) <= printed.slack_bytes + 1


@each(
    ("size", "text"),
    [
        (5 * GIB, "5.00 GiB"),
        (round(-3.79 * GIB), "-3.79 GiB"),
        (0, "0.00 GiB"),
        (100 * MIB, "100.00 MiB"),
        (1536, "1536 bytes"),
        (-1, "-1 bytes"),
    ],
)
def test_a_size_is_written_with_a_figure_that_is_not_zero(size, text):
    assert format_gib(size) == text


@settings(deadline=None)
@given(st.integers(-(2**50), 2**50).filter(bool))
def test_a_written_size_is_never_zero_and_is_near_the_size(size):
    read = parse_size(format_gib(size))

    assert read.bytes != 0
    assert abs(read.bytes - size) <= read.slack_bytes + 1


@each(
    ("size", "slack", "text"),
    [
        (0, 0.05 * GIB, "less than 0.05 GiB"),
        (0.1 * GIB, 0.05 * GIB, "about 0.1 GiB"),
        (-0.1 * GIB, 0.05 * GIB, "about -0.1 GiB"),
        (5 * GIB, 0.005 * GIB, "5.00 GiB"),
        (0, 0, "0.00 GiB"),
    ],
)
def test_a_rounded_size_claims_no_more_digits_than_were_printed(size, slack, text):
    assert format_rounded(size, slack) == text


def test_small_rounded_zero_is_shown_in_a_readable_unit():
    assert "e-" not in format_rounded(0, 0.005 * MIB)


@each(
    ("name", "text", "value"),
    [
        ("tried_bytes", "2.00 GiB", 2 * GIB),
        ("max_model_len_tokens", "40960", 40960),
        ("kv_cache_capacity_tokens", "2,013,440", 2013440),
        ("gpu_memory_utilization_ratio", "0.92", 0.92),
        ("prefix_caching", "True", True),
        ("prefix_caching", "no", False),
        ("model", "org/name", "org/name"),
    ],
)
def test_a_text_becomes_a_fact_of_its_type(name, text, value):
    fact = coerce(name, text)

    assert (fact.name, fact.value) == (name, value)
    assert type(fact.value) is type(value)


def test_a_ratio_keeps_its_rounding():
    assert coerce("gpu_memory_utilization_ratio", "0.92").slack == pytest.approx(0.005)


@each(
    ("name", "text"),
    [
        ("tried_bytes", "much"),
        ("max_model_len_tokens", "many"),
        ("max_model_len_tokens", "1.5"),
        ("max_model_len_tokens", "9" * 5000),
        ("gpu_memory_utilization_ratio", "nan"),
        ("gpu_memory_utilization_ratio", "1e999"),
        ("prefix_caching", "perhaps"),
        ("shoe_size", "42"),
    ],
)
def test_a_text_of_another_type_is_refused(name, text):
    with pytest.raises(SettingError):
        coerce(name, text)


def test_a_count_beyond_any_double_cannot_stop_a_diagnosis():
    from oomguard.diagnosis import diagnose_lines
    from oomguard.scan.source import Line

    text = (
        f"To serve at least one request with the model's max seq len ({'9' * 400}), (5.00 GiB KV cache is needed, "
        f"which is larger "
        "than the available KV cache memory (3.25 GiB)."
    )

    assert diagnose_lines([Line(1, 0, text)]).verdict == "oom"


@settings(deadline=None)
@given(st.sampled_from(sorted(REGISTRY)), st.text(max_size=20))
def test_any_text_is_a_fact_or_is_refused(name, text):
    try:
        fact = coerce(name, text)
    except SettingError:
        return
    assert type(fact.value).__name__ == REGISTRY[name].type


@each(
    ("template", "text"),
    [
        ("{tried_bytes}", "2147483648"),
        ("{tried_bytes:GiB}", "2.00 GiB"),
        ("{gpu_memory_utilization_ratio}", "0.92"),
        ("{gpu_memory_utilization_ratio:percent}", "92.0%"),
        ("{exit_signal:signal}", "SIGILL"),
        ("{max_num_seqs:signal}", "signal 256"),
        ("{prefix_caching}", "True"),
        ("{model}", "org/name"),
        ("{device_total_bytes:GiB}", ""),
        ("a  {tried_bytes:GiB}\n b", "a 2.00 GiB b"),
        ("no placeholder", "no placeholder"),
    ],
)
def test_a_template_is_filled(template, text):
    known = facts(
        tried_bytes=2 * GIB,
        gpu_memory_utilization_ratio=0.92,
        prefix_caching=True,
        model="org/name",
        exit_signal=4,
        max_num_seqs=256,
    )

    assert render(template, known) == text


def test_a_printed_zero_is_filled_in_as_less_than_its_last_digit():
    known = facts(kv_cache_available_bytes=Fact("kv_cache_available_bytes", 0, slack=0.05 * GIB))

    assert render("{kv_cache_available_bytes:GiB}", known) == "less than 0.05 GiB"


@each(
    "template",
    ["{model.__class__}", "{model!r}", "{model[0]}", "{model:>99}", "{}", "{ model }", "{model"],
)
def test_a_template_reaches_nothing_but_facts(template):
    assert render(template, facts(model="org/name")) == template


def test_the_text_of_a_fact_is_not_filled_again():
    assert render("{model}", facts(model="{tried_bytes}", tried_bytes=5)) == "{tried_bytes}"


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_template_is_filled(template):
    assert isinstance(render(template, facts(tried_bytes=5, model="m")), str)
