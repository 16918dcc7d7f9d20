"""Check the tables of a rule file, and compile its expressions: each mistake names its place.

An expression is a small part of Python: facts, numbers, quoted texts, ``True`` and ``False``,
arithmetic (``+ - * /``), comparisons, ``in``, ``and``, ``or``, ``not`` and ``x if condition else
y``. ``ast`` parses it, and nothing executes it as code, so an untrusted rule file is safe to load.

A missing fact is unknown. ``and`` is false if one side is false, ``or`` is true if one side is
true. Every other operation with an unknown value is unknown.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from oomguard.core.errors import RuleError
from oomguard.core.facts import REGISTRY, Fact, FactValue
from oomguard.core.files import read_regular

Kind = Literal["number", "bool", "text"]
_Evaluate = Callable[[Mapping[str, Fact]], FactValue | None]

# By the types in the registries of facts and settings.
KINDS_OF_VALUE: Final[dict[str, Kind]] = {
    "int": "number",
    "float": "number",
    "bool": "bool",
    "str": "text",
}
_MAX_EXPRESSION_CHARS: Final = 2000
_MAX_BRACKETS: Final = 20  # nested
_MAX_DEPTH: Final = 100  # of nested operators
_SHOWN_CHARS: Final = 60  # of the expression, on either side of a mistake

_TOKEN: Final = re.compile(
    r"\s+|[a-z_]\w*|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.])"
    r"|'[^'\\\n]*'|\"[^\"\\\n]*\"|[<>=!]=|[][()<>,+*/-]",
    re.ASCII | re.IGNORECASE,
)
# Spellings of older versions (CEL) and other languages, with Python's form.
_OTHER_SPELLINGS: Final = {
    "&": "write and",
    "|": "write or",
    "!": "write not",
    "?": "write x if condition else y",
    "=": "write ==",
    "\\": "omit the backslash: put a text with a quote between the other kind of quotes",
    "true": "write True",
    "false": "write False",
}
_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_EQUALITY: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ORDER: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class _MistakeError(Exception):
    """Report a mistake at a 0-based position of an expression."""

    def __init__(self, message: str, position: int, hint: str | None = None) -> None:
        super().__init__(message)
        self.position = position
        self.hint = hint


class _Compiled(NamedTuple):
    kind: Kind
    names: tuple[str, ...]
    evaluate: _Evaluate


class Expression(NamedTuple):
    """Hold one expression, parsed on first use."""

    source: str

    @property
    def kind(self) -> Kind:
        """Return the type of its result: ``number``, ``bool`` or ``text``."""
        return _compiled(self.source).kind

    def evaluate(self, facts: Mapping[str, Fact]) -> FactValue | None:
        """Return the value for the known facts, or None if unknown; a number is always a float."""
        return _compiled(self.source).evaluate(facts)

    def missing(self, facts: Mapping[str, Fact]) -> tuple[str, ...]:
        """Return the names of the unknown facts that the expression reads."""
        return tuple(name for name in _compiled(self.source).names if name not in facts)


def compile_expression(
    source: object, *, path: str, key: str, result: Kind | None = "bool"
) -> Expression:
    """Check one expression: its syntax, its facts and the type of its result.

    Args:
        source: the expression as in the file.
        path: the file, for messages.
        key: the dotted path of the expression in the file, for messages.
        result: the required type of the result; None permits any.

    Raises:
        RuleError: with the column of the mistake and, for an unknown fact, the nearest known name.
    """
    if not isinstance(source, str) or not source.strip():
        raise RuleError("expected an expression in quotes", path=path, key=key)
    if len(source) > _MAX_EXPRESSION_CHARS:
        message = f"expression longer than {_MAX_EXPRESSION_CHARS} characters"
        raise RuleError(message, path=path, key=key)
    try:
        _check_tokens(source)
        kind = _compiled(source).kind
    except _MistakeError as mistake:
        message = f"{mistake}{_caret(source, mistake.position)}"
        column = mistake.position + 1
        raise RuleError(message, path=path, key=key, column=column, hint=mistake.hint) from None
    if result is not None and kind != result:
        message = f"expected a {result} expression, but this one is a {kind}"
        raise RuleError(message, path=path, key=key)
    return Expression(source)


def trusted_expression(
    source: str, *, path: str, key: str, result: Kind | None = "bool"
) -> Expression:
    """Accept a shipped expression unchecked.

    A diagnosis evaluates few of them, and a test checks all. The arguments are the same as for
    ``compile_expression``.
    """
    return Expression(source)


def suggestion(
    name: str, known: Mapping[str, object] | tuple[str, ...] | frozenset[str]
) -> str | None:
    """Return a "did you mean" for an unknown name, or None if no known name is similar."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return None


def _caret(source: str, position: int) -> str:
    """Return two lines: the text around a mistake, and a caret under it."""
    begin = max(0, position - _SHOWN_CHARS)
    shown = source[begin : begin + 2 * _SHOWN_CHARS]
    shown = "".join(char if char.isprintable() else " " for char in shown)
    return f"\n  {shown}\n  {' ' * (position - begin)}^"


def _check_tokens(source: str) -> None:
    """Raise _MistakeError for characters and nesting that no expression needs.

    Python's parser then gets only ASCII, except in quoted texts, and its recursion is limited.
    """
    position = 0
    brackets = 0
    while position < len(source):
        token = _TOKEN.match(source, position)
        if token is not None:
            text = token.group()
        else:
            text = source[position]
        if token is None or text in {"true", "false"}:
            message = f"{text!r} is not allowed here"
            raise _MistakeError(message, position, _OTHER_SPELLINGS.get(text))
        brackets += (text in "([") - (text in ")]")
        if brackets > _MAX_BRACKETS:
            raise _MistakeError("nested too deeply", position)
        position = token.end()


@functools.cache
def _compiled(source: str) -> _Compiled:
    """Parse an expression, check its types and compile it to functions of the facts."""
    indent = len(source) - len(source.lstrip())
    text = re.sub(r"\s", " ", source)[indent:]  # same length, so columns stay correct
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        offset = getattr(error, "offset", None) or 1
        position = min(indent + max(0, offset - 1), len(source) - 1)
        raise _MistakeError("not an expression", position) from None
    compiler = _Compiler(text, indent)
    kind, evaluate = compiler.compile(tree.body, 0)
    return _Compiled(kind, tuple(compiler.names), evaluate)


class _Compiler:
    """Compile the permitted nodes to functions, and raise for any other node."""

    def __init__(self, text: str, indent: int) -> None:
        self._bytes = text.encode(errors="replace")
        self._indent = indent
        self.names: dict[str, None] = {}

    def compile(self, node: ast.expr, depth: int) -> tuple[Kind, _Evaluate]:
        """Return the type of a node's value and the function that evaluates it."""
        if depth > _MAX_DEPTH:
            raise self._mistake("nested too deeply", node)
        if isinstance(node, ast.Name):
            return self._fact(node)
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.Compare):
            return "bool", self._compare(node, depth)
        if isinstance(node, ast.IfExp):
            kind, then = self.compile(node.body, depth + 1)
            condition = self._of("bool", node.test, depth)
            return kind, _chosen(condition, then, self._of(kind, node.orelse, depth))
        return self._operation(node, depth)

    def _operation(self, node: ast.expr, depth: int) -> tuple[Kind, _Evaluate]:
        if isinstance(node, ast.BoolOp):
            parts = [self._of("bool", value, depth) for value in node.values]
            return "bool", _joined(parts, decisive=isinstance(node.op, ast.Or))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return "bool", _applied(operator.not_, self._of("bool", node.operand, depth))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return "number", _applied(operator.neg, self._of("number", node.operand, depth))
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left = self._of("number", node.left, depth)
            right = self._of("number", node.right, depth)
            return "number", _calculated(_ARITHMETIC[type(node.op)], left, right)
        raise self._mistake("an expression compares facts with numbers and texts", node)

    def _of(self, wanted: Kind, node: ast.expr, depth: int) -> _Evaluate:
        """Compile a node whose value must have the type ``wanted``."""
        kind, evaluate = self.compile(node, depth + 1)
        if kind != wanted:
            raise self._mistake(f"expected a {wanted}, but this is a {kind}", node)
        return evaluate

    def _fact(self, node: ast.Name) -> tuple[Kind, _Evaluate]:
        name = node.id
        if name not in REGISTRY:
            hint = _OTHER_SPELLINGS.get(name) or suggestion(name, REGISTRY)
            raise self._mistake(f"unknown fact {name!r}", node, hint)
        self.names[name] = None
        kind = KINDS_OF_VALUE[REGISTRY[name].type]

        def read(facts: Mapping[str, Fact]) -> FactValue | None:
            fact = facts.get(name)
            if fact is None:
                return None
            return _value_of(kind, fact.value)

        return kind, read

    def _constant(self, node: ast.Constant) -> tuple[Kind, _Evaluate]:
        kind: Kind
        if isinstance(node.value, bool):
            kind = "bool"
        elif isinstance(node.value, (int, float)):
            kind = "number"
        elif isinstance(node.value, str):
            kind = "text"
        else:
            raise self._mistake("expected a number, a text, True or False", node)
        value = _value_of(kind, node.value)
        if value is None:
            raise self._mistake("the number is too large", node)
        return kind, lambda facts: value

    def _compare(self, node: ast.Compare, depth: int) -> _Evaluate:
        """Compile ``a < b``, and ``a < b < c`` as ``a < b and b < c``."""
        kind, left = self.compile(node.left, depth + 1)
        parts = []
        for comparison, operand in zip(node.ops, node.comparators, strict=True):
            if isinstance(comparison, (ast.In, ast.NotIn)):
                options = self._options(kind, operand)
                part = _applied(options.__contains__, left)
                parts.append(
                    part if isinstance(comparison, ast.In) else _applied(operator.not_, part)
                )
                continue
            right = self._of(kind, operand, depth)
            compare = _EQUALITY.get(type(comparison))
            if compare is None and kind == "number":
                compare = _ORDER.get(type(comparison))
            if compare is None:
                raise self._mistake(f"compare a {kind} with == or != only", node)
            parts.append(_compared(compare, left, right))
            left = right
        if len(parts) == 1:
            return parts[0]
        return _joined(parts, decisive=False)

    def _options(self, kind: Kind, node: ast.expr) -> frozenset[FactValue]:
        """Return the constants of a list, as in ``framework in ['vllm', 'sglang']``."""
        if not isinstance(node, (ast.List, ast.Tuple)):
            raise self._mistake("expected a list in square brackets after in", node)
        options = set()
        for item in node.elts:
            found, evaluate = self.compile(item, 0)
            value = evaluate({})
            if found != kind or value is None:
                raise self._mistake(f"expected a {kind}", item)
            options.add(value)
        return frozenset(options)

    def _mistake(self, message: str, node: ast.expr, hint: str | None = None) -> _MistakeError:
        before = self._bytes[: node.col_offset].decode(errors="replace")
        return _MistakeError(message, self._indent + len(before), hint)


def _value_of(kind: Kind, value: FactValue) -> FactValue | None:
    """Convert a value for expressions: None if it is not finite or has another type."""
    if kind == "number" and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return None
        if math.isfinite(number):
            return number
        return None
    if kind == "number":
        return None
    if isinstance(value, bool if kind == "bool" else str):
        return value
    return None


def _applied(function: Callable[[Any], FactValue], operand: _Evaluate) -> _Evaluate:
    def evaluate(facts: Mapping[str, Fact]) -> FactValue | None:
        value = operand(facts)
        if value is None:
            return None
        return function(value)

    return evaluate


def _compared(compare: Callable[[Any, Any], bool], left: _Evaluate, right: _Evaluate) -> _Evaluate:
    def evaluate(facts: Mapping[str, Fact]) -> bool | None:
        first = left(facts)
        if first is None:
            return None
        second = right(facts)
        if second is None:
            return None
        return compare(first, second)

    return evaluate


def _calculated(
    calculate: Callable[[Any, Any], float], left: _Evaluate, right: _Evaluate
) -> _Evaluate:
    def evaluate(facts: Mapping[str, Fact]) -> float | None:
        first = left(facts)
        second = right(facts)
        if first is None or second is None:
            return None
        try:
            number = calculate(first, second)
        except ZeroDivisionError:
            return None
        if math.isfinite(number):
            return number
        return None

    return evaluate


def _joined(parts: list[_Evaluate], *, decisive: bool) -> _Evaluate:
    """Combine conditions that may be unknown.

    ``decisive`` is False for ``and`` and True for ``or``.
    """

    def evaluate(facts: Mapping[str, Fact]) -> bool | None:
        result: bool | None = not decisive
        for part in parts:
            value = part(facts)
            if value is decisive:
                return decisive
            if value is None:
                result = None
        return result

    return evaluate


def _chosen(condition: _Evaluate, then: _Evaluate, otherwise: _Evaluate) -> _Evaluate:
    def evaluate(facts: Mapping[str, Fact]) -> FactValue | None:
        held = condition(facts)
        if held is None:
            return None
        if held:
            return then(facts)
        return otherwise(facts)

    return evaluate


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
_MISTAKE_CHARS: Final = 300  # of a mistake, so that a hostile file's text is not printed in full
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
        message = re.sub(r" \(at .*\)$", "", str(error))[:_MISTAKE_CHARS]
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
        if not isinstance(value, str) or value not in known:
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
            # A stranger's file may have a list here, which no mapping can look up.
            if not isinstance(value, str) or value not in known:
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
    if len(text) <= _MISTAKE_CHARS:
        return text
    return f"{text[:_MISTAKE_CHARS]}…"


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
