"""Show the records that users print: a diagnosis and a plan as text, as a dict, as Markdown.

The records cannot import this package, so they ask oomguard's public module for these functions.
"""

from __future__ import annotations

import io
from typing import Any, Final

from oomguard.core.facts import format_gib
from oomguard.core.incident import Diagnosis
from oomguard.core.presentable import masked
from oomguard.estimate.call.call_budget import CallBudget
from oomguard.planning.start import StartPlan
from oomguard.report.json import to_dict
from oomguard.report.markdown import cell, fenced, inline, to_markdown
from oomguard.report.panel import print_diagnosis
from oomguard.report.plan import (
    budget_of,
    budget_of_call,
    call_record,
    plan_record,
    print_call_budget,
    print_start_plan,
)

Shown = Diagnosis | StartPlan | CallBudget
_COLUMNS: Final = 80


def record_text(record: Shown) -> str:
    """Return what the command line prints, without color, 80 columns wide."""
    from rich.console import Console

    file = io.StringIO()
    # A record may be printed without a terminal, so the width is fixed.
    console = Console(file=file, width=_COLUMNS, no_color=True, highlight=False, emoji=False)
    if isinstance(record, Diagnosis):
        print_diagnosis(console, record)
    elif isinstance(record, StartPlan):
        print_start_plan(console, record)
    else:
        print_call_budget(console, record)
    return file.getvalue().rstrip("\n")


def record_dict(record: Shown) -> dict[str, Any]:
    """Return the object that ``--format json`` writes."""
    if isinstance(record, Diagnosis):
        return to_dict(record)
    if isinstance(record, StartPlan):
        return plan_record(record)
    return call_record(record)


def record_markdown(record: Shown) -> str:
    """Return the record as Markdown."""
    if isinstance(record, Diagnosis):
        return to_markdown(record)
    if isinstance(record, StartPlan):
        budget = budget_of(record.budget)
        name, total = record.budget.model, record.budget.settings.gpu_total_bytes
        reasons = "; ".join(record.budget.reasons)
        command = plan_record(record)["command"]
    else:
        budget = budget_of_call(record)
        name, total, reasons, command = record.model, record.gpu_total_bytes, "", None
    verdict = "fits" if record.fits else "does not fit"
    lines = [f"### {inline(masked(name))}: {verdict} in {format_gib(total)}", ""]
    if reasons:
        lines += [inline(masked(reasons)), ""]
    lines += ["| part | size | source |", "|---|---:|---|"]
    for part in budget.parts:
        lines.append(f"| {cell(part.name)} | {format_gib(part.bytes)} | {cell(part.source)} |")
    if command:
        lines += ["", *fenced(command)]
    return "\n".join(lines) + "\n"
