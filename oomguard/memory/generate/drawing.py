"""Which operations draw random numbers, by torch's own tag; as fake_generate.py this imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

# What an operation draws by, by the argument's name: with none of it, it draws nothing (attention, recurrent layers).
_RATES: Final = frozenset({"dropout_p", "dropout", "p"})
_MODES: Final = frozenset({"train", "training"})


def draws(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers with these arguments."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    arguments = operation._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given.update({argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs)
    is_off = any(given.get(name) == 0 for name in _RATES) or any(given.get(name) is False for name in _MODES)
    return not is_off
