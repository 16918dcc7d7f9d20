"""Code that a model runs and that is no known library's: its classes, and functions put in their place."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, Final

# Whose code is told by following it: their models look at no row but by operations of torch.
_LIBRARIES: Final = frozenset(
    {"torch", "transformers", "accelerate", "peft", "sentence_transformers", "wrapt", "oomguard", "functools"}
)
_CODE: Final = (types.FunctionType, types.MethodType)
_REGISTRY: Final = "transformers.modeling_utils"


def own_functions(model: Any) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions that are no library's among those that a model runs, with what they are called there."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for attribute, value in _functions(module):
            function = _plain(value)
            if (
                function is not None
                and id(function) not in seen
                and not is_library(function.__globals__.get("__name__"))
            ):
                seen.add(id(function))
                yield (f"{name}.{attribute}" if name else attribute), function
        yield from _attention(module, seen)


def own_code(model: Any) -> str | None:
    """Return the name of the first code of a model that is no library's; None where there is none."""
    if not hasattr(model, "named_modules"):
        return None
    for _, module in model.named_modules():
        if is_own(module):
            return type(module).__name__
    return next((name for name, _ in own_functions(model)), None)


def is_own(module: Any) -> bool:
    """Return whether the class of a module is no library's."""
    return not is_library(type(module).__module__)


def is_library(name: Any) -> bool:
    """Return whether a module of this name is of a library whose code is followed."""
    return str(name).partition(".")[0] in _LIBRARIES


def _functions(module: Any) -> Iterator[tuple[str, Any]]:
    for attribute, value in vars(module).items():
        if isinstance(value, _CODE) or attribute == "forward":
            yield attribute, value
    for base in type(module).__mro__:
        if not is_library(base.__module__):
            yield from ((name, value) for name, value in vars(base).items() if isinstance(value, types.FunctionType))
        elif base.__module__.startswith("transformers.") and "forward" in vars(base):
            yield "forward", vars(base)["forward"]


def _attention(module: Any, seen: set[int]) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the function that a model's attention is registered under, where that is no library's."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    known = getattr(sys.modules.get(_REGISTRY), "ALL_ATTENTION_FUNCTIONS", None)
    if not isinstance(name, str) or known is None:
        return
    try:
        function = _plain(known[name])
    except KeyError:
        return
    if function is not None and id(function) not in seen and not is_library(function.__globals__.get("__name__")):
        seen.add(id(function))
        yield f"the attention {name}", function


def _plain(value: Any) -> types.FunctionType | None:
    while not isinstance(value, types.FunctionType):
        inner = getattr(value, "__func__", None) or getattr(value, "func", None) or getattr(value, "__wrapped__", None)
        if inner is None or inner is value:
            return None
        value = inner
    return value
