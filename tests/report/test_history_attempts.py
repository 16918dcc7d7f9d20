"""The table of attempts in each form of a run's report."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from oomguard.core.facts import GIB
from oomguard.core.incident import Attempt, Diagnosis, Effect, Incident, Patch
from oomguard.report.history import attempt_rows, attempts_table, reduction_sentence, report_text


@pytest.fixture
def attempts(incident):
    patch = Patch(
        "max_model_len",
        40960,
        26624,
        Effect.REDUCES_CAPACITY,
        "fits",
        predicts={"kv_cache_available_bytes": 5.0 * GIB},
        tradeoff="Longer requests are refused.",
    )
    failed = Attempt(1, {}, (), incident, 1, "", 12.34)
    ran = Attempt(
        2,
        {"max_model_len": 26624},
        (patch,),
        None,
        0,
        "",
        15,
        {"kv_cache_available_bytes": 4.5 * GIB},
    )
    return [failed, ran]


def test_row_shows_changes_and_predicted_next_to_measured(attempts):
    _, first, second = attempt_rows(attempts)

    assert first == ("1", "nothing", "kv cache too small for max len", "", "12.3 s")
    assert second == (
        "2",
        "max_model_len 40960 -> 26624\n(reduces-capacity)",
        "ran",
        "KV cache 5.00 GiB -> 4.50 GiB",
        "15.0 s",
    )


def test_page_has_attempts_as_a_table_and_reductions(attempts, diagnosis_of_all):
    page = report_text(".html", diagnosis_of_all, attempts)

    assert page.count("<thead>") == 1
    assert "<td>max_model_len 40960 → 26624\n(reduces-capacity)</td>" in page
    assert (
        "Ran with reduced settings: max_model_len 40960 -&gt; 26624. Longer requests are refused."
        in page
    )


def test_the_markdown_table_has_as_many_cells_in_every_row(attempts):
    rows = [
        line
        for line in report_text(".md", Diagnosis("a"), attempts).splitlines()
        if line.startswith("|")
    ]

    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_the_json_holds_the_attempts(attempts, diagnosis_of_all):
    found = json.loads(report_text(".json", diagnosis_of_all, attempts))

    assert [attempt["kind"] for attempt in found["attempts"]] == [
        "kv_cache_too_small_for_max_len",
        None,
    ]
    assert found["reduced"] == reduction_sentence(attempts)


def test_failed_last_attempt_mentions_no_reduced_settings(attempts):
    assert reduction_sentence(attempts[::-1]) is None


def test_at_80_columns_no_column_of_the_table_is_cut():
    patch = Patch(
        "max_num_batched_tokens",
        8192,
        512,
        Effect.OUTPUT_PRESERVING,
        "",
        predicts={"kv_cache_available_bytes": 74020028.0},
    )
    failed = Incident("startup_free_memory_below_utilization", "")
    attempts = [
        Attempt(1, {}, (), failed, 1, "exit status 1", 33.2),
        Attempt(
            2,
            {},
            (patch,),
            None,
            0,
            "",
            1033.2,
            {"kv_cache_available_bytes": 64424509.0, "kv_cache_capacity_tokens": 123456.0},
        ),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(attempts_table(attempts))
    told = console.file.getvalue()
    assert "…" not in told
    assert all(
        text in told
        for text in ("time", "33.2 s", "1033.2 s", "max_num_batched_tokens", "(output-preserving)")
    )


def test_an_old_value_that_is_not_known_is_left_out():
    patch = Patch("max_model_len", None, 1792, Effect.REDUCES_CAPACITY, "")
    attempt = Attempt(2, {"max_model_len": 1792}, (patch,), None, 0)
    assert reduction_sentence([attempt]).startswith(
        "Ran with reduced settings: max_model_len 1792."
    )
    assert attempt_rows([attempt])[1][1] == "max_model_len -> 1792\n(reduces-capacity)"
