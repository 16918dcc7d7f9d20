"""Code that a model runs and that is no known library's: its classes, and functions put in their place."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, Final

# Whose code is told by following it: their models look at no row but by operations of torch.
_LIBRARIES: Final = frozenset(
    {"torch", "transformers", "accelerate", "peft", "sentence_transformers", "wrapt", "oomguard", "functools"}
)
_CODE: Final = (types.FunctionType, types.MethodType)
# What a class holds that is called with it, or as an attribute of it.
OF_CLASS: Final = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.partial,
    functools.partialmethod,
    functools.cached_property,
)
OWN_FUNCTION: Final = (
    "Where you know that its rows can be run apart, make it in a function of your own under @oomguard.guard(batch=...)"
)
_REGISTRY: Final = "transformers.modeling_utils"
_INSIDE: Final = ("__func__", "func", "fget", "__wrapped__")


def own_functions(model: Any) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions that are no library's among those that a model runs, with what they are called there."""
    seen: set[int] = set()
    for name, value in own_values(model):
        function = _plain(value)
        if function is not None and id(function) not in seen:
            seen.add(id(function))
            yield name, function


def own_values(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the same as they stand there: with the object of a method, and the arguments of a partial."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for attribute, value in (*_functions(module), *_attention(module)):
            function = _plain(value)
            if id(value) not in seen and function is not None and not is_library(function.__globals__.get("__name__")):
                seen.add(id(value))
                yield (f"{name}.{attribute}" if name and attribute.isidentifier() else attribute), value


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
            yield from ((name, value) for name, value in vars(base).items() if isinstance(value, OF_CLASS))
        elif base.__module__.startswith("transformers.") and "forward" in vars(base):
            yield "forward", vars(base)["forward"]


def _attention(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a model's attention is registered as."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    known = getattr(sys.modules.get(_REGISTRY), "ALL_ATTENTION_FUNCTIONS", None)
    if not isinstance(name, str) or known is None:
        return
    try:
        yield f"the attention {name}", known[name]
    except KeyError:
        return


def inside(value: Any) -> Any:
    """Return what a method, a partial, a property or a wrapper calls; None of anything else."""
    return next((found for name in _INSIDE if (found := getattr(value, name, None)) is not None), None)


def _plain(value: Any) -> types.FunctionType | None:
    while not isinstance(value, types.FunctionType):
        inner = inside(value)
        if inner is None or inner is value:
            return None
        value = inner
    return value
