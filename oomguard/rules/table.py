"""One table of a rule file, checked against the keys it may have; it names its own mistakes with file, key and line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from oomguard.errors import RuleError
from oomguard.rules.expressions import Expression, compile_expression, suggestion

SCHEMA: Final = 1
MAX_FILE_BYTES: Final = 1 << 20
MAX_KEY_PARTS: Final = 20
_SHOWN_CHARS: Final = 300  # of a mistake: the text of a hostile file is not printed back whole
# The TOML library takes time with the square of a dotted key's parts, so such a key is refused unread.
_KEY_PART: Final = r"""(?:[\w-]++|"(?:\\.|[^"\\\n])*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY: Final = re.compile(rf"(?m)^[ \t]*+\[*+[ \t]*+(?:{_KEY_PART}\.[ \t]*+){{{MAX_KEY_PARTS}}}")

# Key -> (type, required). Nested tables have their own line; anything not named here is an error.
_KEYS: Final[dict[str, dict[str, tuple[type | tuple[type, ...], bool]]]] = {
    "signature": {
        "schema": (int, True), "kind": (str, False), "context": (bool, False), "framework": (str, True),
        "phase": (str, False), "wording": (list, True), "clause": (list, False), "wraps": (list, False),
        "becomes": (dict, False), "test": (list, True),
    },
    "wording": {
        "anchor": (str, False), "anchors": (list, False), "pattern": (str, True), "versions": (str, False), "source": (str, True),
        "facts": (dict, False), "phase": (str, False), "near": (bool, False), "starts": (bool, False),
        "framework": (str, False), "kind": (str, False),
    },
    "clause": {"pattern": (str, True)},
    "quotations": {"schema": (int, True), "quotation": (list, True)},
    "quotation": {
        "name": (str, True), "pattern": (str, True), "part": (str, True), "quoted": (list, True), "real": (list, False),
        "below_facts": (int, False),
    },
    "signature test": {"log": (str, True), "expect": (dict, False), "expect_no_match": (bool, False)},
    "rule": {
        "schema": (int, True), "code": (str, True), "cause": (str, True), "title": (str, True), "since": (str, True),
        "status": (str, True), "kinds": (list, True), "when": (list, True), "unknown": (list, False), "confidence": (list, True),
        "explain": (dict, True), "fix": (list, False), "reference": (list, True), "test": (list, True),
    },
    "confidence": {"base": ((int, float), False), "add": ((int, float), False), "when": (str, False)},
    "explain": {"summary": (str, True), "why": (str, True), "confirm": (str, True)},
    "fix": {
        "setting": (str, True), "effect": (str, True), "solve": (str, False), "value": (str, False),
        "when": (list, False), "tradeoff": (str, False), "alternative": (bool, False), "lever": (str, False),
        "missing": (str, False),
    },
    "reference": {"note": (str, True), "url": (str, False)},
    "rule test": {"kind": (str, True), "facts": (dict, True), "gives": (dict, False), "expect": (dict, False),
                  "expect_no_match": (bool, False)},
}  # fmt: skip


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a rule file; raises RuleError where it cannot be read or is not TOML."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RuleError(f"larger than {MAX_FILE_BYTES} bytes", path=str(path))
        text = path.read_text(encoding="utf-8-sig")
        deep = _DEEP_KEY.search(text)
        if deep is not None:
            at = _place(text, deep.start())
            raise RuleError(
                f"a dotted key of more than {MAX_KEY_PARTS} parts", path=str(path), line=at[0], column=at[1]
            )
        return tomllib.loads(text)
    except OSError as error:
        raise RuleError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except UnicodeDecodeError:
        raise RuleError("not UTF-8", path=str(path)) from None
    except RecursionError:
        raise RuleError("nested too deeply", path=str(path)) from None
    except ValueError as error:  # TOMLDecodeError, and a number with too many digits
        where = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(where.group(1)), int(where.group(2))) if where else (None, None)
        if "(at end of document)" in str(error):
            line, column = _place(text, len(text))
        message = re.sub(r" \(at .*\)$", "", str(error))[:_SHOWN_CHARS]
        raise RuleError(f"not TOML: {message}", path=str(path), line=line, column=column) from None


class Table:
    """One table of a file, checked against its keys on construction; knows how to name its own mistakes."""

    def __init__(self, value: Any, path: Path, key: str, schema: str) -> None:
        self.path, self.key = path, key
        known = _KEYS[schema]
        if not isinstance(value, dict):
            raise self.error(f"expected a table, found {type(value).__name__}")
        self.values: dict[str, Any] = value
        for name, entry in value.items():
            if name not in known:
                raise self.error(f"unknown key {name!r}", name, hint=suggestion(name, known))
            expected = known[name][0]
            # bool is an int to Python and not to the author of a rule
            if not isinstance(entry, expected) or (isinstance(entry, bool) and expected is not bool):
                wanted = expected if isinstance(expected, type) else expected[-1]
                raise self.error(f"expected {wanted.__name__}, found {type(entry).__name__}", name)
        for name, (_, required) in known.items():
            if required and name not in value:
                raise self.error(f"the key {name!r} is missing")
        if value.get("schema", SCHEMA) != SCHEMA:
            raise self.error(f"schema {value['schema']} is not known to this version, which reads {SCHEMA}", "schema")

    def error(self, message: str, name: str | None = None, *, hint: str | None = None) -> RuleError:
        """The mistake ``message`` at one key of this table."""
        key = ".".join(part for part in (self.key, name) if part) or None
        line, column = _position(self.path, self.key, name)
        message, key = _shortened(message), None if key is None else _shortened(key)
        return RuleError(message, path=str(self.path), key=key, line=line, column=column, hint=hint)

    def get(self, name: str, default: Any = None) -> Any:
        """A value as it was written, ``default`` where the key is absent."""
        return self.values.get(name, default)

    def choice(self, name: str, known: Iterable[str], default: str | None = None) -> str:
        """A text that has to be one of ``known``; raises RuleError."""
        value = self.values.get(name, default)
        options = tuple(known)
        if value not in options:
            raise self.error(f"{value!r} is not a known {name}", name, hint=suggestion(str(value), options))
        return str(value)

    def tables(self, name: str, schema: str) -> list[Table]:
        """The rows of an array of tables, each checked; raises RuleError."""
        rows = self.values.get(name, [])
        return [
            Table(row, self.path, f"{self.key}{'.' if self.key else ''}{name}[{i}]", schema)
            for i, row in enumerate(rows)
        ]

    def expressions(self, name: str) -> tuple[Expression, ...]:
        """A list of CEL conditions, compiled; raises RuleError."""
        prefix = f"{self.key}." if self.key else ""
        found = []
        for i, row in enumerate(self.values.get(name, [])):
            try:
                found.append(compile_expression(row, path=str(self.path), key=f"{prefix}{name}[{i}]"))
            except RuleError as error:
                if error.column is None:  # no mistake inside the expression: where the list is written
                    error.line, error.column = _position(self.path, self.key, name)
                raise
        return tuple(found)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _place(text: str, position: int) -> tuple[int, int]:
    """The 1-based line and column of a position."""
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


def _position(path: Path, table: str, name: str | None) -> tuple[int | None, int | None]:
    """Line and column where a key is written: TOML parsers keep no positions, so the text is looked through.

    In an array of tables (``fix[1]``) the search begins at that table's own header.
    """
    if name is None:
        return None, None
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None, None
    first = 0
    inside = re.match(r"(\w+)\[(\d+)\]", table)
    if inside:
        headers = [i for i, line in enumerate(lines) if re.match(rf"\s*\[\[\s*{inside.group(1)}\s*\]\]", line)]
        first = headers[int(inside.group(2))] if int(inside.group(2)) < len(headers) else 0
    pattern = re.compile(rf"(?:^|[\s{{,.\[]){re.escape(name)}\s*[=\]]")
    for number, line in enumerate(lines[first:], first + 1):
        match = pattern.search(line)
        if match:
            return number, line.index(name, match.start()) + 1
    return None, None
