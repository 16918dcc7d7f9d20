"""The table of attempts in each form of a run's report."""

from __future__ import annotations

import json
import re

import pytest

from oomguard.facts import GIB
from oomguard.incident import Attempt, Diagnosis, Effect, Patch
from oomguard.report.attempts import attempt_rows, reduced, report_text


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
    ran = Attempt(2, {"max_model_len": 26624}, (patch,), None, 0, "", 15, {"kv_cache_available_bytes": 4.5 * GIB})
    return [failed, ran]


def test_a_row_says_what_was_changed_and_predicted_beside_measured(attempts):
    _, first, second = attempt_rows(attempts)

    assert first == ("1", "nothing", "kv cache too small for max len", "", "12.3 s")
    assert second == (
        "2",
        "max_model_len 40960 -> 26624\n(reduces-capacity)",
        "ran",
        "KV cache 5.00 GiB -> 4.50 GiB",
        "15.0 s",
    )


def test_the_page_holds_the_attempts_as_a_table_and_what_was_reduced(attempts, diagnosis_of_all):
    page = report_text(".html", diagnosis_of_all, attempts)

    assert page.count("<thead>") == 1
    assert "<td>max_model_len 40960 → 26624\n(reduces-capacity)</td>" in page
    assert "Ran with reduced settings: max_model_len 40960 -&gt; 26624. Longer requests are refused." in page


def test_the_markdown_table_has_as_many_cells_in_every_row(attempts):
    rows = [line for line in report_text(".md", Diagnosis("a"), attempts).splitlines() if line.startswith("|")]

    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_the_json_holds_the_attempts(attempts, diagnosis_of_all):
    found = json.loads(report_text(".json", diagnosis_of_all, attempts))

    assert [attempt["kind"] for attempt in found["attempts"]] == ["kv_cache_too_small_for_max_len", None]
    assert found["reduced"] == reduced(attempts)


def test_nothing_is_said_of_reduced_settings_where_the_last_attempt_failed(attempts):
    assert reduced(attempts[::-1]) is None
