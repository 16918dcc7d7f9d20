"""How long the requests are that a command makes: by its own flags, and by the engine's refusal of
one that was too long.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.command import Launch
from oomguard.engines.unwrap_command import InnerCommand, inner_commands
from oomguard.engines.vllm.own_command import table
from oomguard.remedy.policy import LeastValue

_MOST_DIGITS: Final = 9


def asked_length(launch: Launch) -> Mapping[str, LeastValue]:
    """Return the least length of a request that the command itself asks for, by the setting that
    limits it; empty if none is told.
    """
    found = [
        need for command in inner_commands(launch.argv) for need in _needs(command) if need.value
    ]
    if found:
        return {table()["refusals"]["setting"]: max(found, key=lambda need: need.value)}
    return {}


def refused_length(text: str, settings: Mapping[str, FactValue]) -> Mapping[str, LeastValue]:
    """Return the length that the engine refused under one of these settings; empty where it refused
    none.

    A refusal under another length than ours is not due to us. Where it names no figure, any shorter
    length is refused: ``inf``.
    """
    name = table()["refusals"]["setting"]
    for pattern in _patterns() if name in settings else ():
        for found in pattern.finditer(text):
            named = found.groupdict()
            if named.get("most", str(settings[name])) != str(settings[name]):
                continue
            asked = named.get("asked")
            needed = named.get("needed")
            tokens = int(asked) if asked else int(needed) + 1 if needed else math.inf
            return {name: LeastValue(tokens, "a request of this run needs")}
    return {}


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in table()["refusals"]["patterns"])


def _needs(command: InnerCommand) -> list[LeastValue]:
    words = (command.program, *command.args)
    given = _numbers(command.args)
    rows = table()["lengths"]
    own = [row for row in rows if any(words[: len(of)] == tuple(of) for of in row.get("of", ()))]
    own = [row for row in own if not given.keys() & set(row.get("unless", ()))]
    found = own or [
        row for row in rows if "of" not in row and given.keys() & set(row["parts"][0]["flags"])
    ]
    return [_need(row, given) for row in found]


def _need(row: Mapping[str, Any], given: Mapping[str, str]) -> LeastValue:
    tokens, said = 0, []
    for part in row["parts"]:
        flag = next((flag for flag in part["flags"] if _count(given.get(flag)) is not None), None)
        tokens += part.get("other", 0) if flag is None else _count(given[flag]) or 0
        said += [f"{flag} {given[flag]}"] if flag is not None else []
    share = given.get(row.get("stretch", ""), "")
    if re.fullmatch(r"0?\.\d{1,6}|1(?:\.0)?", share):
        tokens = math.ceil(tokens * (1 + float(share)))
    return LeastValue(tokens, f"the command asks for ({' '.join(said) or 'by default'})")


def _count(text: str | None) -> int | None:
    if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    return None


def _numbers(args: Sequence[str]) -> dict[str, str]:
    """Return the value of each long flag; of a repeated one the last."""
    found: dict[str, str] = {}
    for i, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            if equals:
                found[flag.replace("_", "-")] = value
            elif i + 1 < len(args):
                found[flag.replace("_", "-")] = args[i + 1]
            else:
                found[flag.replace("_", "-")] = ""
    return found
