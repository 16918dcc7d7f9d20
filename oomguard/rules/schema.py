"""Check the tables of a rule file: each mistake names file, key and line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from oomguard.core.errors import RuleError
from oomguard.core.files import read_regular
from oomguard.rules.expressions import Expression, suggestion

# The permitted keys of each table: their type, and whether they are required.
#
# A nested table has its own row; any key not listed here is a mistake.

SCHEMA: Final = 1


class Key(NamedTuple):
    """Describe the value of one key."""

    type: type | tuple[type, ...]
    required: bool = False


# Selects the failures of a row in the table of actions.
_WHERE: Final = {
    name: Key(list)
    for name in ("kinds", "causes", "except_causes", "frameworks", "phases", "when", "unknown")
} | {"versions": Key(str)}

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


MAX_FILE_BYTES: Final = 1 << 20
MAX_KEY_PARTS: Final = 20
_SHOWN_CHARS: Final = 300  # of a mistake, so that a hostile file's text is not printed in full
# The TOML library's time grows with the square of a dotted key's parts, so oomguard rejects such a
# key unread.
_KEY_PART: Final = r"""(?:[\w-]++|"(?:\\.|[^"\\\n])*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY: Final = re.compile(
    rf"(?m)^[ \t]*+\[*+[ \t]*+(?:{_KEY_PART}\.[ \t]*+){{{MAX_KEY_PARTS}}}"
)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a rule file; raises RuleError if it is unreadable or not TOML."""
    import tomllib  # a start with cached rules does not need it

    try:
        text = _text(path)
        deep = _DEEP_KEY.search(text)
        if deep is not None:
            at = _place(text, deep.start())
            raise RuleError(
                f"a dotted key has more than {MAX_KEY_PARTS} parts",
                path=str(path),
                line=at[0],
                column=at[1],
            )
        return tomllib.loads(text)
    except OSError as error:
        raise RuleError(f"cannot read the file: {error.strerror}", path=str(path)) from None
    except UnicodeDecodeError:
        raise RuleError("not UTF-8", path=str(path)) from None
    except RecursionError:
        raise RuleError("nested too deeply", path=str(path)) from None
    except ValueError as error:  # TOMLDecodeError, or a number with too many digits
        where = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(where.group(1)), int(where.group(2))) if where else (None, None)
        if "(at end of document)" in str(error):
            line, column = _place(text, len(text))
        message = re.sub(r" \(at .*\)$", "", str(error))[:_SHOWN_CHARS]
        raise RuleError(f"not TOML: {message}", path=str(path), line=line, column=column) from None


def _text(path: Path) -> str:
    text = read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


@functools.cache
def _required(schema: str) -> tuple[str, ...]:
    """Return the required keys of a schema."""
    return tuple(name for name, key in KEYS[schema].items() if key.required)


class Table:
    """Hold one table of a file and check its keys on construction.

    Args:
        value: the table from the parser.
        path: the file, for messages.
        key: the dotted path of the table in the file; "" for the file itself.
        schema: the row of ``KEYS`` with the permitted keys.

    Raises:
        RuleError: an unknown key, a missing one, or a value of the wrong type.
    """

    def __init__(self, value: Any, path: Path, key: str, schema: str) -> None:
        self.path = path
        self.key = key
        known = KEYS[schema]
        if not isinstance(value, dict):
            raise self.error(f"expected a table, found {type(value).__name__}")
        self.values: dict[str, Any] = value
        for name, entry in value.items():
            if name not in known:
                raise self.error(f"unknown key {name!r}", name, hint=suggestion(name, known))
            expected = known[name].type
            # Python treats a bool as an int, but the author of a rule does not.
            if not isinstance(entry, expected) or (
                isinstance(entry, bool) and expected is not bool
            ):
                if isinstance(expected, type):
                    wanted = expected
                else:
                    wanted = expected[-1]
                raise self.error(f"expected {wanted.__name__}, found {type(entry).__name__}", name)
        for name in _required(schema):
            if name not in value:
                raise self.error(f"the key {name!r} is missing")
        if value.get("schema", SCHEMA) != SCHEMA:
            raise self.error(
                f"schema {value['schema']} is unknown; this version reads schema {SCHEMA}",
                "schema",
            )

    def error(self, message: str, name: str | None = None, *, hint: str | None = None) -> RuleError:
        """Return the error for a mistake at one key of this table (None: at the table itself)."""
        key = ".".join(part for part in (self.key, name) if part) or None
        line, column = _position(self.path, self.key, name)
        message = _shortened(message)
        key = None if key is None else _shortened(key)
        return RuleError(message, path=str(self.path), key=key, line=line, column=column, hint=hint)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value unchanged, or ``default`` for an absent key."""
        return self.values.get(name, default)

    def choice(
        self, name: str, known: Mapping[str, object] | tuple[str, ...], default: str | None = None
    ) -> str:
        """Return a text that must be one of ``known``; raises RuleError for any other."""
        value = self.values.get(name, default)
        if value not in known:
            raise self.error(
                f"{value!r} is not a known {name}", name, hint=suggestion(str(value), known)
            )
        return str(value)

    def choices(
        self, name: str, known: Mapping[str, object] | tuple[str, ...], what: str
    ) -> tuple[str, ...]:
        """Return a list of texts that must all be in ``known``; empty for an absent key.

        Raises:
            RuleError: a text is unknown; ``what`` is its name in the message (a kind, a fact).
        """
        for value in self.values.get(name, ()):
            if value not in known:
                raise self.error(
                    f"unknown {what} {value!r}", name, hint=suggestion(str(value), known)
                )
        return tuple(self.values.get(name, ()))

    def tables(self, name: str, schema: str) -> list[Table]:
        """Return the rows of an array of tables, each checked; raises RuleError."""
        rows = self.values.get(name, [])
        return [
            Table(row, self.path, f"{self.key}{'.' if self.key else ''}{name}[{i}]", schema)
            for i, row in enumerate(rows)
        ]

    def expressions(self, name: str, make: Callable[..., Expression]) -> tuple[Expression, ...]:
        """Return a list of conditions, made from texts by ``make``; raises RuleError."""
        if self.key:
            prefix = f"{self.key}."
        else:
            prefix = ""
        found = []
        for i, row in enumerate(self.values.get(name, [])):
            try:
                found.append(make(row, path=str(self.path), key=f"{prefix}{name}[{i}]"))
            except RuleError as error:
                if error.column is None:  # the mistake is the value itself: point at the list
                    error.line, error.column = _position(self.path, self.key, name)
                raise
        return tuple(found)


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}…"


def _place(text: str, position: int) -> tuple[int, int]:
    """Return the 1-based line and column of a position."""
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


def _position(path: Path, table: str, name: str | None) -> tuple[int | None, int | None]:
    """Find the 1-based line and column of a key in the text, or None if not found.

    TOML parsers do not report positions. In an array of tables (``fix[1]``) the search begins at
    that table's own header.
    """
    if name is None:
        return None, None
    try:
        lines = _text(path).splitlines()
    except (OSError, ValueError):
        return None, None
    first = 0
    inside = re.match(r"(\w+)\[(\d+)\]", table)
    if inside:
        headers = [
            i
            for i, line in enumerate(lines)
            if re.match(rf"\s*\[\[\s*{inside.group(1)}\s*\]\]", line)
        ]
        if int(inside.group(2)) < len(headers):
            first = headers[int(inside.group(2))]
        else:
            first = 0
    pattern = re.compile(rf"(?:^|[\s{{,.\[]){re.escape(name)}\s*[=\]]")
    for number, line in enumerate(lines[first:], first + 1):
        match = pattern.search(line)
        if match:
            return number, line.index(name, match.start()) + 1
    return None, None
