"""Options of one call of ``generate``, as transformers resolves them."""

from __future__ import annotations

import functools
import operator
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_WRAPPING: Final = Path(__file__).with_name("wrapping_models.toml")


def option_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an option of the call as transformers resolves it: keyword, given configuration, the model's own.

    Of a model that calls the ``generate`` of one inside it, that one's options count.
    """
    if kwargs.get(name) is not None:
        return kwargs[name]
    wrapping = _wrapping(type(model))
    if name in wrapping.get("given", {}):
        return operator.attrgetter(wrapping["given"][name])(model.config)
    given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    generates = getattr(model, wrapping["inner"], model) if wrapping else model
    for config in (given, getattr(generates, "generation_config", None)):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


@functools.cache
def _wrapping_models() -> dict[str, Mapping[str, Any]]:
    models = tomllib.loads(_WRAPPING.read_text())["model"]
    return {name: model for model in models for name in model["classes"]}


def _wrapping(cls: type) -> Mapping[str, Any]:
    """Return how a class of models hands its ``generate`` on; empty of one that generates itself."""
    found: Mapping[str, Any] = next((m for c in cls.__mro__ if (m := _wrapping_models().get(c.__name__))), {})
    return found


def new_tokens(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], prompt_tokens: int | None) -> int | None:
    """Return the tokens that a call may generate, None where that is not known."""
    new = option_of(model, args, kwargs, "max_new_tokens")
    if new is not None:
        return int(new)
    total = option_of(model, args, kwargs, "max_length")
    if total is None:
        return None
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if encoder_decoder:
        return int(total)
    return None if prompt_tokens is None else max(0, int(total) - prompt_tokens)


def tokens_in(value: Any) -> tuple[int, ...]:
    """Return the tokens that an option names: none, one, or several."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, (list, tuple)) else (int(value),)


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or has one in it."""
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(entry) for entry in value)
    if isinstance(value, dict):
        return any(holds_tensors(entry) for entry in value.values())
    return hasattr(value, "untyped_storage")
