"""Whether the rows of a model's call depend on each other, or on being together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

# Whose hooks on a module do not count rows: what they keep, they keep for the call they stand in.
_LIBRARIES: Final = frozenset({"torch", "transformers", "accelerate", "peft"})


def records_gradients(model: Any, arguments: Iterable[Any]) -> bool:
    """Return whether a call records gradients: its parts would each need theirs until all are done."""
    import torch

    if not torch.is_grad_enabled():
        return False
    given = (value for value in arguments if isinstance(value, torch.Tensor))
    return any(tensor.requires_grad for tensor in given) or any(p.requires_grad for p in model.parameters())


def why_rows_depend(model: Any) -> str | None:
    """Return why the rows of a call cannot be run apart; None where nothing tells of it."""
    if model.training:
        return "the model is in training mode, where rows depend on the batch: call model.eval() first"
    if getattr(getattr(model, "config", None), "expert_capacity", None) is not None:
        return "its experts take a number of tokens of the whole batch"
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_library(hook):
                return f"a hook on {name or 'the model'} would see the rows of each part"
    return None


def _is_library(hook: Any) -> bool:
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] in _LIBRARIES
