"""A whole ``vllm serve`` command in the words of another one: its settings in the other's own
options, and what is left of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from oomguard.core.errors import InputError
from oomguard.core.setting_spellings import flag_words, surface, surfaces, table_of
from oomguard.engines.flag_table import AllFlags, all_flags

# Modules that read a command of vLLM load where there is one: most plans name settings of ours
# alone.
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
    """A command's words in the options of ``plan``.

    Attributes:
        words: what is ours, with vLLM's settings as options.
        not_counted: flags that take memory and are no option, as they were typed, each with its
            reason.
        kept: vLLM's flags that are no option, with their values, as they were typed: a command to
            paste has them again.
        unknown: the first flag that no version of vLLM has, None without one; ``nearest`` are flags
            that it may stand for.
    """

    words: list[str]
    not_counted: list[str]
    kept: tuple[str, ...] = ()
    unknown: str | None = None
    nearest: tuple[str, ...] = ()


def read_pasted(words: Sequence[str], options: Mapping[str, bool]) -> Pasted:
    """Read a command line that may be one of vLLM's, with or without ``vllm serve`` in front.

    Args:
        words: the arguments.
        options: the flags that are ours, and whether a value follows each.

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
            own.append(word)  # a short form: click says what is wrong with it
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
    """Return settings by their names as words."""
    return [
        word for name, value in settings.items() for word in flag_words(name, value, NAME) or ()
    ]


def _without_program(words: list[str]) -> list[str]:
    """Return the words without the program that they begin with, ``vllm serve`` or a module, and
    without variables before it.
    """
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
    """Return behind which word an option of ours ends, None where vLLM's own reading of it is
    needed or it is none.
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
    """Whether a value has a form that only vLLM's parser takes: several words, ``32k``, or the word
    for a value that it finds itself.
    """
    own = surface(name.replace("-", "_"), NAME)
    return (
        name in flags.many
        or value.lower() in own.automatic
        or (value[-1:] in own.suffixes and value[:-1].isdigit())
    )


def _end_of_theirs(words: Sequence[str], at: int, name: str, flags: AllFlags) -> int:
    """Return where the values of vLLM's flag end; several leave the last word where nothing else
    can be the model.
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
    """Whether one of the words stands by itself, or names the model by its flag."""
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
    """Return the settings of a file of flags as words."""
    from oomguard.engines.vllm.config_file import read_config_file

    file = read_config_file(path, NAME, is_of_subcommand=True)
    if file is None:
        raise InputError(
            f"{path}: no file of vLLM's flags that can be read", hint="give the flags themselves"
        )
    return [
        word
        for name, own in file.settings.items()
        for word in flag_words(name, own.value, NAME) or ()
    ]


def _as_options(words: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Return vLLM's settings among its flags as options of ours."""
    found: list[str] = []
    if not words:
        return found
    from oomguard.engines.command import settings_given

    for name, given in settings_given(words, NAME, own=True).items():
        said = flag_words(name, given.value, NAME)
        if said is not None and said[0] in options:
            found += said
    return found


def _is_read(name: str, word: str, value: str) -> bool:
    """Whether all that an object's flag holds is counted: its keys are those of settings."""
    keys = {
        key
        for own in surfaces(NAME).values()
        for inside, key in own.inside
        if inside.removeprefix(_LONG) == name
    }
    dotted = word.partition("=")[0].partition(".")[2]
    if dotted:
        return dotted in keys
    try:
        held = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(held, dict) and bool(keys) and set(held) <= keys


def _nearest(word: str, options: Collection[str], flags: AllFlags) -> tuple[str, ...]:
    """Return the flags that a word may stand for, behind the dashes that it has."""
    import difflib

    known = [*(option.removeprefix(_LONG) for option in options), *sorted(flags.names)]
    flag = word.partition("=")[0]
    name = flag.removeprefix(_LONG)
    dashes = flag.removesuffix(name)
    return tuple(
        dict.fromkeys(
            dashes + close for close in difflib.get_close_matches(name, known, n=2, cutoff=_CLOSE)
        )
    )
