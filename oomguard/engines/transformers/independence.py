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
    if (why := why_drawn(model)) is not None:
        return why
    if getattr(getattr(model, "config", None), "expert_capacity", None) is not None:
        return "its experts take a number of tokens of the whole batch"
    for name, module in model.named_modules():
        if module.training and hasattr(module, "running_mean"):
            return f"{name} is in training mode, where it looks at the whole batch: call {name}.eval() first"
    return why_hooked(model)


def why_hooked(model: Any) -> str | None:
    """Return which function of the user's own a model calls with the rows that run; None where it calls none."""
    import torch

    everywhere = torch.nn.modules.module
    for hooks in (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks):
        if not all(map(_is_library, hooks.values())):
            return "a hook on all modules would see the rows of each part"
    for name, module in model.named_modules() if hasattr(model, "named_modules") else ():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_library(hook):
                return f"a hook on {name or 'the model'} would see the rows of each part"
    return None


def why_drawn(model: Any) -> str | None:
    """Return which module drops at random what rows hold, which other rows beside them change; None where none does."""
    for name, module in model.named_modules() if hasattr(model, "named_modules") else ():
        if module.training and _drops(module):
            return f"{name or 'the model'} drops at random (it is in training mode): parts would draw other numbers than the call"
    return None


def _drops(module: Any) -> bool:
    """Return whether a module in training mode drops: it is for that, or has a rate for it (``attention_dropout``)."""
    own = vars(module)
    rates = [own.get("p"), own.get("drop_prob")] if "drop" in type(module).__name__.lower() else []
    rates += [value for name, value in own.items() if "drop" in name.lower()]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def _is_library(hook: Any) -> bool:
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] in _LIBRARIES
