"""Show the checks of ``oomguard doctor`` on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from oomguard.core.records import Check, Status
from oomguard.report.json import SCHEMA, json_line, plain_value
from oomguard.report.presentable import drawn

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: Final[dict[Status, str]] = {"ok": "green", "unknown": "yellow", "problem": "bold red"}
_MARK_COLUMNS: Final = 9


def to_json(checks: Iterable[Check]) -> str:
    """Return the checks as one line of JSON, with secrets masked."""
    return json_line(
        {"schema": SCHEMA, "checks": [plain_value(asdict(_fit(check))) for check in checks]}
    )


def print_checks(console: Console, checks: Iterable[Check]) -> None:
    """Print one line for each check, its advice, and the counts, with secrets masked."""
    from rich.text import Text

    shown = [_fit(check) for check in checks]
    for check in shown:
        line = Text(f"{check.status:<{_MARK_COLUMNS}}", style=_STYLES[check.status]).append(
            check.text, style="not bold"
        )
        console.print(_writable(console, line), soft_wrap=True)
        if check.advice:
            advice = Text(f"{'':<{_MARK_COLUMNS}}do: ", style="dim").append(
                check.advice, style="not dim cyan"
            )
            console.print(_writable(console, advice), soft_wrap=True)
    counts = ", ".join(f"{sum(c.status == name for c in shown)} {name}" for name in _STYLES)
    console.print(f"{len(shown)} checks: {counts}", markup=False, highlight=False)


def _fit(check: Check) -> Check:
    """Return a printable check on one line.

    A variable's value or a process's name may contain a secret or an escape.
    """
    return drawn(
        replace(check, text=check.text.replace("\n", ""), advice=check.advice.replace("\n", ""))
    )


def _writable(console: Console, text: object) -> object:
    """Replace characters that the console's encoding lacks."""
    from rich.text import Text

    encoding = console.encoding or "utf-8"
    if not isinstance(text, Text) or encoding.lower().startswith("utf"):
        return text
    return Text(text.plain.encode(encoding, "replace").decode(encoding))
