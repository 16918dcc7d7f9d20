"""Write the pages of ``oomguard explain``: one rule, one kind, one cause, one error message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from oomguard.core.facts import Fact
from oomguard.core.incident import Incident, facts_of_headline, headline
from oomguard.core.text import render
from oomguard.report.wording import shortened, what_died
from oomguard.rules.error_messages import ErrorMessage, error_messages, phases
from oomguard.rules.rule import Rule

_MOST_MESSAGES: Final = 5
_MESSAGE_CHARS: Final = 90
# Status 137 and the like belong to the message; sizes and counts are examples.
_FIGURE: Final = re.compile(r"\d+(?:\.\d+)? ?[KMG]i?B\b|\(\d+\)|\d{4,}|\d dummy")


def rule_text(rule: Rule, facts: Mapping[str, Fact]) -> str:
    """Return the page of one rule as Markdown.

    Args:
        rule: the rule.
        facts: the facts of an example, so that the page has numbers.
    """
    lines = [f"# {rule.code}: {rule.title}", ""]
    example = " ".join(filter(None, (render(rule.summary, facts), render(rule.why, facts))))
    if facts:
        example = f"**An example.** {example}"
    lines += [example, "", f"**How to check it.** {render(rule.confirm, facts)}", ""]
    lines += ["**What helps.**", ""]
    for fix in rule.fixes:
        cost = fix.tradeoff.rstrip(".")
        lines.append(f"- `{fix.setting}` ({fix.effect}){f': {cost}' if cost else ''}")
    if not rule.fixes:
        lines.append("- No setting helps. The panel of `oomguard diagnose LOG` says what to do.")
    lines += _printed(message for message in error_messages() if message.rule == rule.code)
    lines += [
        "",
        (
            f"Cause `{rule.cause}`, kinds {', '.join(f'`{kind}`' for kind in rule.kinds)}. "
            f"Conditions, tests and sources: `oomguard rules show {rule.code}`."
        ),
    ]
    return "\n".join(lines)


def kind_text(kind: str, rules: Sequence[Rule]) -> str:
    """Return the page of one kind as Markdown: its messages and its possible causes.

    Args:
        kind: one of the kinds.
        rules: all rules.
    """
    lines = [f"# {kind}: {headline(kind, {})}", ""]
    lines += ["**Possible causes.**", ""]
    lines += [f"- `{rule.code}` {rule.title}" for rule in rules if kind in rule.kinds]
    lines += _printed(message for message in error_messages() if message.kind == kind)
    lines += ["", "One cause in full: `oomguard explain CODE`. Your log: `oomguard diagnose LOG`."]
    return "\n".join(lines)


def cause_text(cause: str, rules: Sequence[Rule]) -> str:
    """Return the list of a cause's rules as Markdown."""
    lines = [f"# {cause}", "", "**Rules for this cause.**", ""]
    lines += [f"- `{rule.code}` {rule.title}" for rule in rules if rule.cause == cause]
    lines += ["", "One of them in full: `oomguard explain CODE`."]
    return "\n".join(lines)


def message_text(
    message: ErrorMessage,
    similar: Sequence[ErrorMessage] = (),
    own: Incident | None = None,
    pasted: str = "",
) -> str:
    """Return the page of one message as Markdown, for a terminal.

    Args:
        message: the message.
        similar: other messages that the user may have meant.
        own: the failure that a signature finds in the user's text; None if there is none.
        pasted: the user's text; the stored message is marked as an example if its numbers differ.
    """
    title = next(phase.title for phase in phases() if phase.id == message.phase)
    about = f"{message.program}. {title}."
    if pasted and _FIGURE.search(message.text) and message.text not in pasted:
        about = f"{about} The numbers of this message are an example."
    lines = [f"# {message.text}", "", about, ""]
    lines += [f"**Meaning.** {message.meaning}", "", f"**Do this.** {message.do}", ""]
    if message.command:
        lines += [f"    {message.command}", ""]
    if (
        own is not None
        and own.actions
        and own.kind == message.kind
        and facts_of_headline(own.kind, own.facts)
    ):
        action = own.actions[0]
        lines += [f"**With your numbers.** {what_died(own)}. {action.title}.", ""]
        if action.command:
            lines += [f"    {action.command}", ""]
    more = "With the whole log: `oomguard diagnose LOG`."
    if message.rule:
        more = f"The likeliest cause: `oomguard explain {message.rule}`. {more}"
    lines += [more]
    if similar:
        lines += ["", "**Similar messages.**", ""]
        lines += [f"- {shortened(one.text, _MESSAGE_CHARS)}" for one in similar]
    return "\n".join(lines)


def _printed(messages: Iterable[ErrorMessage]) -> list[str]:
    found = [f"- {shortened(one.text, _MESSAGE_CHARS)}" for one in messages][:_MOST_MESSAGES]
    if not found:
        return []
    return ["", "**Printed as.**", "", *found]


def messages_page() -> str:
    """Return the page of all messages as Markdown for docs, grouped by phase."""
    lines = [
        "# My error message",
        "",
        (
            "Find your message with the page search, or paste it in quotes: "
            '`oomguard explain "TEXT"`. Numbers may differ, and a part of the text is enough. '
            "For an answer with the numbers of your run: `oomguard diagnose error.log`."
        ),
        "",
        (
            "[Rule codes](../rules/README.md) such as `OG201` name the likeliest cause of the "
            "message alone. A whole log often shows more."
        ),
        "",
    ]
    for phase in phases():
        lines += [f"## {phase.title}", ""]
        for message in error_messages():
            if message.phase == phase.id:
                lines += _entry(message)
    return "\n".join(lines)


def _entry(message: ErrorMessage) -> list[str]:
    lines = [f"### `{message.text.replace('`', chr(39))}`", ""]
    lines += [f"*{message.program}.* {message.meaning}", ""]
    lines += [f"**Do this first:** {message.do}", ""]
    if message.command:
        language = "bash"
        if message.command.startswith(("from_pretrained", "@")):
            language = "python"
        lines += [f"```{language}", message.command, "```", ""]
    if message.also:
        lines += ["Also printed as:", ""]
        lines += [f"- `{text.replace('`', chr(39))}`" for text in message.also]
        lines += [""]
    if message.rule:
        lines += [f"Likeliest cause: `oomguard explain {message.rule}`.", ""]
    return lines
