"""Render the summary of many logs for a terminal, as JSON and as Markdown."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from oomguard.cluster.fleet.findings import SettingChange
from oomguard.cluster.fleet.groups import FleetSummary, IncidentGroup
from oomguard.core.errors import InputError
from oomguard.core.presentable import drawn, masked
from oomguard.report.history import moment
from oomguard.report.json import SCHEMA, json_line, plain_value

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.cli.render import RenderOptions
    from oomguard.cluster.fleet.findings import IncidentSummary
    from oomguard.cluster.fleet.groups import FleetSummary
    from oomguard.core.incident import Diagnosis
    from oomguard.scan.inputs import Input


HEADINGS: Final = ("incidents", "cause", "model and version", "would have fixed", "seen", "where")
_UNKNOWN: Final = "unknown"
_NARROW_COLUMNS: Final = 100
_SHOWN_GROUPS: Final = 50


def headline(summary: FleetSummary) -> str:
    """Return one sentence with the number of inputs and failures."""
    failed = f"{summary.failed:,} of {_counted(summary.inputs, 'input')} ran out of memory"
    return (
        f"{failed}: {_counted(summary.incidents, 'incident')} in "
        f"{_counted(len(summary.groups), 'group')}"
    )


def sentences(summary: FleetSummary) -> list[str]:
    """Return the lines below the table: the best patch, what was left out, whose clocks apply."""
    lines = []
    if (best := summary.best) is not None and best.fix is not None:
        flags = " ".join(_flag_of(change) for change in best.fix.changes)
        if best.model:
            whose = f" of {best.model}"
        else:
            whose = ""
        share = f"{best.fix.fixes:,} of {_counted(summary.incidents, 'incident')}"
        lines.append(f"would have fixed most: {flags}{whose} ({share})")
    if summary.left_out:
        lines.append(
            f"left out because they are older than --since: {_counted(summary.left_out, 'input')}"
        )
    if summary.unread:
        lines.append(f"could not be read: {_counted(summary.unread, 'input')}")
    by_file = sum(group.example.clock == "file" for group in summary.groups)
    if by_file:
        lines.append(
            f"the times of {_counted(by_file, 'group')} come from the files, because the lines "
            "have none"
        )
    return drawn(lines)


def rows(summary: FleetSummary) -> list[tuple[str, ...]]:
    """Return the table with headings first; line breaks separate lines within a cell."""
    return [HEADINGS, *(drawn(_row(group)) for group in summary.groups)]


def _row(group: IncidentGroup) -> tuple[str, ...]:
    engine = " ".join(filter(None, (group.framework, group.version)))
    return (
        f"{group.incidents:,}\nin {_counted(group.inputs, 'input')}",
        f"{group.cause}\n{', '.join(group.kinds)}",
        f"{group.model or 'model ' + _UNKNOWN}\n{engine}",
        fix_words(group),
        _seen(group),
        group_sources(group),
    )


def fix_words(group: IncidentGroup) -> str:
    """Return the changes that would have fixed most of a group, one a line, with their number.

    A change that the user does not permit is included with the reason.
    """
    refused = [f"{setting} for {count:,}: {why}" for setting, why, count in group.refused]
    if group.fix is None:
        return "\n".join(
            ["no change that you permit", *refused] if refused else ["no value could be solved"]
        )
    lines = [_flag_of(change) for change in group.fix.changes]
    if group.fix.fixes == group.incidents:
        count = "all"
    else:
        count = f"{group.fix.fixes:,} of {group.incidents:,}"
    return "\n".join([*lines, f"{count}, {group.fix.changes[0].effect}", *refused])


def _flag_of(change: SettingChange) -> str:
    return change.as_flag or f"{change.setting}={change.new}"


def group_sources(group: IncidentGroup) -> str:
    """Return the writers with most incidents of a group, or the place of one example."""
    lines = [f"{words} ({times:,})" if times > 1 else words for words, times in group.writers]
    if group.other_writers:
        lines.append(f"and {group.other_writers:,} more")
    if not lines:
        lines = [_place(group.example.source, group.example.line)]
    if group.told_again:
        others = len(group.told_again) - 1
        lines.append(
            f"repeated: {_place(*group.told_again[0])}"
            + (f" and {others:,} more" if others else "")
        )
    return "\n".join(lines)


def _place(source: str, line: int | None) -> str:
    if line is None:
        return source
    return f"{source}:{line}"


def _seen(group: IncidentGroup) -> str:
    if group.first_at is None or group.last_at is None:
        return _UNKNOWN
    first = moment(group.first_at)
    last = moment(group.last_at)
    if first == last:
        return first
    return f"{first}\n{last}"


def _counted(count: int, what: str) -> str:
    if count == 1:
        return f"{count:,} {what}"
    return f"{count:,} {what}s"


def print_summary(console: Console, summary: FleetSummary) -> None:
    """Print the groups, the one with most incidents first, then the best patch."""
    from rich.text import Text

    console.print(Text(headline(summary), style="bold red" if summary.failed else "green"))
    headings, *groups = rows(summary)
    shown = groups[:_SHOWN_GROUPS]
    if shown:
        console.print()
        (_print_below if console.width < _NARROW_COLUMNS else _print_table)(
            console, headings, shown
        )
        console.print()
    if len(groups) > len(shown):
        console.print(
            Text(
                f"{len(groups) - len(shown):,} smaller groups not shown: use --format json or md",
                style="dim",
            )
        )
    for sentence in sentences(summary):
        console.print(Text(sentence), soft_wrap=True)


def _print_table(
    console: Console, headings: tuple[str, ...], groups: list[tuple[str, ...]]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(
            heading, justify="right" if i == 0 else "left", no_wrap=i in {0, 4}, overflow="fold"
        )
    for group in groups:
        table.add_row(*(Text(cell, style="bold" if i == 1 else "") for i, cell in enumerate(group)))
    console.print(table)


def _print_below(
    console: Console, headings: tuple[str, ...], groups: list[tuple[str, ...]]
) -> None:
    from rich.text import Text

    for count, cause, *rest in groups:
        number, inputs = count.split("\n")
        if number == "1":
            what = "incident"
        else:
            what = "incidents"
        console.print(
            Text(f"{number} {what} {inputs}", style="bold").append(
                f"  {cause.replace(chr(10), ': ')}"
            )
        )
        for heading, cell in zip(headings[2:], rest, strict=True):
            first, *others = cell.split("\n")
            console.print(
                Text(f"  {heading}: ", style="dim").append(first, style="not dim"), soft_wrap=True
            )
            for line in others:
                console.print(Text(f"    {line}"), soft_wrap=True)


def summary_markdown(summary: FleetSummary) -> str:
    """Return the summary as Markdown: a sentence, a table, and the lines below it."""
    table = rows(summary)
    lines = [f"## {headline(summary)}", ""]
    if summary.groups:
        lines += [
            _markdown_row(table[0]),
            _markdown_row(("---",) * len(HEADINGS)),
            *map(_markdown_row, table[1:]),
            "",
        ]
    lines += [f"- {sentence}" for sentence in sentences(summary)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(cells: tuple[str, ...]) -> str:
    escaped = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def summary_json(summary: FleetSummary) -> str:
    """Return the summary as one line of JSON with masked texts."""
    best = summary.best
    row = {
        "schema": SCHEMA,
        "inputs": summary.inputs,
        "inputs_with_oom": summary.failed,
        "inputs_unread": summary.unread,
        "inputs_left_out": summary.left_out,
        "incidents": summary.incidents,
        "since": _utc(summary.since),
        "groups": [_group_dict(group) for group in summary.groups],
        "best": None if best is None else summary.groups.index(best),
    }
    return json_line(row)


def _group_dict(group: IncidentGroup) -> dict[str, Any]:
    shown = masked(group)
    example = shown.example
    row = {
        "cause": shown.cause,
        "title": shown.title,
        "kinds": list(shown.kinds),
        "model": shown.model,
        "setting": shown.setting,
        "framework": shown.framework,
        "framework_version": shown.version,
        "incidents": shown.incidents,
        "inputs": shown.inputs,
        "first_seen": _utc(shown.first_at),
        "last_seen": _utc(shown.last_at),
        "fix": None
        if shown.fix is None
        else {
            "changes": [
                {
                    "setting": change.setting,
                    "to": change.new,
                    "as_flag": change.as_flag,
                    "effect": change.effect,
                }
                for change in shown.fix.changes
            ],
            "fixes": shown.fix.fixes,
        },
        "refused": [
            {"setting": name, "why": why, "incidents": count} for name, why, count in shown.refused
        ],
        "writers": [{"who": words, "incidents": times} for words, times in shown.writers],
        "other_writers": shown.other_writers,
        "told_again": [{"source": source, "line": line} for source, line in group.told_again],
        "example": {
            "source": group.example.source,
            "line": example.line,
            "process": example.process,
            "seen": _utc(example.at),
            "clock": example.clock,
            **{
                name: getattr(example.writer, name)
                for name in (
                    "layout",
                    "namespace",
                    "pod",
                    "container",
                    "node",
                    "job",
                    "task",
                    "rank",
                )
            },
        },
    }
    return {key: plain_value(value) for key, value in row.items()}


def _utc(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")


# Add ``diagnose --summary``, which groups the failures of all inputs.


def findings_in(diagnosis: Diagnosis) -> tuple[IncidentSummary, ...]:
    """Return what a summary needs of one input."""
    from oomguard.cluster.fleet.findings import findings_of, modified_at

    return findings_of(diagnosis, modified_at(diagnosis.source))


def summarize(
    inputs: Sequence[Input],
    work: RenderOptions,
    jobs: int,
    on: str,
    write: Callable[[str], None],
    errors: list[InputError],
    *,
    since: float | None,
    left_out: int,
) -> bool:
    """Read all inputs and write their summary; return whether it contains an out-of-memory.

    Args:
        inputs: the inputs.
        work: how to render.
        jobs: the number of processes that read inputs; 0: automatic.
        on: where inputs are read, ``local`` or ``ray``.
        write: takes the text.
        errors: the errors so far, one for each path without an input. New errors are added.
        since: leave out incidents printed before this time, in Unix seconds. None: keep all.
        left_out: the number of inputs that are too old.
    """
    from oomguard.cli.read_inputs import reading
    from oomguard.cli.render import unmasked_if
    from oomguard.cluster.fleet.groups import summarize_findings

    findings: list[IncidentSummary] = []
    failed = unread = 0
    unfound = len(errors)
    with reading(inputs, work, jobs, on, write) as (outcomes, finish):
        for outcome in outcomes:
            finish("")
            findings += outcome.findings
            failed += outcome.found
            if outcome.error:
                errors.append(InputError(outcome.error, hint=outcome.hint))
                unread += not outcome.found and not outcome.findings
    summary = summarize_findings(
        findings,
        inputs=len(inputs) - unread,
        failed=failed,
        unread=unfound + unread,
        left_out=left_out,
        since=since,
    )
    with unmasked_if(not work.masked):
        write(_rendered(summary, work))
    return summary.failed > 0


def _rendered(summary: FleetSummary, work: RenderOptions) -> str:
    if work.quiet and not summary.incidents and work.form != "json":
        return ""
    if work.form == "json":
        return summary_json(summary) + "\n"
    if work.form == "md":
        return summary_markdown(summary)
    from oomguard.cli.render import Screen, text_of

    screen = work.screen or Screen(80, terminal=False, colors=None, no_color=True, encoding="utf-8")
    return text_of(screen, lambda console: print_summary(console, summary))
