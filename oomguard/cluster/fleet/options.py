"""Add ``diagnose --summary``, which groups the failures of all inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oomguard.cli.options import F, option
from oomguard.core.errors import InputError

if TYPE_CHECKING:
    from oomguard.cli.render import RenderOptions
    from oomguard.cluster.fleet.findings import IncidentSummary
    from oomguard.cluster.fleet.groups import FleetSummary
    from oomguard.core.incident import Diagnosis
    from oomguard.scan.inputs import Input


def summary_option(function: F) -> F:
    """Add --summary to a command."""
    return option(
        "--summary",
        is_flag=True,
        help="Group the failures of all inputs, and show the change that would fix most of them.",
    )(function)


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
        from oomguard.cluster.fleet.summary_report import summary_json

        return summary_json(summary) + "\n"
    if work.form == "md":
        from oomguard.cluster.fleet.summary_report import summary_markdown

        return summary_markdown(summary)
    from oomguard.cli.render import Screen, text_of
    from oomguard.cluster.fleet.summary_report import print_summary

    screen = work.screen or Screen(80, terminal=False, colors=None, no_color=True, encoding="utf-8")
    return text_of(screen, lambda console: print_summary(console, summary))
