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
    "lexicon": {
        "schema": Key(int, required=True),
        "anchors": Key(list, required=True),
        "phrase": Key(str, required=True),
        "bias": Key((int, float), required=True),
        "least_ratio": Key((int, float), required=True),
        "harmless": Key(list, required=True),
        "feature": Key(list, required=True),
        "nearest": Key(list, required=True),
        "other_phrases": Key(list),
        "words": Key(str),
        "class": Key(list),
        "title": Key(list),
        "account": Key(list),
        "clause": Key(list, required=True),
    },
    "class": {
        "name": Key(str, required=True),
        "words": Key(str, required=True),
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
    "harmless": {
        "name": Key(str, required=True),
        "part": Key(str),
        "pattern": Key(str, required=True),
    },
    "feature": {
        "name": Key(str, required=True),
        "part": Key(str, required=True),
        "pattern": Key(str, required=True),
        "weight": Key((int, float)),
    },
    "title": {
        "certainty_ratio": Key((int, float), required=True),
        **{name: Key(str, required=True) for name in ("phrase", "harmless", "change", "frames", "run", "other_error")},
    },
    "account": {
        "certainty_ratio": Key((int, float), required=True),
        **{name: Key(str, required=True) for name in ("phrase", "line", "report", "form", "document", "note")},
        **{name: Key(list, required=True) for name in ("tells", "denies")},
    },
    "nearest": {
        "kind": Key(str, required=True),
        "pattern": Key(str, required=True),
    },
    "quotations": {
        "schema": Key(int, required=True),
        "told": Key(str),
        "quotation": Key(list, required=True),
    },
    "quotation": {
        "name": Key(str, required=True),
        "pattern": Key(str, required=True),
        "part": Key(str, required=True),
        "quoted": Key(list, required=True),
        "real": Key(list),
        "below_facts": Key(int),
        "unless_told": Key(bool),
    },
    "told causes": {
        "schema": Key(int, required=True),
        "told": Key(list, required=True),
    },
    "told cause": {
        "cause": Key(str, required=True),
        "words": Key(list, required=True),
        "pattern": Key(str, required=True),
        "unless": Key(str),
        "examples": Key(list, required=True),
        "others": Key(list),
    },
    "stated figures": {
        "schema": Key(int, required=True),
        "unless_behind": Key(str, required=True),
        "stated": Key(list, required=True),
    },
    "stated figure": {
        "words": Key(list, required=True),
        "pattern": Key(str, required=True),
        "nominal": Key(bool),
        "lines_above": Key(int),
        "kinds": Key(list),
        "examples": Key(list, required=True),
        "others": Key(list),
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
