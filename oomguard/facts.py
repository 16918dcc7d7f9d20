"""Facts: the values that oomguard reasons over, each named and typed by the registry, and told where it is from.

A figure an engine printed is rounded: ``slack`` holds half of its last digit, in the fact's own unit, so that solvers
can stay on the safe side of the rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from oomguard.errors import SettingError
from oomguard.fact_registry import REGISTRY, FactValue
from oomguard.records import Record

__all__ = [
    "GIB", "MIB", "REGISTRY", "YES_NO", "Fact", "FactValue", "Size", "coerce", "format_gib", "format_rounded", "is_of_type",
    "number_of", "parse_size",
]  # fmt: skip

GIB: Final = 2**30
MIB: Final = 2**20


@dataclass(frozen=True, slots=True, repr=False)
class Fact(Record):
    """One value: ``source`` is ``printed``, ``command``, ``script`` (a flag that the program may
    ignore), ``given``, ``measured``, ``config`` or ``solved``.

    ``slack`` is half of the last printed digit in the fact's unit (0 for an exact value); ``line`` is the 1-based line
    of the log that it was read from, None for any other source.
    """

    name: str
    value: FactValue
    source: str = "printed"
    slack: float = 0.0
    line: int | None = None


def number_of(facts: Mapping[str, Fact], name: str) -> float | None:
    """Return the value of a numeric fact, in the unit of its name; None if unknown (unknown is never zero)."""
    fact = facts.get(name)
    return None if fact is None or isinstance(fact.value, (str, bool)) else fact.value


# Engines write GB and mean 2^30 (old vLLM, MPS); nobody in this field prints a decimal gigabyte for device memory.
_UNIT_BYTES: Final = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "b", "ib")
}
_SIZE = re.compile(r"\s*([+-]?\d[\d,]*(?:\.\d+)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*\Z")

YES_NO: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _countable(text: str) -> int:
    digits = text.replace(",", "")
    if len(digits) > 18:  # more than any count has, and more than every double holds
        raise ValueError(text)
    return int(digits)


@dataclass(frozen=True, slots=True)
class Size:
    """A size in bytes and half of its last printed digit, in bytes."""

    bytes: int
    slack_bytes: float


def is_of_type(name: str, value: object) -> bool:
    """Return whether a value may stand in the fact ``name``: of its type, and finite."""
    kind = REGISTRY[name].type
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, int if kind == "int" else (int, float)) and abs(value) < 2**65


def parse_size(text: str) -> Size:
    """Read ``8GiB``, ``24.56 MiB``, ``1000000`` or ``-0.5 GiB`` as bytes (2^10 steps).

    Raises SettingError for a text that is not a size.
    """
    match = _SIZE.match(text)
    factor = _UNIT_BYTES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise SettingError(f"not a size: {text!r}", hint="write a number and a unit, for example 8GiB or 512MiB")
    number = match.group(1).replace(",", "")
    decimals = len(number.partition(".")[2])
    slack = 0.0 if factor == 1 else 0.5 * 10.0**-decimals * factor
    try:
        return Size(round(_finite(number) * factor), slack)
    except (ValueError, OverflowError):
        raise SettingError("not a size: more digits than any memory has") from None


def format_gib(size_bytes: float, digits: int = 2) -> str:
    """Write bytes as GiB with the same precision everywhere; below 0.1 GiB as MiB, so that no figure reads 0.00."""
    magnitude = abs(size_bytes)
    if magnitude >= 0.1 * GIB or magnitude == 0:
        return f"{size_bytes / GIB:.{digits}f} GiB"
    if magnitude >= 0.1 * MIB:
        return f"{size_bytes / MIB:.{digits}f} MiB"
    return f"{size_bytes:.0f} bytes"


def format_rounded(size_bytes: float, slack_bytes: float) -> str:
    """Write a printed size without claiming more digits than were printed: "0.0 GiB" is not zero."""
    if slack_bytes and size_bytes == 0:
        return f"less than {f'{slack_bytes / GIB:.2g} GiB' if slack_bytes >= 0.001 * GIB else format_gib(slack_bytes)}"
    if slack_bytes > 0.1 * abs(size_bytes):
        return f"about {size_bytes / GIB:.2g} GiB"
    return format_gib(size_bytes)


def coerce(name: str, text: str) -> Fact:
    """Turn the text of a captured group or of ``--set`` into the fact ``name``; a size may carry a unit.

    Raises SettingError for an unknown name or a text of the wrong type.
    """
    if (spec := REGISTRY.get(name)) is None:
        raise SettingError(f"unknown fact: {name}")
    if spec.name.endswith("_bytes"):
        size = parse_size(text)
        return Fact(name, size.bytes, slack=size.slack_bytes)
    try:
        if spec.type == "int":
            return Fact(name, _countable(text))
        if spec.type == "float":
            return Fact(name, _finite(text), slack=0.5 * 10.0 ** -len(text.partition(".")[2]))
        if spec.type == "bool":
            return Fact(name, YES_NO[text.lower()])
    except (ValueError, KeyError):
        raise SettingError(f"{name} is {spec.type}, not {text!r}") from None
    return Fact(name, text)
