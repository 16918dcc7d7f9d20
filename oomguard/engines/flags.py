"""An engine's flags in the words of a command, in every form that its parser takes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.shell_text import Unread
from oomguard.settings import SETTINGS
from oomguard.surfaces import Surface, grammar, surfaces

_LONG: Final = "--"
# A short flag has one letter, and its value may follow without a blank.
_SHORT_CHARS: Final = 2


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag found in a command line, from word ``start`` up to ``end``.

    ``text`` is its value, None for a yes/no setting, which is ``on`` or not, and for a flag without its value. ``keys`` leads to
    the value inside the object that the setting is; ``is_inside`` says that the flag is another one's, which holds the setting too.
    """

    name: str
    start: int
    end: int
    text: str | None
    on: bool | None
    keys: tuple[str, ...] = ()
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """An engine's flags: those that set something, those that switch it off, and those of objects that hold a setting."""

    sets: Mapping[str, str]
    off: Mapping[str, str]
    inside: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, Surface]


@functools.cache
def _known(engine: str) -> _Known:
    rows = surfaces(engine)
    spellings = [(name, own) for name, newest in rows.items() for own in (newest, *newest.others)]
    inside: dict[str, dict[str, str]] = {}
    for name, own in rows.items():
        for flag, key in own.inside:
            inside.setdefault(flag, {})[key] = name
    return _Known(
        {flag: name for name, own in spellings for flag in (*own.flags, *own.aliases)},
        {own.off_flag: name for name, own in spellings if own.off_flag and SETTINGS[name].type == "bool"},
        inside,
        rows,
    )


def flags_in(words: Sequence[str], engine: str, *, own: bool = False) -> Iterator[Flag]:
    """Find an engine's flags in a command line, those of any version, in every form.

    They are spelled with dashes or underscores, ``FLAG VALUE`` or ``FLAG=VALUE``.

    Args:
        words: the command line, or a part of it.
        engine: whose flags are looked for.
        own: whether the words go to the engine's own parser, with its abbreviations and the keys of its objects.
    """
    known, at = _known(engine), 0
    while at < len(words):
        found = _flag_at(words, at, known, engine, own=own)
        if found is not None:
            yield found
        at = max(at + 1, found.end if found is not None and found.text is not None else 0)


def _flag_at(words: Sequence[str], at: int, known: _Known, engine: str, *, own: bool) -> Flag | None:
    rules = grammar(engine)
    spelled, equals, text = words[at].partition("=")
    if not spelled.startswith("-"):
        return None
    keys: tuple[str, ...] = ()
    if own and rules.dotted:
        spelled, *more = spelled.split(".")
        keys = tuple(more)
    spelled = spelled.replace("_", "-") if spelled.startswith(_LONG) else spelled
    exact = spelled in known.sets or spelled in known.off or spelled in known.inside
    if own and rules.abbreviations and not exact:
        if spelled[:_SHORT_CHARS] in known.sets and not spelled.startswith(_LONG) and not equals:
            return Flag(known.sets[spelled[:_SHORT_CHARS]], at, at + 1, spelled[_SHORT_CHARS:], None)
        spelled = _unabbreviated(spelled, known, rules.whole) or spelled
    name = known.sets.get(spelled) or known.off.get(spelled)
    if name is not None and SETTINGS[name].type == "bool":
        return Flag(name, at, at + 1, None, spelled not in known.off)
    end = at + 1
    if not equals:
        end = _end_of_values(words, at, many=name is not None and known.rows[name].many and not keys)
        text = words[at + 1] if end == at + 2 else " ".join(words[at + 1 : end])
    elif isinstance(words[at], Unread):
        text = Unread(text)
    value = text if equals or end > at + 1 else None
    if name is not None:
        return Flag(name, at, end, value, None, keys)
    return _inside(known.inside.get(spelled, {}), at, end, value, keys)


def _unabbreviated(spelled: str, known: _Known, whole: Sequence[str]) -> str | None:
    """Return the flag that a cut one stands for, as argparse finds it; None where several settings begin so, or none does."""
    if spelled in whole or len(spelled) <= len(_LONG) or not spelled.startswith(_LONG):
        return None
    flags = [flag for flag in (*known.sets, *known.off, *known.inside) if flag.startswith(spelled)]
    meant = {known.sets.get(flag, flag) for flag in flags}
    return flags[0] if len(meant) == 1 else None


def _end_of_values(words: Sequence[str], at: int, *, many: bool) -> int:
    end = at + 1
    while many and end < len(words) and not words[end].startswith(_LONG):
        end += 1
    return end if many else min(at + 2, len(words))


def _inside(names: Mapping[str, str], at: int, end: int, text: str | None, keys: tuple[str, ...]) -> Flag | None:
    """Return the setting that an object's flag holds, None where it holds none that is known."""
    if not names or text is None:
        return None
    if keys:
        return Flag(names[keys[0]], at, end, text, None, is_inside=True) if keys[0] in names else None
    held = _as_object(text)
    for key, name in names.items():
        if held is not None and key in held:
            return Flag(name, at, end, json.dumps(held[key]), None, is_inside=True)
    return None


def _as_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def merged_object(parts: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """Return the object that flags of single keys make together, as JSON; of a repeated key the last one counts."""
    whole: dict[str, Any] = {}
    for keys, text in parts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        inner = whole
        for key in keys[:-1]:
            below = inner.get(key)
            if not isinstance(below, dict):
                below = inner[key] = {}
            inner = below
        inner[keys[-1]] = value
    return json.dumps(whole)
