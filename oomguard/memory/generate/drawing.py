"""Which operations draw random numbers, by torch's own tag, and how many; as fake_generate.py this imports torch."""

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


class Drawn:
    """What the operations of a trace have drawn.

    Attributes:
        alone: whether one of them drew a single number, as a layer does that is left out at random: whatever the rows, it is the same.
        many: whether one drew several, which may be one or more a row.
    """

    def __init__(self) -> None:
        self.alone = self.many = False

    def note(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note an operation by its arguments and its result."""
        if not draws(operation, args, kwargs):
            return
        is_alone = isinstance(out, torch.Tensor) and out.numel() == 1
        self.alone, self.many = self.alone or is_alone, self.many or not is_alone
