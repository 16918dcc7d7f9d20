"""The variables that a function names outside of itself: of functions around it, defaults of its arguments, globals."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, Final

from oomguard.engines.transformers.held_state import is_own_module

# Code that names these comes to variables that it does not name.
_AT_RUN_TIME: Final = frozenset(
    {"globals", "vars", "exec", "eval", "modules", "__dict__", "setattr", "import_module", "__import__"}
)


def named_values(function: types.FunctionType) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield them as a name, where each is and under which key there, and its value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell, None, cell.cell_contents
        except ValueError:  # a cell that is empty yet
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in (*defaults, vars(function)):
        yield f"{function.__name__}'s own", {None: value}, None, value
    names = names_in(function.__code__)
    if names & _AT_RUN_TIME:
        names = names | function.__globals__.keys()  # what such code comes to is not told by its names
        for name in _strings(function.__code__):
            if is_own_module(module := sys.modules.get(name)):
                yield name, sys.modules, name, module
    for name in sorted(names):
        if name in function.__globals__ and not name.startswith("__"):
            yield name, function.__globals__, name, function.__globals__[name]


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function's code, and in functions that it makes."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _strings(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _strings(constant)
        elif isinstance(constant, str):
            yield from constant.replace(".", " ").split()
