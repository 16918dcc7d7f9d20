"""What of a model decides which way its code goes: what was told of an earlier call holds for as long as it is the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final

from oomguard.engines.transformers.own_code import is_own

_PLAIN: Final = (bool, int, float, str, type(None))


def state_of(model: Any) -> Hashable:
    """Return what a model's code may go by, as something to compare.

    These are its modules and their classes, functions put on them, plain values of its configuration, and on modules of classes
    that are no library's every plain value and whether a buffer has been written to. Variables outside of it, and its weights,
    are not among them.

    Args:
        model: the model.
    """
    if not hasattr(model, "named_modules"):
        return None
    modules = tuple(part for _, module in model.named_modules() for part in _of_module(module))
    return modules, tuple(_plain_values(vars(config)) if (config := getattr(model, "config", None)) is not None else ())


def _of_module(module: Any) -> Iterator[Hashable]:
    yield id(module), id(type(module))
    held = vars(module)
    yield from ((name, id(value)) for name, value in held.items() if callable(value) and not isinstance(value, type))
    if is_own(module):
        yield from _plain_values(held)
        yield from (
            (name, id(buffer), _writes(buffer)) for name, buffer in module._buffers.items() if buffer is not None
        )


def _writes(buffer: Any) -> int:
    """Return how often a buffer was written to; 0 for one that was made in inference mode, which does not count it."""
    return 0 if buffer.is_inference() else int(buffer._version)


def _plain_values(held: dict[str, Any]) -> Iterator[Hashable]:
    return ((name, value) for name, value in held.items() if isinstance(value, _PLAIN))
