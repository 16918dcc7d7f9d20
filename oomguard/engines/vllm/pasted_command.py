"""Translate a pasted ``vllm serve`` command into the options of ``oomguard plan``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from oomguard.core.errors import InputError
from oomguard.core.settings import flag_words, surface, surfaces, table_of
from oomguard.engines.command import AllFlags, all_flags

# Modules that read vLLM commands are imported when needed: most plans use oomguard's options only.
NAME: Final = "vllm"
_MODEL: Final = "model"
_LONG: Final = "--"
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_FLAG_ENDS: Final = re.compile(r"[=.]")
_NUMBER: Final = re.compile(r"-\d")
_OFF: Final = "no-"
_CLOSE: Final = 0.6


@dataclass(frozen=True, slots=True)
class Pasted:
    """A command's words as options of ``plan``.

    Attributes:
        words: oomguard's options, with vLLM's settings translated.
        not_counted: flags that take memory and have no option, as typed, each with its reason.
        kept: vLLM's flags without an option, with their values, as typed; a command to paste
            includes them again.
        unknown: the first flag that no vLLM version has; None without one.
        nearest: known flags with a similar name, if there is an unknown one.
    """

    words: list[str]
    not_counted: list[str]
    kept: tuple[str, ...] = ()
    unknown: str | None = None
    nearest: tuple[str, ...] = ()


def read_pasted(words: Sequence[str], options: Mapping[str, bool]) -> Pasted:
    """Read a command line that may be vLLM's, with or without ``vllm serve`` in front.

    Args:
        words: the arguments.
        options: oomguard's flags, and whether a value follows each.

    Raises:
        InputError: the file of ``--config`` cannot be read.
    """
    flags = all_flags(NAME)
    left = _without_program(list(words))
    own = list[str]()
    theirs = list[str]()
    kept = list[str]()
    reasons = dict[str, str]()
    models: list[str] = []
    at = 0
    while at < len(left):
        word = left[at]
        if word == "--":
            own += left[at:]
            break
        if not word.startswith("-") or _NUMBER.match(word):
            own.append(word)
            at += 1
            continue
        end = _end_of_ours(left, at, options, flags)
        if end is not None:
            own += left[at:end]
            at = end
            continue
        name = flags.name_of(word)
        if name is None:
            if word.startswith("--"):
                return Pasted(own, [], (), word.partition("=")[0], _nearest(word, options, flags))
            # A short form: click reports what is wrong with it.
            own.append(word)
            at += 1
            continue
        end = _end_of_theirs(left, at, name, flags)
        if "=" in word:
            value = left[at].partition("=")[2]
        else:
            value = " ".join(left[at + 1 : end])
        if name == _MODEL:
            models.append(value)
        elif name in _config_flags():
            theirs = [*_of_file(value), *theirs]
            kept += left[at:end]
        elif name in flags.means:
            theirs += _meant(flags.means[name])
        else:
            theirs += left[at:end]
            if not _as_options(left[at:end], options):
                kept += left[at:end]
            if name in flags.takes_memory and not _is_read(name, word, value):
                reasons.setdefault(
                    name, f"{_FLAG_ENDS.split(word)[0]} ({flags.takes_memory[name]})"
                )
        at = end
    given = _as_options(theirs, options)
    return Pasted([*models[-1:], *given, *own], [*reasons.values()], tuple(kept))


def _config_flags() -> set[str]:
    return {flag.removeprefix(_LONG) for flag in table_of(NAME, "server")["config_flags"]}


def _meant(settings: Mapping[str, str]) -> list[str]:
    """Return settings by name as words of a command line."""
    words: list[str] = []
    for name, value in settings.items():
        words += flag_words(name, value, NAME) or ()
    return words


def _without_program(words: list[str]) -> list[str]:
    """Return the words without variables and program at the start (``vllm serve`` or a module)."""
    programs = [tuple(program) for program in table_of(NAME, "server")["programs"]]
    for at in range(len(words) - 1):
        if (PurePath(words[at]).name, words[at + 1]) not in programs:
            continue
        before = words[:at]
        if words[at] == "-m" and before and PurePath(before[-1]).name.startswith("python"):
            before.pop()
        while before and (_ASSIGNMENT.match(before[-1]) or before[-1] in {"--", "env"}):
            before.pop()
        return [*before, *words[at + 2 :]]
    return words


def _end_of_ours(
    words: Sequence[str], at: int, options: Mapping[str, bool], flags: AllFlags
) -> int | None:
    """Return the index after an option of oomguard.

    None if it is not one, or if only vLLM's parser understands its value.
    """
    flag, equals, value = words[at].partition("=")
    if flag not in options:
        return None
    takes_value = options[flag]
    if equals or not takes_value:
        end = at + 1
    else:
        end = min(at + 2, len(words))
    if not equals and takes_value:
        if end == at + 2:
            value = words[end - 1]
        else:
            value = ""
    name = flags.name_of(flag)
    if name is not None and takes_value and _is_vllms_own(name, value, flags):
        return None
    return end


def _is_vllms_own(name: str, value: str, flags: AllFlags) -> bool:
    """Return whether only vLLM's parser takes a value: several words, ``32k``, or ``auto``."""
    own = surface(name.replace("-", "_"), NAME)
    return (
        name in flags.many
        or value.lower() in own.automatic
        or (value[-1:] in own.suffixes and value[:-1].isdigit())
    )


def _end_of_theirs(words: Sequence[str], at: int, name: str, flags: AllFlags) -> int:
    """Return the index after the values of a vLLM flag.

    If a flag takes several values and no other word can be the model, its last word is the model.
    """
    end = flags.end_of(words, at, name)
    if (
        name in flags.many
        and end > at + 2
        and not _has_model(words[:at], flags)
        and not _has_model(words[end:], flags)
    ):
        if not words[end - 1].isdigit():
            return end - 1
        return end
    return end


def _has_model(words: Sequence[str], flags: AllFlags) -> bool:
    """Return whether one of the words is a positional argument, or the model's flag."""
    at = 0
    while at < len(words):
        if words[at].startswith("-"):
            name = flags.name_of(words[at])
        else:
            name = None
        if not words[at].startswith("-") or name == _MODEL:
            return True
        if name is not None:
            at = flags.end_of(words, at, name)
        else:
            at = at + 2
    return False


def _of_file(path: str) -> list[str]:
    """Return the settings of a ``--config`` file as words. Raises InputError."""
    from oomguard.engines.vllm.command import read_config_file

    file = read_config_file(path, NAME, is_of_subcommand=True)
    if file is None:
        raise InputError(
            f"{path}: cannot be read as a vLLM config file (YAML with vLLM's flags)",
            hint="Give the flags on the command line instead.",
        )
    words: list[str] = []
    for name, own in file.settings.items():
        words += flag_words(name, own.value, NAME) or ()
    return words


def _as_options(words: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Return the settings among vLLM's flags as options of oomguard."""
    found: list[str] = []
    if not words:
        return found
    from oomguard.engines.command import settings_given

    for name, given in settings_given(words, NAME, own=True).items():
        flag_and_value = flag_words(name, given.value, NAME)
        if flag_and_value is not None and flag_and_value[0] in options:
            found += flag_and_value
    return found


def _is_read(name: str, word: str, value: str) -> bool:
    """Return whether oomguard counts all that a JSON flag sets: each key is a known setting."""
    keys = set()
    for own in surfaces(NAME).values():
        for flag, key in own.inside:
            if flag.removeprefix(_LONG) == name:
                keys.add(key)
    dotted = word.partition("=")[0].partition(".")[2]
    if dotted:
        return dotted in keys
    try:
        held = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(held, dict) and bool(keys) and set(held) <= keys


def _nearest(word: str, options: Collection[str], flags: AllFlags) -> tuple[str, ...]:
    """Return known flags with a similar name, with the same leading dashes."""
    import difflib

    known = [*(option.removeprefix(_LONG) for option in options), *sorted(flags.names)]
    flag = word.partition("=")[0]
    name = flag.removeprefix(_LONG)
    dashes = flag.removesuffix(name)
    closest = difflib.get_close_matches(name, known, n=2, cutoff=_CLOSE)
    # A name may be oomguard's and vLLM's.
    return tuple(dict.fromkeys(dashes + close for close in closest))
