"""Find the request lengths that a command needs, from its flags and from refusals."""

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
    """Return the shortest length that the command's own requests need, by the setting for it.

    The mapping is empty if the command states no length.
    """
    found = [
        need for command in inner_commands(launch.argv) for need in _needs(command) if need.value
    ]
    if found:
        return {table()["refusals"]["setting"]: max(found, key=lambda need: need.value)}
    return {}


def refused_length(text: str, settings: Mapping[str, FactValue]) -> Mapping[str, LeastValue]:
    """Return the length that the engine refused under these settings; empty without a refusal.

    A refusal under another limit than ours does not count. If the refusal prints no length, any
    lower limit would be refused, so the least length is ``inf``.
    """
    name = table()["refusals"]["setting"]
    for pattern in _patterns() if name in settings else ():
        for found in pattern.finditer(text):
            named = found.groupdict()
            if named.get("most", str(settings[name])) != str(settings[name]):
                continue
            asked = named.get("asked")
            needed = named.get("needed")
            tokens = math.inf
            if asked:
                tokens = int(asked)
            elif needed:
                tokens = int(needed) + 1
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
    tokens = 0
    shown: list[str] = []
    for part in row["parts"]:
        flag = next((flag for flag in part["flags"] if _count(given.get(flag)) is not None), None)
        if flag is None:
            tokens += part.get("other", 0)
        else:
            tokens += _count(given[flag]) or 0
            shown.append(f"{flag} {given[flag]}")
    share = given.get(row.get("stretch", ""), "")
    if re.fullmatch(r"0?\.\d{1,6}|1(?:\.0)?", share):
        tokens = math.ceil(tokens * (1 + float(share)))
    return LeastValue(tokens, f"the command asks for ({' '.join(shown) or 'by default'})")


def _count(text: str | None) -> int | None:
    if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    return None


def _numbers(args: Sequence[str]) -> dict[str, str]:
    """Return the value of each long flag; the last one if a flag is repeated."""
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
