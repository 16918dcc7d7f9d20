"""Markdown for an issue tracker: tables that stay tables, fences that stay closed."""

from __future__ import annotations

import html
import re
from dataclasses import replace

from markdown_it import MarkdownIt

from oomguard.core.incident import Action, Alternative, Diagnosis, Effect, Evidence
from oomguard.diagnosis import diagnose_lines
from oomguard.report.markdown import to_markdown
from oomguard.scan.source import Line

NONE_LEFT = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when starting."


def diagnosis(*log: str, source: str = "error.log") -> Diagnosis:
    return diagnose_lines([Line(number, 0, text) for number, text in enumerate(log, 1)], source)


def with_action(**changes) -> str:
    action = replace(
        Action(
            "dtype",
            "Use float16",
            effect=Effect.CHANGES_OUTPUTS,
            command="--dtype half",
            why="it fits",
        ),
        **changes,
    )
    return to_markdown(
        Diagnosis("", (replace(diagnosis(NONE_LEFT).incidents[0], actions=(action,)),))
    )


def test_an_incident_has_a_headline_its_cause_and_its_evidence():
    text = to_markdown(diagnosis(NONE_LEFT))

    assert text.startswith("### ")
    assert "`unknown`" in text
    assert f"```text\nline 1: {NONE_LEFT}\n```" in text


def test_actions_are_a_numbered_list_above_the_cause():
    text = to_markdown(diagnosis(NONE_LEFT))

    assert (
        text.index("**What to do**")
        < text.index("1. **")
        < text.index("2. **")
        < text.index("confidence")
    )


def test_a_line_break_in_an_action_does_not_end_its_item():
    assert "one two" in with_action(why="one\ntwo")


def test_a_fence_in_the_evidence_does_not_close_the_block():
    incident = replace(
        diagnosis(NONE_LEFT).incidents[0], evidence=(Evidence("```", 1), Evidence("after", 2))
    )

    fences = [
        line
        for line in to_markdown(Diagnosis("", (incident,))).splitlines()
        if line.startswith("```")
    ]

    assert fences == ["````text", "````"]


def test_a_blocked_action_says_why():
    assert "oomguard run needs permission: you set it" in with_action(blocked_by="you set it")


def test_alternatives_and_the_unknown_are_listed():
    incident = replace(
        diagnosis(NONE_LEFT).incidents[0],
        alternatives=(Alternative("dtype", "b", "you set it", "--dtype b"),),
        unknown=("total",),
    )

    text = to_markdown(Diagnosis("", (incident,)))

    assert "- instead: `--dtype b` (you set it)" in text
    assert "- unknown: total" in text


def test_a_healthy_log_is_one_line():
    assert to_markdown(diagnosis("all is well")) == "**error.log**: no memory failure found\n"


def test_a_secret_in_the_evidence_is_hidden():
    assert "abcdefgh" not in to_markdown(diagnosis(f"api_key='abcdefgh' {NONE_LEFT}"))


def test_nobody_is_mentioned_and_nothing_is_referred_to():
    for text in ["@user", "#123", "org/repo#123", "GH-123", "@org/team"]:
        written = with_action(why=f"see {text}", cost=text)
        prose = html.unescape(re.sub(r"`[^`]*`", "", written))

        assert not re.search(r"@\w|#\d|GH-\d", prose), text
        assert text in with_action(why=text).replace("&#8203;", ""), text


HOSTILE = (
    "<script>alert(1)</script>",
    "</details>",
    "**bold**",
    "_x_",
    "`code`",
    "[a](http://b)",
    "![a](http://b)",
    "~~x~~",
    "&lt;",
    "a | b",
    "a \\| b",
    "\\",
    "# x",
    "1. x",
    "> x",
    "- x",
)


def test_text_of_the_log_is_shown_as_it_is():
    for field in ["title", "why", "cost", "blocked_by", "command"]:
        for text in HOSTILE:
            written = with_action(**{field: text})
            page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(written)
            shown = html.unescape(re.sub(r"<[^>]*>", "", page))

            assert "<script" not in page, (field, text)
            assert page.count("</details>") == 1, (field, text)
            item = page.split("<ol>")[1].split("</ol>")[0]
            assert not re.search(r"<(?:em|a|img|s|del|blockquote|h1)\b", item), (field, text)
            assert item.count("<strong>") == 1, (field, text)
            assert text in shown, (field, text)


def test_evidence_stays_in_its_block():
    for text in ["```", "````", "</details>", "`````\n```"]:
        incident = replace(
            diagnosis(NONE_LEFT).incidents[0], evidence=(Evidence(f"{text} <b>x</b>", 1),)
        )
        page = MarkdownIt("commonmark").render(to_markdown(Diagnosis("", (incident,))))

        assert page.count("<pre>") == 1, text
        assert "<b>" not in page, text
        assert page.rstrip().endswith("</details>"), text


def test_the_name_of_the_log_is_no_markup():
    for source in ["@user.log", "<b>.log", "a_b_.log", "**x**"]:
        page = MarkdownIt("commonmark").render(to_markdown(diagnosis("all is well", source=source)))

        assert (
            html.unescape(re.sub(r"<[^>]*>", "", page))
            .replace("\u200b", "")
            .startswith(f"{source}: no memory failure")
        ), source
