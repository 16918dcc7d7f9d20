"""Run ``oomguard explain``: the page of a rule, a kind, a cause, or a pasted error message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click

from oomguard.cli.options import GroupedCommand, color_option, console, read_rules, rules_option
from oomguard.core.errors import UsageError
from oomguard.core.text import strip_escapes

if TYPE_CHECKING:
    from oomguard.core.incident import Incident
    from oomguard.rules.rule_files import Rule, RuleSet

_CODE: Final = re.compile(r"[A-Za-z]+[ -]?\d+")
# Longer lines are hard to read.
_MAX_COLUMNS: Final = 100
# A pasted traceback would push the hint off the screen.
_MOST_QUOTED_CHARS: Final = 60
# More names are a list to read, not a suggestion.
_MOST_NEAR: Final = 3


@click.command("explain", cls=GroupedCommand, example='oomguard explain "No available memory"')
@click.argument("words", nargs=-1, metavar='CODE|KIND|"ERROR TEXT"', required=True)
@rules_option
@color_option
def command(words: tuple[str, ...], rules: tuple[str, ...], color: str) -> int:
    """Explain a rule's code, a kind or cause, or an error message in quotes.

    A part of the message is enough, and its numbers may differ.

    Exit status: 0 if oomguard knows it, 2 otherwise.
    """
    text = strip_escapes(" ".join(words)).strip()
    page = _page(text, read_rules(rules))
    out = console(color)
    width = min(out.width, _MAX_COLUMNS)
    if out.is_terminal and out.encoding.lower().startswith("utf"):
        from rich.markdown import Markdown
        from rich.theme import Theme

        # Without colors, so that it is readable on light and dark terminals.
        title, _, rest = page.partition("\n")
        shown = f"**{title.removeprefix('# ')}**\n{rest}"
        with out.use_theme(Theme({"markdown.code": "bold"})):
            out.print(Markdown(shown, code_theme="ansi_dark"), width=width)
        return 0
    encoding = out.encoding or "utf-8"
    for line in page.split("\n"):
        click.echo(
            line.removeprefix("# ").replace("**", "").encode(encoding, "replace").decode(encoding)
        )
    return 0


def _page(text: str, rules: RuleSet) -> str:
    """Return the page for a text.

    Raises:
        UsageError: if oomguard knows nothing like it.
    """
    from oomguard.core.incident import KINDS
    from oomguard.report.explanation import cause_text, kind_text, message_text

    name = text.lower().replace("-", "_").replace(" ", "_")
    by_code = {rule.code.lower(): rule for rule in rules.rules}
    # Codes come first: they are the shortest and cannot be part of a message.
    if name in by_code:
        return _rule_page(by_code[name], rules)
    if name in KINDS and name != "other":
        return kind_text(name, rules.rules)
    if name in {rule.cause for rule in rules.rules}:
        return cause_text(name, rules.rules)
    # A misspelt code is no error message, so the search for messages would mislead.
    if _CODE.fullmatch(text):
        raise UsageError(f"no rule has the code {text!r}", hint=_near(text, rules))

    from oomguard.rules.error_messages import find_error_messages

    found = find_error_messages(text)
    if found:
        return message_text(found[0], found[1:], _incident(text, rules), text)
    return _recognized(text, rules)


def _rule_page(rule: Rule, rules: RuleSet) -> str:
    from oomguard.diagnosis import assess, incident_from, model_from
    from oomguard.remedy.policy import Policy
    from oomguard.report.explanation import rule_text

    for test in rule.tests:
        if "expect" in test:
            observed = incident_from(test["kind"], test["facts"])
            incident = assess(observed, rules, Policy(), memory_model=model_from(test))
            return rule_text(rule, incident.facts)
    return rule_text(rule, {})


def _recognized(text: str, rules: RuleSet) -> str:
    """Return the page of the kind that a signature finds in the text.

    Raises:
        UsageError: if no signature matches.
    """
    from oomguard.report.explanation import kind_text

    incident = _incident(text, rules)
    if incident is None or incident.certainty_ratio is not None or incident.kind == "other":
        shown = text if len(text) <= _MOST_QUOTED_CHARS else f"{text[:_MOST_QUOTED_CHARS]}..."
        raise UsageError(f"no known message is like {shown!r}", hint=_near(text, rules))
    if incident.causes and incident.causes[0].rule:
        by_code = {rule.code: rule for rule in rules.rules}
        return _rule_page(by_code[incident.causes[0].rule], rules)
    return kind_text(incident.kind, rules.rules)


def _incident(text: str, rules: RuleSet) -> Incident | None:
    """Return the failure that a signature finds in a text; None if there is none."""
    import io

    from oomguard.diagnosis import diagnose_lines
    from oomguard.scan.source import read_lines

    lines = read_lines(io.BytesIO(text.encode("utf-8", "surrogatepass")))
    return diagnose_lines(lines, rules=rules).first_cause


def _near(text: str, rules: RuleSet) -> str:
    """Return the nearest codes, kinds and causes, or where all are listed."""
    import difflib

    from oomguard.core.incident import KINDS

    codes = [rule.code for rule in rules.rules]
    causes = [rule.cause for rule in rules.rules]
    by_lower = {name.lower(): name for name in (*codes, *KINDS, *causes)}
    key = text.lower().replace(" ", "_")
    near = difflib.get_close_matches(key, list(by_lower), n=_MOST_NEAR)
    if near:
        return f"did you mean {' or '.join(by_lower[name] for name in near)}?"
    return "oomguard rules list names all codes; for a whole log: oomguard diagnose LOG"
