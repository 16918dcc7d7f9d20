"""Patterns of signatures: compiled so that wrapped lines match, their groups named after facts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from oomguard.errors import RuleError, SettingError
from oomguard.facts import GIB, REGISTRY, Fact, coerce
from oomguard.rules.expressions import suggestion
from oomguard.rules.repetition import too_much_repetition

MAX_PATTERN_CHARS: Final = 4000
_DECIMAL: Final = "_decimal_gb"

# What ``{size}`` in a pattern stands for: a size with its unit, as any engine prints it. It begins where its digits
# begin, so that a long row of digits is tried once and not again from each digit. Scripts without
# spaces go on right behind the unit.
SIZE: Final = (
    r"-?(?<!\d,?)\d[\d,]*(?:\.\d+|\.(?=\s[KMGT]i?B))?"
    r"(?:(?:\s?|\n\x20{1,12})(?:[KMGTPE]i?B|[KMGT]b?|bytes|byte|B)(?![A-Za-z\d_]))?"
)


def compile_pattern(text: str, *, path: str, key: str) -> Any:
    """Compile a pattern of a signature.

    A plain space matches any white space, so that wrapped lines match too. ``{size}`` stands for a number and its unit
    ("24.56 MiB", "1000000"). A group is named after the fact it fills (see ``group_fact``), or begins with ``_``.

    Args:
        text: the pattern as its author wrote it.
        path: the file, for messages.
        key: the dotted path of the pattern inside the file, for messages.

    Raises:
        RuleError: with the column of the mistake in the author's own text.
    """
    import regex

    if len(text) > MAX_PATTERN_CHARS:
        raise RuleError(f"pattern longer than {MAX_PATTERN_CHARS} characters", path=path, key=key)
    written, text = text, text.replace("{size}", SIZE)
    refusal = too_much_repetition(text)
    if refusal is not None:
        raise RuleError(f"not a pattern: {refusal[1]}", path=path, key=key, column=_column(written, refusal[0]))
    mistakes = (regex.error, ValueError, RecursionError, OverflowError, MemoryError)
    try:
        compiled = trusted_pattern(text)
    except mistakes as flexible_error:
        found, position = flexible_error, None
        try:
            regex.compile(text)  # as it was written, so that the column of a mistake is the author's
        except mistakes as own_error:
            found, position = own_error, getattr(own_error, "pos", None)
        column = None if position is None else _column(written, position)
        raise RuleError(f"not a pattern: {getattr(found, 'msg', found)}", path=path, key=key, column=column) from None
    for group in compiled.groupindex:
        if group_fact(group) is None and not group.startswith("_"):
            hint = suggestion(group, REGISTRY)
            raise RuleError(f"the group {group!r} is no fact", path=path, key=key, hint=hint)
    return compiled


def trusted_pattern(text: str) -> Any:
    """Compile a pattern that ``compile_pattern`` takes, without its checks: for the shipped ones, which a test checks."""
    import regex

    return regex.compile(_flexible_spaces(text.replace("{size}", SIZE)))


def group_fact(group: str) -> str | None:
    """Return the fact that a named group fills, None if it names none.

    The fact ``tried_bytes`` is filled by the groups ``tried_bytes`` (bytes), ``tried`` (a size with its unit),
    ``tried_gib`` (a bare figure in GiB), ``tried_kib`` (one in KiB) and ``tried_decimal_gb`` (one in 10^9 bytes). A
    trailing ``__2`` fills the same fact from a second place of the pattern.
    """
    group = re.sub(r"__\d+\Z", "", group)
    if group in REGISTRY:
        return group
    name = f"{group.removesuffix('_gib').removesuffix('_kib').removesuffix(_DECIMAL)}_bytes"
    return name if name in REGISTRY else None


def group_value(group: str, text: str) -> Fact:
    """Return the fact that a captured group tells; raises SettingError for a text that is not of the fact's type."""
    name = group_fact(group)
    if name is None:
        raise SettingError(f"the group {group!r} is no fact")
    # numpy's "306. GiB", Kubernetes' "41Gi"
    text = re.sub(r"(\d[KMGT]i)\Z", r"\1B", re.sub(r"(?<=\d)\.(?=\s)", "", text))
    unit = re.sub(r"__\d+\Z", "", group)
    if name != unit and name.endswith("_bytes") and not unit.endswith(("_gib", _DECIMAL)) and _is_cut(text):
        raise SettingError(f"{text} has no unit")
    if unit.endswith(_DECIMAL):
        fact = coerce(name, f"{text} GiB")
        return replace(fact, value=round(float(text) * 10**9), slack=fact.slack * 10**9 / GIB)
    for suffix, words in (("_gib", "GiB"), ("_kib", "KiB")):
        if unit.endswith(suffix):
            text = f"{text} {words}"
    return coerce(name, text)


def _is_cut(size: str) -> bool:
    """Return whether a size has lost its unit: bytes are whole numbers, and nobody prints so few of them."""
    return re.fullmatch(r"-?\d+\.\d*|-?\d{1,3}", size) is not None


def _column(written: str, position: int) -> int:
    """Return the 1-based column in the author's pattern, from a position in the text with ``{size}`` written out."""
    at = 0
    for part in re.split(r"(\{size\})", written):
        length = len(SIZE) if part == "{size}" else len(part)
        if position < length:
            return at + 1 + (0 if part == "{size}" else position)
        position -= length
        at += len(part)
    return len(written) + 1


def _flexible_spaces(text: str) -> str:
    out, in_class, i = [], False, 0
    while i < len(text):
        char = text[i]
        if char == "\\" and i + 1 < len(text):
            escaped = text[i : i + 2]
            out.append(r"\s+" if escaped == "\\ " and not in_class else escaped)
            i += 2
            continue
        if char == "[":
            in_class = True
        elif char == "]":
            in_class = False
        if char == " " and not in_class:
            quantifier = text[i + 1 : i + 2]
            out.append(r"\s*" if quantifier in {"?", "*"} else r"\s+")
            i += 1 + (quantifier != "" and quantifier in "?*+")
            continue
        out.append(char)
        i += 1
    return "".join(out)
