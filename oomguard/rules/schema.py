"""The keys that each table of a rule file may have: their type, and whether they are required.

A nested table has a row of its own; any key not listed here is a mistake.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SCHEMA: Final = 1


class Key(NamedTuple):
    """What one key holds."""

    type: type | tuple[type, ...]
    required: bool = False


# Which failures a row of the table of actions is for.
_WHERE: Final = {name: Key(list) for name in ("kinds", "causes", "frameworks", "phases", "when", "unknown")}

KEYS: Final[dict[str, dict[str, Key]]] = {
    "signature": {
        "schema": Key(int, required=True),
        "kind": Key(str),
        "context": Key(bool),
        "framework": Key(str, required=True),
        "phase": Key(str),
        "wording": Key(list, required=True),
        "clause": Key(list),
        "wraps": Key(list),
        "becomes": Key(dict),
        "test": Key(list, required=True),
    },
    "wording": {
        "anchor": Key(str),
        "anchors": Key(list),
        "pattern": Key(str, required=True),
        "versions": Key(str),
        "source": Key(str, required=True),
        "facts": Key(dict),
        "phase": Key(str),
        "near": Key(bool),
        "starts": Key(bool),
        "ends": Key(str),
        "role": Key(str),
        "framework": Key(str),
        "kind": Key(str),
    },
    "clause": {
        "pattern": Key(str, required=True),
    },
    "missing_file": {
        "schema": Key(int, required=True),
        "missing": Key(list, required=True),
    },
    "missing": {
        "kinds": Key(list),
        "frameworks": Key(list),
        "phases": Key(list),
        "unknown": Key(list),
        "what": Key(str, required=True),
        "command": Key(str, required=True),
        "of_a_log": Key(bool),
    },
    "actions_file": {
        "schema": Key(int, required=True),
        "situation": Key(list),
        "wording": Key(list),
        "never": Key(list),
    },
    "situation": {
        **_WHERE,
        "first": Key(list, required=True),
    },
    "never": {
        **_WHERE,
        "actions": Key(list, required=True),
    },
    "action wording": {
        "action": Key(str, required=True),
        **_WHERE,
        "title": Key(list),
        "why": Key(list),
        "command": Key(list),
    },
    "quotations": {
        "schema": Key(int, required=True),
        "quotation": Key(list, required=True),
    },
    "quotation": {
        "name": Key(str, required=True),
        "pattern": Key(str, required=True),
        "part": Key(str, required=True),
        "quoted": Key(list, required=True),
        "real": Key(list),
        "below_facts": Key(int),
    },
    "signature test": {
        "log": Key(str, required=True),
        "expect": Key(dict),
        "expect_no_match": Key(bool),
    },
    "rule": {
        "schema": Key(int, required=True),
        "code": Key(str, required=True),
        "cause": Key(str, required=True),
        "title": Key(str, required=True),
        "since": Key(str, required=True),
        "status": Key(str, required=True),
        "kinds": Key(list, required=True),
        "when": Key(list, required=True),
        "unknown": Key(list),
        "confidence": Key(list, required=True),
        "explain": Key(dict, required=True),
        "fix": Key(list),
        "reference": Key(list, required=True),
        "test": Key(list, required=True),
    },
    "confidence": {
        "base": Key((int, float)),
        "add": Key((int, float)),
        "when": Key(str),
    },
    "explain": {
        "summary": Key(str, required=True),
        "why": Key(str, required=True),
        "confirm": Key(str, required=True),
    },
    "fix": {
        "setting": Key(str, required=True),
        "effect": Key(str, required=True),
        "solve": Key(str),
        "value": Key(str),
        "when": Key(list),
        "tradeoff": Key(str),
        "alternative": Key(bool),
        "lever": Key(str),
        "missing": Key(str),
    },
    "reference": {
        "note": Key(str, required=True),
        "url": Key(str),
    },
    "rule test": {
        "kind": Key(str, required=True),
        "facts": Key(dict, required=True),
        "gives": Key(dict),
        "call": Key(dict),
        "expect": Key(dict),
        "expect_no_match": Key(bool),
    },
}
