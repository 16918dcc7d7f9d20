"""Times that a user writes: ``90``, which are seconds, ``30m``, ``1h30m``, ``1d2h``; one form for
every option that takes one.
"""

from __future__ import annotations

import datetime
import re
import time
from typing import Any, Final

import click

# What the units are worth.
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PARTS: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhdw])+")
_PART: Final = re.compile(r"([0-9.]+)([smhdw])")
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?|\.[0-9]+")
_LONGEST_S: Final = 10**9


def seconds_of(text: str) -> float | None:
    """Return a time in seconds, one without a unit is in seconds already; None where the text is no
    time.
    """
    text = text.strip().lower()
    if _PARTS.fullmatch(text):
        return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    if _NUMBER.fullmatch(text):
        return float(text)
    return None


def seconds_in(value: object) -> float | None:
    """Return a time of a file of options in seconds: a number, or text as a flag takes it; None
    where it is neither.
    """
    if isinstance(value, str):
        return seconds_of(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return None


class Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A time of at most 10^9 seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return it in seconds."""
        seconds = float(value) if isinstance(value, (int, float)) else seconds_of(str(value))
        if seconds is None or not 0 <= seconds <= _LONGEST_S:
            self.fail(f"{value!r} is no time such as 30m, 1h30m, or 90 (seconds)", param, ctx)
        return seconds


class Age(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A time before now. It needs a unit: who writes 7 may mean days."""

    name = "age"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return it in seconds."""
        text = str(value)
        seconds = None if _NUMBER.fullmatch(text.strip().lower()) else seconds_of(text)
        if seconds is None or seconds >= time.time():
            self.fail(
                f"{value!r} is no time before now: write 90m, 12h, 7d, 2w or 1d12h", param, ctx
            )
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A moment: an age as ``Age`` takes it, or a date or time of ISO 8601, which may be to come;
    one without a zone is local.
    """

    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return it in Unix seconds."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            return datetime.datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            pass
        seconds = None if _NUMBER.fullmatch(text.lower()) else seconds_of(text)
        now = time.time()
        if seconds is None or seconds >= now:
            self.fail(
                f"{value!r} is no moment: write 24h, 7d, 2026-11-20 or 2026-11-20T14:00", param, ctx
            )
        return now - seconds
