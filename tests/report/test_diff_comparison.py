"""A comparison as a person reads it, as JSON, and as Markdown: exact, masked, and with no markup of a log's own."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from oomguard.comparison import (
    ComparedStart,
    ComparedValue,
    Comparison,
    Explanation,
    Row,
)
from oomguard.core.facts import GIB
from oomguard.core.incident import EngineStart, Incident
from oomguard.core.redact import unmasked
from oomguard.report.diff import (
    print_difference,
    to_difference_dict,
    to_difference_json,
    to_difference_markdown,
)


@pytest.fixture
def comparison(start: EngineStart, incident: Incident) -> Comparison:
    rows = (
        Row("engine version", "version", ComparedValue("0.12.0"), ComparedValue("0.32.0")),
        Row(
            "gpu_memory_utilization",
            "default",
            ComparedValue(0.9, "default"),
            ComparedValue(0.92, "default"),
            "ratio",
        ),
        Row("max_num_seqs", "setting", ComparedValue(None, "left alone"), ComparedValue(64, "set")),
        Row("api_key", "setting", ComparedValue("hunter2", "set"), ComparedValue("hunter3", "set")),
        Row("seed", "setting", ComparedValue(7, "set"), ComparedValue(7, "set")),
        Row("weights", "budget", ComparedValue(15 * GIB), ComparedValue(15 * GIB), "bytes"),
        Row("KV cache", "budget", ComparedValue(5 * GIB), ComparedValue(3 * GIB), "bytes"),
        Row(
            "free",
            "budget",
            ComparedValue(GIB, "solved"),
            ComparedValue(None, "not printed"),
            "bytes",
        ),
        Row("KV cache tokens", "capacity", ComparedValue(40960), ComparedValue(24576), "tokens"),
    )
    return Comparison(
        ComparedStart("old.log", start),
        ComparedStart("/home/bob/new.log", start, incident, 2),
        "0.12.0 -> 0.32.0: the KV cache lost 2.0 GiB",
        rows,
        (Explanation("It takes 2.00 GiB.", -2.0 * GIB), Explanation("It is another one.")),
        ("free: not printed by NEW",),
    )


def drawn(comparison: Comparison, encoding: str = "utf-8", width: int = 100) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_difference(Console(file=file, width=width, color_system=None), comparison)
    file.flush()
    return raw.getvalue().decode(encoding)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_shows_old_new_and_difference(comparison):
    shown = lines(drawn(comparison))
    assert "engine version 0.12.0 0.32.0 changed" in shown
    assert "gpu_memory_utilization 0.9 (default) 0.92 (default) +0.02" in shown
    assert "max_num_seqs not set 64 added" in shown
    assert "weights 15.00 GiB 15.00 GiB same" in shown
    assert "KV cache 5.00 GiB 3.00 GiB -2.00 GiB" in shown
    assert "free ~1.00 GiB not printed" in shown
    assert "KV cache tokens 40,960 24,576 -16,384" in shown
    assert "~ follows from other figures" in shown


def test_settings_that_are_the_same_are_named_below_the_table(comparison):
    shown = lines(drawn(comparison))
    assert "The same in both: seed 7" in shown
    assert "seed 7 7 same" not in shown


def test_explanations_unknown_facts_and_first_fix_follow(comparison):
    text = " ".join(lines(drawn(comparison)))
    order = [
        "0.12.0 -> 0.32.0: the KV cache lost 2.0 GiB",
        "OLD old.log: start 1",
        "NEW ~/new.log: start 1 of 2",
        "What explains it",
        "1. It takes 2.00 GiB.",
        "2. It is another one.",
        "Unknown",
        "free: not printed by NEW",
        "NEW failed: ",
        "Why: It does not fit (max_model_len_too_large, confidence 0.90)",
        "First fix: max_model_len 40960 -> 26624",
        "--max-model-len 26624",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_secrets_and_home_folders_are_masked_in_every_form(comparison):
    for text in (drawn(comparison), to_difference_markdown(comparison)):
        assert "hunter" not in text
        assert "bob" not in text
    assert "hunter" not in to_difference_json(comparison)
    with unmasked():
        assert "hunter2" in drawn(comparison)


def test_a_terminal_without_unicode_gets_ascii(comparison):
    text = drawn(comparison, "ascii")
    assert text.isascii()
    assert "?" not in text


def test_json_holds_changes_the_same_and_what_one_log_leaves_out(comparison):
    answer = json.loads(to_difference_json(comparison))
    assert answer["schema"] == 1
    assert answer["differs"] is True
    assert [row["name"] for row in answer["changes"]] == [
        "engine version",
        "gpu_memory_utilization",
        "max_num_seqs",
        "api_key",
        "KV cache",
        "KV cache tokens",
    ]
    assert answer["changes"][4] == {
        "name": "KV cache",
        "kind": "budget",
        "unit": "bytes",
        "old": 5 * GIB,
        "new": 3 * GIB,
        "difference": -2 * GIB,
        "old_origin": "printed",
        "new_origin": "printed",
    }
    assert [row["name"] for row in answer["one_sided"]] == ["free"]
    assert answer["explanations"][0] == {"text": "It takes 2.00 GiB.", "kv_cache_bytes": -2 * GIB}


def test_json_has_both_starts_in_the_contracts_words(comparison):
    answer = to_difference_dict(comparison)
    assert answer["old"]["outcome"] == "worked"
    assert answer["old"]["incident"] is None
    assert answer["new"]["source"] == "/home/bob/new.log"
    assert answer["new"]["outcome"] == "kv_cache_too_small_for_max_len"
    assert answer["new"]["incident"]["plan"][0]["as_flag"] == "--max-model-len 26624"
    assert answer["new"]["budget"]["parts"][0] == {
        "name": "weights",
        "bytes": 15 * GIB,
        "source": "printed",
    }


def test_json_is_one_line_that_holds_no_figure_json_cannot(comparison, start):
    odd = Comparison(
        ComparedStart("a", start),
        ComparedStart("b", start),
        "x\ud800",
        (Row("m", "setting", ComparedValue(float("nan")), ComparedValue("\ud800")),),
        (),
        (),
    )
    text = to_difference_json(odd)
    assert "\n" not in text
    assert json.loads(text)["changes"][0]["old"] is None


def test_markdown_has_a_table_and_no_markup_of_the_logs_own(comparison, start):
    rows = (
        Row("model", "setting", ComparedValue("a|b"), ComparedValue("<img src=x> @someone #12")),
    )
    text = to_difference_markdown(
        Comparison(ComparedStart("a", start), ComparedStart("b", start), "h", rows, (), ())
    )
    assert "| model | a\\|b | &lt;img" in text
    assert "@someone" not in text
    assert "#12" not in text
    assert "| KV cache | 5.00 GiB | 3.00 GiB | -2.00 GiB |" in to_difference_markdown(comparison)


def test_a_logs_escapes_never_reach_the_terminal(start):
    rows = (Row("model", "setting", ComparedValue("\x1b[2Ja"), ComparedValue("\x1b]0;b\x07c")),)
    assert "\x1b" not in drawn(
        Comparison(ComparedStart("a\x1b[2J", start), ComparedStart("b", start), "h", rows, (), ())
    )


def test_no_line_is_wider_than_the_terminal(comparison):
    for width in [40, 80, 200]:
        assert max(
            len(line.rstrip()) for line in drawn(comparison, width=width).splitlines()
        ) <= min(width, 100), width


def test_secrets_that_differ_are_not_called_the_same(comparison):
    assert "api_key *** *** changed" in lines(drawn(comparison))
