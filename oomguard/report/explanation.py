"""Write the pages that explain a rule, a signature, a kind, a cause or an error message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from oomguard.core.facts import REGISTRY, Fact, format_gib
from oomguard.core.incident import Alternative, Cause, Incident, Patch, facts_of_headline, headline
from oomguard.core.text import PLACEHOLDER, render, strip_escapes, without_brackets
from oomguard.report.phrases import shortened, what_died
from oomguard.rules.error_messages import ErrorMessage, error_messages, phases
from oomguard.rules.rule_files import Confidence, Rule
from oomguard.rules.signature import Signature

# The pages of `oomguard explain`, in Markdown for a terminal.

# Enough to recognize one's own message. The docs page has all of them.
_MOST_MESSAGES: Final = 5
# A list item should stay on one line.
_MESSAGE_CHARS: Final = 90
# Status 137 and the like belong to the message; sizes and counts are examples.
_FIGURE: Final = re.compile(r"\d+(?:\.\d+)? ?[KMG]i?B\b|\(\d+\)|\d{4,}|\d dummy")


def _code_list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _bullets(texts: Iterable[str]) -> list[str]:
    return [f"- {text}" for text in texts]


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
    messages = []
    for message in error_messages():
        if message.rule == rule.code:
            messages.append(message)
    lines += _printed(messages)
    lines += [
        "",
        (
            f"Cause `{rule.cause}`, kinds {_code_list(rule.kinds)}. "
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
    for rule in rules:
        if kind in rule.kinds:
            lines.append(f"- `{rule.code}` {rule.title}")
    messages = []
    for message in error_messages():
        if message.kind == kind:
            messages.append(message)
    lines += _printed(messages)
    lines += ["", "One cause in full: `oomguard explain CODE`. Your log: `oomguard diagnose LOG`."]
    return "\n".join(lines)


def cause_text(cause: str, rules: Sequence[Rule]) -> str:
    """Return the list of a cause's rules as Markdown."""
    lines = [f"# {cause}", "", "**Rules for this cause.**", ""]
    for rule in rules:
        if rule.cause == cause:
            lines.append(f"- `{rule.code}` {rule.title}")
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
    titles = {phase.id: phase.title for phase in phases()}
    title = titles[message.phase]
    about = f"{message.program}. {title}."
    # Users may otherwise take the stored numbers for those of their own run.
    if pasted and _FIGURE.search(message.text) and message.text not in pasted:
        about = f"{about} The numbers of this message are an example."
    lines = [f"# {message.text}", "", about, ""]
    lines += [f"**Meaning.** {message.meaning}", "", f"**Do this.** {message.do}", ""]
    if message.command:
        lines += [f"    {message.command}", ""]
    # Without a figure from the user's text, the action would only repeat the page.
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
        lines += _bullets(shortened(one.text, _MESSAGE_CHARS) for one in similar)
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
    # A backtick of the message would end the code of the heading.
    lines = [f"### `{message.text.replace('`', chr(39))}`", ""]
    lines += [f"*{message.program}.* {message.meaning}", ""]
    lines += [f"**Do this first:** {message.do}", ""]
    if message.command:
        language = "bash"
        # All other commands are for a shell.
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


# One Markdown page for each rule and signature: meaning, checks, changes and costs.
#
# The pages come from the rule files alone, so the same files always give the same pages.

PAGE_MARK: Final = "<!-- made by `oomguard rules pages`: change the rule file, not this page -->"
_EFFECTS: Final = {
    "output-preserving": "sampling works the same",
    "reduces-capacity": "fewer requests or tokens fit",
    "changes-outputs": "the answers may differ; needs your permission",
}


@dataclass(frozen=True, slots=True)
class Example:
    """Hold one test of a rule with the incident that this rule alone gives.

    ``incident`` has no cause if the rule does not apply.
    """

    kind: str
    facts: Mapping[str, Any]
    incident: Incident


def rule_page(
    rule: Rule, examples: Sequence[Example], *, file: str, solvers: Mapping[str, str]
) -> str:
    """Return the page of one rule.

    Args:
        rule: the rule.
        examples: its tests, with their results.
        file: the rule's file, as the page shows it.
        solvers: how each solver computes a value, in words.
    """
    matching = []
    excluded = []
    for example in examples:
        cause = _cause(rule, example)
        if cause:
            matching.append((example, cause))
        else:
            excluded.append(example)
    lines = [f"# {rule.code}: {_text(rule.title)}", "", PAGE_MARK, ""]
    lines += [
        (
            f"Cause `{rule.cause}`, {_text(rule.status)}, since {_text(rule.since)}, from "
            f"`{_code(file)}`."
        ),
        "",
    ]
    lines += ["## What it means", "", _text(_named(rule.why)), ""]
    if matching:
        # Numbers of an example are easier to read than names of facts.
        summary = render(rule.summary, matching[0][0].incident.facts)
    else:
        summary = _named(rule.summary)
    lines += [f"> {_text(summary)}", ""]
    lines += [
        "## When it applies",
        "",
        f"The log prints one of these kinds: {_code_list(rule.kinds)}.",
    ]
    lines += _conditions(rule)
    lines += ["", "## Confidence", "", *_bullets(map(_step, rule.confidence)), ""]
    lines += ["## How to confirm it", "", _text(_named(rule.confirm)), ""]
    lines += ["## What to change, and what it costs", "", *_fixes(rule, solvers), ""]
    for number, (example, cause) in enumerate(matching, 1):
        lines += [
            f"## Example {number}" if len(matching) > 1 else "## Example",
            "",
            *_example(example, cause),
            "",
        ]
    if excluded:
        lines += ["## When it does not apply", ""]
        for example in excluded:
            lines.append(f"- `{example.kind}` with {_facts_inline(example.facts)}")
        lines += [""]
    lines += ["## References", "", *_bullets(map(_reference, rule.references)), ""]
    return "\n".join(lines)


def signature_page(signature: Signature, *, file: str, group_facts: Mapping[str, str]) -> str:
    """Return the page of one signature.

    ``group_facts`` maps a pattern's group to the fact that it fills.
    """
    lines = [f"# {_text(signature.name)}", "", PAGE_MARK, ""]
    if signature.kind:
        what = f"Kind `{signature.kind}`"
    else:
        what = "Context (a line with facts that reports no failure)"
    lines += [
        (
            f"{what}, framework {_text(signature.framework)}, phase `{signature.phase}`, from "
            f"`{_code(file)}`."
        )
    ]
    for number, wording in enumerate(signature.wordings, 1):
        groups = {}
        for group in wording.pattern.groupindex:
            if group in group_facts:
                groups[group_facts[group]] = True
        lines += ["", f"## Wording {number}", "", f"- versions: {_text(wording.versions or 'any')}"]
        lines += [f"- anchor: `{_code(wording.anchor)}`", f"- source: {_text(wording.source)}"]
        if wording.phase:
            lines += [f"- phase: `{wording.phase}`"]
        if groups:
            lines += [f"- reads: {_code_list(groups)}"]
        if wording.facts:
            lines += [f"- says: {_facts_inline(wording.facts)}"]
        lines += ["", *_fenced([wording.pattern.pattern])]
    for number, test in enumerate(signature.tests, 1):
        lines += [
            "",
            f"## Test {number}: {'no match' if test.get('expect_no_match') else 'a match'}",
            "",
        ]
        lines += _fenced(test["log"].splitlines())
        if test.get("expect"):
            lines += ["", f"gives {_facts_inline(test['expect'])}"]
    return "\n".join([*lines, ""])


def index_page(rules: Iterable[Rule], signatures: Iterable[Signature]) -> str:
    """Return the list of all rules, linked to their pages, and of all signatures."""
    lines = [
        "# Rules",
        "",
        PAGE_MARK,
        "",
        "Each page explains one rule: why memory ran out, and what to do.",
        "",
    ]
    lines += ["| code | cause | title | kinds |", "|---|---|---|---|"]
    for rule in rules:
        kinds = _code_list(rule.kinds)
        lines.append(
            f"| [{rule.code}]({rule.code}.md) | `{rule.cause}` | {_cell(rule.title)} | {kinds} |"
        )
    lines += [
        "",
        "# Signatures",
        "",
        "What was printed: `oomguard rules show NAME` shows one in full.",
        "",
    ]
    lines += ["| name | kind | wordings |", "|---|---|---|"]
    for signature in signatures:
        if signature.kind:
            kind = f"`{signature.kind}`"
        else:
            kind = "context"
        lines.append(f"| {_cell(signature.name)} | {kind} | {len(signature.wordings)} |")
    return "\n".join([*lines, ""])


def _cause(rule: Rule, example: Example) -> Cause | None:
    for cause in example.incident.causes:
        if cause.rule == rule.code:
            return cause
    return None


def _conditions(rule: Rule) -> list[str]:
    conditions = []
    for condition in rule.when:
        # This condition always holds, so it says nothing.
        if condition.source != "True":
            conditions.append(condition.source)
    if conditions:
        lines = [
            "",
            "All of these conditions are true:",
            "",
            *_bullets(f"`{_code(source)}`" for source in conditions),
        ]
    else:
        lines = []
    if rule.unknown:
        lines += [
            "",
            f"These facts are unknown: {_code_list(rule.unknown)}.",
        ]
    names: list[str] = []
    for source in conditions:
        # Words such as ``and`` match too; the loop below takes only names of facts.
        names += re.findall(r"\b[a-z]\w*\b", source)
    meanings = []
    for name in dict.fromkeys(names):
        if name in REGISTRY:
            meanings.append(f"| `{name}` | {_cell(REGISTRY[name].meaning)} |")
    if meanings:
        return [*lines, "", "| fact | meaning |", "|---|---|", *meanings]
    return lines


def _step(step: Confidence) -> str:
    if step.when is not None:
        where = f" if `{_code(step.when.source)}`"
    else:
        where = ""
    if step.base is not None:
        return f"{step.base:.2f}{where or ' at first'}"
    return f"{abs(step.add):.2f} {'more' if step.add >= 0 else 'less'}{where}"


def _fixes(rule: Rule, solvers: Mapping[str, str]) -> list[str]:
    if not rule.fixes:
        return ["oomguard cannot change anything for this cause."]
    lines: list[str] = []
    for number, fix in enumerate(rule.fixes, 1):
        lines.append(
            f"{number}. `{fix.setting}` "
            f"({fix.effect}{', as an alternative only' if fix.alternative else ''})"
        )
        if fix.lever:
            lines.append(f"   - {_text(fix.lever)}; the value is not known ({_text(fix.missing)})")
        elif fix.solve:
            lines.append(f"   - value: {_text(solvers.get(fix.solve, fix.solve))}")
        elif fix.value is not None:
            lines.append(f"   - value: `{_code(fix.value.source)}`")
        if fix.when:
            lines.append(
                "   - only if "
                f"{' and '.join(f'`{_code(condition.source)}`' for condition in fix.when)}"
            )
        lines.append(f"   - cost: {_text(fix.tradeoff) or 'unknown'}")
    effects = sorted({fix.effect for fix in rule.fixes})
    meanings = "; ".join(f"*{effect}*: {_EFFECTS[str(effect)]}" for effect in effects)
    return [*lines, "", f"{meanings}."]


def _example(example: Example, cause: Cause) -> list[str]:
    lines = [f"`{example.kind}`, with these facts:", ""]
    for name, value in example.facts.items():
        lines.append(f"- `{name} = {_code(_value(name, value))}`")
    lines += ["", "gives this explanation:", ""]
    shown = [
        f"{cause.title} ({cause.id}, confidence {cause.confidence:.2f}, {cause.rule})",
        cause.explanation,
    ]
    for number, patch in enumerate(example.incident.plan, 1):
        shown += ["", *_patch(number, patch)]
    if example.incident.alternatives:
        shown += ["", *map(_alternative, example.incident.alternatives)]
    if example.incident.unknown:
        shown += ["", f"unknown: {' '.join(example.incident.unknown)}"]
    return [*lines, *_fenced(shown)]


def _patch(number: int, patch: Patch) -> list[str]:
    if patch.old is None:
        old = ""
    else:
        old = f"{patch.old} -> "
    lines = [
        (
            f"{number}. {patch.setting}: {old}{'not solved' if patch.new is None else patch.new}  "
            f"[{patch.effect}]"
        )
    ]
    lines.append(f"   {patch.reason}")
    paste = " or ".join(filter(None, (patch.as_flag, patch.as_kwarg, patch.as_env)))
    if patch.tradeoff:
        lines.append(f"   cost: {patch.tradeoff}")
    if patch.new is not None and patch.blocked_by:
        lines.append(f"   not automatic: {patch.blocked_by}")
    if patch.new is not None and paste:
        return [*lines, f"   {paste}"]
    return lines


def _alternative(row: Alternative) -> str:
    return f"instead: {row.as_flag or row.as_kwarg or f'{row.setting} = {row.new}'} ({row.why_not})"


def _value(name: str, value: Any) -> str:
    size = (
        isinstance(value, int)
        and not isinstance(value, bool)
        and name.endswith("_bytes")
        and value >= 1024
    )
    if isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    if size:
        return f"{text} ({format_gib(value)})"
    return text


def _facts_inline(facts: Mapping[str, Any]) -> str:
    texts = []
    for name, value in facts.items():
        texts.append(f"`{name} = {_code(_value(name, value))}`")
    return ", ".join(texts) or "nothing else known"


def _reference(row: Mapping[str, Any]) -> str:
    note = _text(row["note"])
    if row.get("url"):
        return f"{note} <{_text(row['url'])}>"
    return note


def _named(template: str) -> str:
    """Replace a template's placeholders by the names of facts, for a text without values."""
    return PLACEHOLDER.sub(
        lambda match: f"`{match.group(1).split('|')[0]}`", without_brackets(template)
    )


def _text(text: str) -> str:
    """Return running text on one line, without terminal escapes."""
    return strip_escapes(" ".join(str(text).split()))


def _code(text: str) -> str:
    """Return text for a code span, in which a backtick would end the span."""
    return _text(text).replace("`", "'")


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _fenced(lines: Iterable[str]) -> list[str]:
    fenced = ["```text"]
    for line in lines:
        fenced.append(strip_escapes(line).replace("```", "'''").rstrip())
    return [*fenced, "```"]
