"""What makes two calls of a model of one kind, so that what was told of the first holds for the second."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Final

from oomguard.engines.transformers.fingerprint import fingerprint
from oomguard.engines.transformers.model_state import PLAIN, state_of
from oomguard.engines.transformers.named_values import names_in
from oomguard.engines.transformers.own_code import own_code, own_functions
from oomguard.engines.transformers.tensors import is_tensor

if TYPE_CHECKING:
    from oomguard.memory.generate.follow_rows import WithRows

# What code names that asks how long its rows are, and how it is compiled where it holds that against something.
_SIZES: Final = frozenset({"shape", "size", "len", "numel", "nelement"})
_COMPARES: Final = frozenset({"COMPARE_OP", "CONTAINS_OP"})


def kind_followed(model: Any, arguments: WithRows, steps: int | None) -> Hashable:
    """Return what decides which way the model's code goes, but for values of rows.

    Lengths count by their power of two, unless code of the user's own may hold them against a limit.

    Args:
        model: the model.
        arguments: those of the call, with other tensors for those that hold rows.
        steps: tokens that it generates; None for a plain call.
    """
    rows: list[Any] = []
    given = arguments(lambda tensor: rows.append(tensor) or tensor)  # type: ignore[func-returns-value]
    size = _length(model)
    shapes = tuple((str(tensor.dtype), tuple(map(size, tensor.shape[1:]))) for tensor in rows)
    plain = tuple(sorted((n, str(v) if isinstance(v, PLAIN) else type(v).__qualname__) for n, v in given.items()))
    attention = getattr(model.config, "_attn_implementation", None)
    of_rows = {id(tensor) for tensor in rows}
    states = state_of(model), _read_of(model, given, lambda tensor: id(tensor) in of_rows)
    return tuple(sorted(given)), shapes, plain, attention, None if steps is None else size(steps), states


def kind_compared(model: Any, arguments: Mapping[str, Any]) -> Hashable:
    """Return the same of a call of which is not known which tensors hold rows: those with axes count by their lengths alone.

    Args:
        model: the model.
        arguments: those of the call by name.
    """
    size = _length(model)

    def kind(value: Any) -> str:
        if is_tensor(value):
            return f"{value.dtype} {[size(each) for each in value.shape[1:]]}"
        return str(value) if isinstance(value, PLAIN) else type(value).__name__

    kinds = tuple(sorted((name, kind(value)) for name, value in arguments.items()))
    return kinds, state_of(model), _read_of(model, arguments, lambda tensor: tensor.dim() > 0)


def _read_of(model: Any, given: Mapping[str, Any], by_kind: Callable[[Any], bool]) -> Hashable:
    """Return what code that is no library's may read of arguments beside their rows; None for a model without such code."""
    return None if own_code(model) is None else fingerprint(given.items(), by_kind)


def _length(model: Any) -> Callable[[int], int]:
    functions = own_functions(model) if hasattr(model, "named_modules") else ()
    if any(_holds_sizes(function.__code__) for _, function in functions):
        return int
    return lambda size: int(size).bit_length()


@functools.lru_cache(4096)
def _holds_sizes(code: types.CodeType) -> bool:
    """Return whether code asks for a size and compares something."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    codes = [code, *inner]
    compares = any(each.opname in _COMPARES for one in codes for each in dis.get_instructions(one))
    return compares and bool(names_in(code) & _SIZES)
