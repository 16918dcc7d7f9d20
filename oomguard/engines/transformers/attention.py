"""Run a model with torch's attention instead of eager attention, which keeps a score matrix."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.core.files import read_tables
from oomguard.engines.transformers.chunked_forward import ONE_CALL

_FILE: Final = Path(__file__).with_name("attention_models.toml")
_WITH_SCORES: Final = "eager"
STATE: Final = "output_attentions"
_MASK_AXES: Final = 2


def why_not_use_attention(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why a call cannot run with attention that keeps no scores; None if it can."""
    config: Any = getattr(model, "config", None)
    now = getattr(config, "_attn_implementation", None)
    family = str(getattr(config, "model_type", ""))
    if now != _WITH_SCORES:
        if now:
            return "its attention already keeps no scores"
        return "oomguard does not know its attention"
    if not hasattr(model, "set_attn_implementation"):
        return "this transformers cannot change a model's attention"
    if family not in _families():
        return f"models of the type {family} were not compared with other attention"
    return _why_scores_are_needed(model, arguments)


def _why_scores_are_needed(model: Any, arguments: Mapping[str, Any]) -> str | None:
    if arguments.get(STATE) or getattr(model.config, STATE, False):
        return f"{STATE} needs the scores"
    if getattr(arguments.get("attention_mask"), "ndim", _MASK_AXES) != _MASK_AXES:
        return "its attention_mask is made for eager attention"
    if any(
        module._forward_hooks
        for module in model.modules()
        if "attention" in type(module).__name__.lower()
    ):
        return "your hook on its attention may read the scores"
    return None


@contextlib.contextmanager
def use_attention(model: Any, implementation: str) -> Iterator[None]:
    """Run a model with this attention implementation in the block."""
    with ONE_CALL:  # the model's configuration is changed meanwhile
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        before = {
            id(c): (c, c._attn_implementation)
            for c in configs
            if hasattr(c, "_attn_implementation")
        }
        try:
            model.set_attn_implementation(implementation)
            yield
        finally:
            for config, was in before.values():
                config._attn_implementation = was


@functools.cache
def _families() -> frozenset[str]:
    return frozenset(next(iter(read_tables("attention", [_FILE]).values()))["model_types"])
