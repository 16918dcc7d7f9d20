"""Reduce a ``vllm serve`` command to what determines the memory of its start.

Two commands with the same key are the same start, however they are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from oomguard.engines.command import Launch
from oomguard.engines.flag_table import AllFlags, all_flags
from oomguard.engines.start_key import StartKey
from oomguard.engines.vllm.own_command import NAME, ByFlags, own_command

_SERVE: Final = ("vllm", "serve")


def start_key(launch: Launch) -> StartKey | None:
    """Return the key of a ``vllm serve``: model, settings, other flags with memory, variables.

    None for any other command, for a word that cannot be read, and for a flag that no known version
    has. Address, served name, API keys and logging flags do not change the key.
    """
    own = own_command(launch.argv)
    if not isinstance(own, ByFlags) or (own.command.program, *own.command.args[:1]) != _SERVE:
        return None
    command = own.command
    if command.has_unread or command.is_elsewhere or command.has_no_others:
        return None
    others = list(_others(command.args[1:], all_flags(NAME)))
    if None in others:
        return None
    settings = {name: setting.value for name, setting in own.settings().items()}
    if settings.get("model") is None:
        return None
    return StartKey(
        settings,
        frozenset(filter(None, others)) | {f"{k}={v}" for k, v in command.variables.items()},
    )


def _others(words: tuple[str, ...], flags: AllFlags) -> Iterator[str | None]:
    """Yield each flag that takes memory and is not a setting, with its value.

    Yield None for an unknown flag, and end.
    """
    at = 0
    while at < len(words):
        if not words[at].startswith("-"):
            at += 1
            continue
        name = flags.name_of(words[at])
        if name is None or name == "config":
            yield None
            return
        end = flags.end_of(words, at, name)
        if name.removeprefix("no-") in flags.takes_memory:
            yield " ".join((name, words[at].partition("=")[2], *words[at + 1 : end]))
        at = end
