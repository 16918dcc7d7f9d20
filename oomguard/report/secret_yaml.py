"""Secrets in YAML whose value is on the lines behind its key: a list, or a block of text."""

from __future__ import annotations

import re
from typing import Final

from oomguard.report.secret_names import MASK, secrecy, tells

_KEY: Final = re.compile(r"^(?P<indent>[ ]{0,40})(?:- )?(?P<name>[\w.-]{1,100}):[ ]*(?P<block>[|>][+-]?\d?[+-]?)?[ ]*$")
_ITEM: Final = re.compile(r"^(?P<lead>[ ]*- )(?P<value>[^\s#].*)$")


def hide_in_yaml(text: str) -> str:
    """Replace what is below the key of a secret by ``***``, line by line."""
    if ":\n" not in text and "|" not in text and ">" not in text:
        return text
    lines = text.split("\n")
    key: re.Match[str] | None = None
    for number, line in enumerate(lines):
        if key is not None and _is_below(line, key):
            lines[number] = _hidden(line, key)
            continue
        found = _KEY.match(line)
        key = found if found is not None and secrecy(found["name"]) else None
    return "\n".join(lines)


def _is_below(line: str, key: re.Match[str]) -> bool:
    """Return whether a line belongs to a key's value: it is indented further, or an item of a list at the same place."""
    indent, own = len(line) - len(line.lstrip(" ")), len(key["indent"])
    is_item = not key["block"] and line.lstrip(" ").startswith("- ")
    return bool(line.strip()) and (indent > own or (indent == own and is_item))


def _hidden(line: str, key: re.Match[str]) -> str:
    if key["block"]:
        return f"{line[: len(line) - len(line.lstrip(' '))]}{MASK}"
    item = _ITEM.match(line)
    return f"{item['lead']}{MASK}" if item is not None and tells(key["name"], item["value"]) else line
