"""The report of a run: whether it can be written is known before the command runs, it is written when all has ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from oomguard.errors import UsageError
from oomguard.incident import Diagnosis

if TYPE_CHECKING:
    from oomguard.supervise.outcome import Outcome


def check_report(report: str | None) -> None:
    """Raise UsageError where a report is asked for that cannot be written."""
    if report is None:
        return
    path = Path(report)
    if path.suffix not in {".json", ".md", ".html"}:
        raise UsageError(f"--report {path}: unknown form", hint="end the name in .json, .md or .html")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--report {path}: the folder cannot be written", hint="name a folder that exists")


def write_report(path: Path, outcome: Outcome) -> None:
    """Write the report; a failure by now is told and leaves the command's own exit status alone."""
    from oomguard.log import get_logger
    from oomguard.report.attempts import report_text

    try:
        path.write_text(
            report_text(path.suffix, outcome.diagnosis or Diagnosis(""), outcome.attempts), encoding="utf-8"
        )
    except OSError as error:
        get_logger().warning("the report could not be written", path=str(path), reason=error.strerror)
