"""The argument of ``generate`` that has one row per input, and how large a call is by it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from oomguard.engines.protocol import SizeOfCall
from oomguard.engines.transformers.options import new_tokens

# As transformers calls them.
_NAMES: Final = ("inputs", "generation_config")
# What a call is made for, the first that it has; ``context`` is lm-evaluation-harness's.
_INPUTS: Final = ("inputs", "context", "input_ids", "inputs_embeds", "input_features")


def inputs_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that has one row per input; None where there is none."""
    return args[0] if args else kwargs.get(input_name(model, kwargs) or "")


def input_name(model: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the keyword argument that has one row per input, the model's own (images, sound) where it has no tokens."""
    found = next((name for name in _INPUTS if kwargs.get(name) is not None), None)
    if found is None and kwargs.get(own := _own_name(model)) is not None:
        return own
    return found


def by_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name: a ``generate`` of the model's own may give those by position other names."""
    return {**dict(zip(positional_names(model), args, strict=False)), **kwargs}


def main_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the argument that has one row per input, given by position or by name."""
    return positional_names(model)[0] if args else input_name(model, kwargs)


def positional_names(model: Any) -> tuple[str, ...]:
    """Return how a model's ``generate`` calls its arguments by position; of one that takes any, the one that it hands them to."""
    get_base = getattr(model, "get_base_model", None)  # PEFT's
    inner = type(get_base()) if callable(get_base) else None
    for kind in (*type(model).__mro__, *(inner.__mro__ if inner is not None else ())):
        if "generate" in vars(kind):
            parameters = list(inspect.signature(vars(kind)["generate"]).parameters.values())[1:]
            if parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                return tuple(each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return _NAMES


def _own_name(model: Any) -> str:
    """Return what a model calls its main input; the encoder's name counts, as in transformers."""
    encoder = getattr(model, "encoder", None) if _is_encoder_decoder(model) else None
    names = (getattr(each, "main_input_name", None) for each in (encoder, model))
    return next((name for name in names if isinstance(name, str)), "")


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def rows_and_tokens(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the rows of a call, 1 where it has none that can be told, and the tokens of its prompt."""
    main = inputs_of(model, args, kwargs)
    shape: Any = getattr(main, "shape", ())
    # Features of sound and of images are no tokens: their second axis is a band or a channel.
    are_tokens = len(shape) == 2 or (len(shape) > 2 and kwargs.get("inputs_embeds") is main)
    return shape[0] if len(shape) > 1 else 1, shape[1] if are_tokens else None


def size_of_generate(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeOfCall:
    """Return how large a call is: a watch asks at each one, and for no more."""
    rows, prompt_tokens = rows_and_tokens(model, args, kwargs)
    return rows, prompt_tokens, new_tokens(model, args, kwargs, prompt_tokens)
