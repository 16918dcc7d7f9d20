"""Branches of the user's own code that the number of rows decides: parts go another way than the whole call."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.own_code import is_library, own_functions

_BEGIN: Final = frozenset({"forward", "generate", "prepare_inputs_for_generation"})
# What is counted by ``len`` and holds no rows, by how it is commonly named.
_NO_ROWS: Final = ("self", "args", "output", "past", "shape", "layer", "block", "cache", "size", "dim", "config", "key")
_ASKS: Final = (ast.Mod, ast.FloorDiv, ast.BitAnd)


def why_branches(model: Any) -> str | None:
    """Return which line of a model's own code branches by the number of rows; None where none is seen."""
    for function in _reached(model):
        found = _branch(function.__code__)
        if found is not None:
            where, text = found
            return f"the number of rows decides a branch of the model's code: {where}: {text}"
    return None


def _reached(model: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of the user's own that a call may come to, by their names."""
    if not hasattr(model, "named_modules"):
        return
    own = [function for _, function in own_functions(model)]
    kept = {id(value) for _, module in model.named_modules() for value in vars(module).values()}
    wanted = [each for each in own if each.__name__ in _BEGIN or id(each) in kept]
    seen: set[int] = set()
    while wanted:
        function = wanted.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        names = set(function.__code__.co_names)
        wanted += [each for each in own if each.__name__ in names]
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType) and not is_library(value.__module__):
                wanted.append(value)


@functools.lru_cache(4096)
def _branch(code: types.CodeType) -> tuple[str, str] | None:
    """Return the first branch by the number of rows in a function: file and line, and the condition."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return None  # code without a source, or a piece of one
    names = _names_of_rows(tree)
    for node in ast.walk(tree):
        for test in _tests(node):
            if any(_asks(each, names) for each in ast.walk(test)):
                line = code.co_firstlineno + test.lineno - 1
                return f"{Path(code.co_filename).name}:{line}", ast.unparse(test)
    return None


def _tests(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in node.body):
        return []  # what is refused gives no other values
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _asks(node: ast.AST, names: frozenset[str]) -> bool:
    """Return whether an expression holds the number of rows against something else, or divides it."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _ASKS) and _is_of_rows(node.left, names)
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    of_rows = [side for side in sides if _is_of_rows(side, names)]
    if not of_rows or len(of_rows) == len(sides):
        return False
    others = [side.value for side in sides if isinstance(side, ast.Constant)]
    is_empty = others == [0] or (others == [1] and isinstance(node.ops[0], (ast.GtE, ast.Lt)))
    return not (is_empty and len(sides) == 2)


def _names_of_rows(tree: ast.AST) -> frozenset[str]:
    """Return the names that are given the number of rows."""
    names: frozenset[str] = frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and _is_of_rows(node.value, names):
                    names |= {target.id}
                if isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name) and _is_shape(node.value):
                    names |= {target.elts[0].id}
        if isinstance(node, ast.NamedExpr) and _is_of_rows(node.value, names):
            names |= {node.target.id}
    return names


def _is_of_rows(node: ast.AST, names: frozenset[str]) -> bool:
    if isinstance(node, ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.BinOp):
        return _is_of_rows(node.left, names) or _is_of_rows(node.right, names)
    if isinstance(node, ast.Subscript):
        return _is_shape(node.value) and isinstance(node.slice, ast.Constant) and node.slice.value == 0
    return isinstance(node, ast.Call) and _counts(node)


def _counts(node: ast.Call) -> bool:
    """Return whether a call gives the number of rows: ``len(x)``, ``x.size(0)``."""
    if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
        return isinstance(node.args[0], ast.Name) and not any(word in node.args[0].id.lower() for word in _NO_ROWS)
    is_size = isinstance(node.func, ast.Attribute) and node.func.attr == "size" and not _is_own(node.func)
    return is_size and [getattr(each, "value", None) for each in node.args] == [0]


def _is_shape(node: ast.AST) -> bool:
    """Return whether an expression is the shape of a tensor that is none of the model's."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.lower is None:
        return _is_shape(node.value)
    if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute):
        return node.func.attr == "size" and not _is_own(node.func)
    return isinstance(node, ast.Attribute) and node.attr == "shape" and not _is_own(node)


def _is_own(node: ast.AST) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"
