"""What doctor found, shown: valid JSON whatever a variable holds, no secret, no terminal escape."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oomguard.cli.doctor import print_checks, to_json
from oomguard.core.records import Check


def shown(*checks: Check, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_checks(Console(file=file, width=40), checks)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_each_check_is_a_marked_line_with_advice_below():
    text = shown(
        Check("a", "ok", "all is well"), Check("b", "problem", "no plugin", "pip install .")
    )

    assert text.splitlines() == [
        "ok       all is well",
        "problem  no plugin",
        "         do: pip install .",
        "2 checks: 1 ok, 0 unknown, 1 problem",
    ]


def test_a_line_is_never_wrapped_so_that_it_can_be_copied():
    assert "         do: " + "x" * 200 in shown(Check("a", "problem", "t", "x" * 200)).splitlines()


def test_secrets_are_masked_in_both_forms():
    check = Check(
        "a", "ok", "OOMGUARD_API_KEY=abcdef123456", "export HF_TOKEN=hf_abcdefghijklmnopqrstuv"
    )
    for text in (shown(check), to_json([check])):
        assert "abcdef123456" not in text
        assert "hf_abcdefghijklmnopqrstuv" not in text


def test_escapes_of_a_variable_do_not_reach_the_terminal():
    assert "\x1b" not in shown(Check("a", "ok", "NAME=\x1b[31mred\x1b]0;title\x07"))


def test_markup_of_a_variable_is_text():
    assert "[bold]x[/bold]" in shown(Check("a", "ok", "[bold]x[/bold]"))


def test_what_the_terminal_cannot_write_is_replaced():
    assert "caf?" in shown(Check("a", "ok", "café"), encoding="ascii")


@given(st.text(), st.text())
def test_the_json_is_valid_whatever_is_in_it(text, advice):
    found = json.loads(to_json([Check("a", "unknown", text, advice)]))

    assert found["schema"] == 1
    assert [set(check) for check in found["checks"]] == [{"id", "status", "text", "advice"}]


def test_bytes_that_are_no_text_do_not_break_either_form():
    check = Check("a", "ok", "NAME=\udcff")

    assert json.loads(to_json([check]))["checks"][0]["text"] == "NAME=\ufffd"
    assert "NAME=\ufffd" in shown(check)
    assert "NAME=?" in shown(check, encoding="ascii")
