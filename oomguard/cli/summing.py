"""``oomguard diagnose --summary``: what failed over all inputs, in groups, in the form asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oomguard.cli.reading import reading
from oomguard.cli.rendering import Screen, Work, text_of, unmasked_if
from oomguard.errors import InputError
from oomguard.fleet.finding import Finding
from oomguard.fleet.groups import FleetSummary, summed
from oomguard.fleet.inputs import Input


def summarize(
    inputs: Sequence[Input],
    work: Work,
    jobs: int,
    on: str,
    write: Callable[[str], None],
    errors: list[InputError],
    *,
    since: float | None,
    left_out: int,
) -> bool:
    """Read all inputs and write their summary; return whether an out-of-memory is in it.

    The arguments are those of ``read_all``; ``errors`` has one already for each path that leads to no input. ``since`` (Unix seconds)
    leaves out incidents printed before then, ``left_out`` counts the inputs that were last written before then.
    """
    findings: list[Finding] = []
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
    summary = summed(
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


def _rendered(summary: FleetSummary, work: Work) -> str:
    if work.quiet and not summary.incidents and work.form != "json":
        return ""
    if work.form == "json":
        from oomguard.report.fleet import summary_json

        return summary_json(summary) + "\n"
    if work.form == "markdown":
        from oomguard.report.fleet import summary_markdown

        return summary_markdown(summary)
    from oomguard.report.fleet import print_summary

    screen = work.screen or Screen(80, terminal=False, colors=None, no_color=True, encoding="utf-8")
    return text_of(screen, lambda console: print_summary(console, summary))
