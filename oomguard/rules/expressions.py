"""Conditions in rule files: CEL, type-checked against the fact registry at load, evaluated on the known facts.

CEL always terminates and reads nothing but the facts, so a stranger's rule file is safe to run.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.errors import RuleError
from oomguard.facts import REGISTRY, Fact, FactValue

# All numbers are doubles: CEL does not compare an int with a double, and rule authors should not have to know.
_CEL_TYPES: Final = {"int": "DOUBLE", "float": "DOUBLE", "bool": "BOOL", "str": "STRING"}
_POSITION: Final = r"<input>:(\d+):(\d+): (.*)"
_MAX_EXPRESSION_CHARS: Final = 2000
_SHOWN_CHARS: Final = 60  # of the expression, on either side of a mistake
_SHOWN_MESSAGE_CHARS: Final = 300
# Macros over lists: no fact is a list, and nested macros multiply the work.
_MACRO: Final = r"\b(?:all|exists|exists_one|existsOne|filter|map)(?:\s|//[^\n]*\n)*+\("

# An expression with one of these may hold although a fact that it names is missing.
_EITHER: Final = re.compile(r"\|\||&&|\?")


@functools.cache
def _environment() -> Any:
    from cel_expr_python import cel

    return cel.NewEnv(variables={name: getattr(cel.Type, _CEL_TYPES[spec.type]) for name, spec in REGISTRY.items()})


@functools.cache
def _compiled(source: str) -> Any:
    return _environment().compile(source)


@dataclass(frozen=True, slots=True)
class Expression:
    """One CEL expression; compiled on first use, once for each text."""

    source: str

    @property
    def type_name(self) -> str:
        """CEL's name of the type of its result: ``DOUBLE``, ``BOOL``, ``STRING``."""
        return str(_compiled(self.source).return_type().name())

    def evaluate(self, facts: Mapping[str, Fact]) -> FactValue | None:
        """Return the value over the known facts, or None (unknown) if a fact it needs is missing."""
        if not _EITHER.search(self.source) and self.missing(facts):
            return None  # without being compiled: most conditions of most rules
        # CEL divides a double by zero to infinity; here the result is unknown.
        for divisor in re.findall(r"[/%]\s*([a-z]\w*)", _without_strings(self.source)):
            if divisor in facts and facts[divisor].value == 0:
                return None
        data = {name: float(f.value) if _is_number(f.value) else f.value for name, f in facts.items()}
        try:
            result = _compiled(self.source).eval(data=data)
        except RuntimeError:  # the library gives up on endless work
            return None
        if result.type().name() == "ERROR":  # a fact it reads is missing, or a division by zero
            return None
        value = result.value()
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value if isinstance(value, (bool, int, float, str)) else None

    def missing(self, facts: Mapping[str, Fact]) -> tuple[str, ...]:
        """Return the names of the facts that the expression reads and that are unknown."""
        names = dict.fromkeys(re.findall(r"\b[a-z]\w*\b", _without_strings(self.source)))
        return tuple(name for name in names if name in REGISTRY and name not in facts)


def _is_number(value: FactValue) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _without_strings(source: str) -> str:
    return re.sub(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", lambda text: "'" * len(text.group()), source)


def compile_expression(source: object, *, path: str, key: str, result: str | None = "BOOL") -> Expression:
    """Check one expression: its syntax, the facts it names and the type of its result.

    Args:
        source: the expression as the file has it.
        path: the file, for messages.
        key: the dotted path of the expression inside the file, for messages.
        result: CEL's name of the type that the result must have; None permits any.

    Raises:
        RuleError: with the column of the mistake and, for an unknown fact, the nearest known name.
    """
    if not isinstance(source, str) or not source.strip():
        raise RuleError("expected a CEL expression in quotes", path=path, key=key)
    if len(source) > _MAX_EXPRESSION_CHARS:
        raise RuleError(f"expression longer than {_MAX_EXPRESSION_CHARS} characters", path=path, key=key)
    macro = re.search(_MACRO, _without_strings(source))
    if macro is not None:
        name = re.split(r"\W", macro.group(), maxsplit=1)[0]
        told = f"{name}() is not known here: a condition compares facts"
        raise RuleError(told, path=path, key=key, column=macro.start() + 1)
    try:
        compiled = _compiled(source)
    except RuntimeError as error:
        match = re.search(_POSITION, str(error))
        column = int(match.group(2)) if match else None
        message = match.group(3).replace(" (in container '')", "") if match else str(error).splitlines()[0]
        message = message[:_SHOWN_MESSAGE_CHARS]
        unknown = re.search(r"undeclared reference to '([^']+)'", message)
        hint = suggestion(unknown.group(1), REGISTRY) if unknown else None
        if "'(double, int)'" in message or "'(int, double)'" in message:
            hint = "numbers are doubles: write 1024.0, not 1024"
        rows = source.splitlines()
        row = rows[min(len(rows), int(match.group(1)) if match else 1) - 1]
        begin = max(0, (column or 1) - 1 - _SHOWN_CHARS)
        shown = row[begin : begin + 2 * _SHOWN_CHARS]
        caret = f"\n  {shown}\n  {' ' * max(0, (column or 1) - 1 - begin)}^"
        raise RuleError(message + caret, path=path, key=key, column=column, hint=hint) from None
    found = compiled.return_type().name()
    if result is not None and found != result:
        raise RuleError(f"expected a {result} expression, this one is {found}", path=path, key=key)
    return Expression(source)


def trusted_expression(source: str, *, path: str, key: str, result: str | None = "BOOL") -> Expression:
    """Take a shipped expression unchecked: a diagnosis evaluates few of them, and a test checks all.

    The arguments are those of ``compile_expression``.
    """
    return Expression(source)


def suggestion(name: str, known: Mapping[str, object] | tuple[str, ...] | frozenset[str]) -> str | None:
    """Return a "did you mean" for an unknown name; None if no known name is near."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else None
