"""What ``oomguard doctor`` found, as lines for a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from oomguard.escapes import strip_escapes
from oomguard.report.mask import mask

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA: Final = 1
Status = Literal["ok", "unknown", "problem"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "unknown": "yellow", "problem": "bold red"}
_MARK_COLUMNS: Final = 9


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: ``text`` is what was found, ``advice`` what to do about it, as a command where one does it."""

    id: str
    status: Status
    text: str
    advice: str = ""


def to_json(checks: Iterable[Check]) -> str:
    """The checks as one JSON object on one line, secrets masked."""
    return json.dumps({"schema": SCHEMA, "checks": [asdict(_safe(check)) for check in checks]}, allow_nan=False)


def print_checks(console: Console, checks: Iterable[Check]) -> None:
    """One line a check with its mark, the advice below it, and a last line that counts; secrets masked."""
    from rich.text import Text

    shown = [_safe(check) for check in checks]
    for check in shown:
        line = Text(f"{check.status:<{_MARK_COLUMNS}}", style=_STYLES[check.status]).append(
            check.text, style="not bold"
        )
        console.print(_writable(console, line), soft_wrap=True)
        if check.advice:
            advice = Text(f"{'':<{_MARK_COLUMNS}}do: ", style="dim").append(check.advice, style="not dim cyan")
            console.print(_writable(console, advice), soft_wrap=True)
    counts = ", ".join(f"{sum(c.status == name for c in shown)} {name}" for name in _STYLES)
    console.print(f"{len(shown)} checks: {counts}", markup=False, highlight=False)


def _safe(check: Check) -> Check:
    """The check as it may be shown: a variable's value or a process's name may hold a secret or a terminal escape."""
    return replace(check, text=_clean(check.text), advice=_clean(check.advice))


def _clean(text: str) -> str:
    # A name of the file system may hold bytes that are no text (surrogates), which neither JSON nor a terminal takes.
    return mask(strip_escapes(text)).encode("utf-8", "replace").decode("utf-8")


def _writable(console: Console, text: object) -> object:
    """The text with what the console's encoding lacks replaced."""
    from rich.text import Text

    encoding = console.encoding or "utf-8"
    if not isinstance(text, Text) or encoding.lower().startswith("utf"):
        return text
    return Text(text.plain.encode(encoding, "replace").decode(encoding))
