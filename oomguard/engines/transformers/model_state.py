"""What of a model decides which way its code goes: what was told of an earlier call holds for as long as it is the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final

from oomguard.engines.transformers.fingerprint import fingerprint, number_of
from oomguard.engines.transformers.own_code import own_code, own_values

PLAIN: Final = (bool, int, float, str, type(None))


def state_of(model: Any) -> Hashable:
    """Return what a model's code may go by, as something to compare.

    These are its modules and their classes, functions put on them, and plain values of its configuration. Of a model with code that is no
    library's they are all that such code may read: what its modules hold, weights, and variables outside of it.

    Args:
        model: the model.
    """
    if not hasattr(model, "named_modules"):
        return None
    modules = tuple(part for _, module in model.named_modules() for part in _of_module(module))
    config = tuple(_plain_values(vars(config)) if (config := getattr(model, "config", None)) is not None else ())
    if own_code(model) is None:
        return modules, config
    return modules, config, fingerprint((*own_values(model), *model.named_modules()))


def _of_module(module: Any) -> Iterator[Hashable]:
    kind = type(module)
    yield number_of(module), number_of(kind), number_of(getattr(kind, "forward", None))
    yield from (
        (name, number_of(value))
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type)
    )


def _plain_values(held: dict[str, Any]) -> Iterator[Hashable]:
    return ((name, value) for name, value in held.items() if isinstance(value, PLAIN))
