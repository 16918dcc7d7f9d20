"""Find the argument of ``generate`` with one row per input, and the size of a call."""

from __future__ import annotations

import functools
import inspect
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from oomguard.engines.protocol import SizeOfCall
from oomguard.probe import torch_memory

T = TypeVar("T")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, without importing torch; a tensor class is not one."""
    return hasattr(value, "untyped_storage") and not isinstance(value, type)


def compute_on_host(compute: Callable[..., T], *given: Any) -> T:
    """Compute on host copies of the given tensors: a full device has no space for the work."""
    with torch_memory.on_host():
        return compute(
            *(value.detach().to("cpu") if is_tensor(value) else value for value in given)
        )


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a value and its entries."""
    if is_tensor(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(entry)


_WRAPPING: Final = Path(__file__).with_name("wrapping_models.toml")


def option_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an option of the call as transformers resolves it.

    The order is keyword argument, given configuration, the model's configuration. If a model calls
    ``generate`` of an inner model, the inner model's options count. None if it is not set.
    """
    if kwargs.get(name) is not None:
        return kwargs[name]
    wrapping = _wrapping(type(model))
    if name in wrapping.get("given", {}):
        return operator.attrgetter(wrapping["given"][name])(model.config)
    given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    if wrapping:
        generates = getattr(model, wrapping["inner"], model)
    else:
        generates = model
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
    """Return how a model class delegates ``generate``; empty if it generates itself."""
    found: Mapping[str, Any] = next(
        (m for c in cls.__mro__ if (m := _wrapping_models().get(c.__name__))), {}
    )
    return found


def new_tokens(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], prompt_tokens: int | None
) -> int | None:
    """Return the new tokens that a call may generate; None if unknown."""
    new = option_of(model, args, kwargs, "max_new_tokens")
    if new is not None:
        return int(new)
    total = option_of(model, args, kwargs, "max_length")
    if total is None:
        return None
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if encoder_decoder:
        return int(total)
    if prompt_tokens is None:
        return None
    return max(0, int(total) - prompt_tokens)


def tokens_in(value: Any) -> tuple[int, ...]:
    """Return the token ids in an option: none, one or several."""
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(int(token) for token in value)
    return (int(value),)


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or contains one."""
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(entry) for entry in value)
    if isinstance(value, dict):
        return any(holds_tensors(entry) for entry in value.values())
    return hasattr(value, "untyped_storage")


# A row with packed texts has positions that restart, and cannot be read in chunks. Without a cache
# transformers separates the texts by their positions; with one, which chunks need, it does not.
_MASK_AXES: Final = 2


def why_packed(arguments: Mapping[str, Any]) -> str | None:
    """Return why a call's positions forbid chunks; None if each rises by one, or none is given."""
    positions: Any = arguments.get("position_ids")
    if not is_tensor(positions) or positions.shape[-1] < 2:
        return None
    begins = compute_on_host(_begin_anew, positions, arguments.get("attention_mask"))
    if begins:
        return "position_ids restart within a row, as in packed texts"
    return None


def _begin_anew(positions: Any, mask: Any) -> bool:
    begins = positions[..., 1:] - positions[..., :-1] != 1
    if getattr(mask, "ndim", 0) == _MASK_AXES and mask.shape[-1] == positions.shape[-1]:
        shown = mask != 0
        begins = begins & shown[:, 1:] & shown[:, :-1]  # ignore the positions of padding
    return bool(begins.any())


# The names of the argument for the KV cache: ``cache`` since transformers 5.24. Releases with the
# new name still take the old one, with a warning.
NAMES: Final = ("cache", "past_key_values")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the KV cache that a call gets; None without one."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def name_in(model: Any) -> str | None:
    """Return the name of the cache argument of a model's forward; None without one."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def with_cache(arguments: Mapping[str, Any], name: str, cache: Any) -> dict[str, Any]:
    """Return a call's arguments with this cache under this name only."""
    return {**{key: value for key, value in arguments.items() if key not in NAMES}, name: cache}


# Names in transformers.
_NAMES: Final = ("inputs", "generation_config")
# The possible main inputs in order of preference; ``context`` is lm-evaluation-harness's.
_INPUTS: Final = ("inputs", "context", "input_ids", "inputs_embeds", "input_features")


def main_input(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument with one row per input; None without one."""
    if args:
        return args[0]
    return kwargs.get(input_name(model, kwargs) or "")


def input_name(model: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the keyword argument with one row per input; None without one.

    It is the model's own main input (images, sound) if there are no tokens.
    """
    found = next((name for name in _INPUTS if kwargs.get(name) is not None), None)
    if found is None and kwargs.get(own := _own_name(model)) is not None:
        return own
    return found


def by_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name.

    An overriding ``generate`` may have other names for positional arguments.
    """
    return {**dict(zip(positional_names(model), args, strict=False)), **kwargs}


def main_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the argument with one row per input; None without one."""
    if args:
        return positional_names(model)[0]
    return input_name(model, kwargs)


def positional_names(model: Any) -> tuple[str, ...]:
    """Return the names of the positional arguments of a model's ``generate``.

    If it takes any arguments, the names are those of the function that it calls.
    """
    get_base = getattr(model, "get_base_model", None)  # PEFT's
    if callable(get_base):
        inner = type(get_base())
    else:
        inner = None
    for kind in (*type(model).__mro__, *(inner.__mro__ if inner is not None else ())):
        if "generate" in vars(kind):
            parameters = list(inspect.signature(vars(kind)["generate"]).parameters.values())[1:]
            if parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                return tuple(
                    each.name
                    for each in parameters
                    if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                )
    return _NAMES


def _own_name(model: Any) -> str:
    """Return the name of a model's main input; an encoder's comes first, as in transformers."""
    if _is_encoder_decoder(model):
        encoder = getattr(model, "encoder", None)
    else:
        encoder = None
    names = (getattr(each, "main_input_name", None) for each in (encoder, model))
    return next((name for name in names if isinstance(name, str)), "")


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def rows_and_tokens(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Return the rows of a call (1 if unknown) and its prompt tokens (None if unknown)."""
    main = main_input(model, args, kwargs)
    shape: Any = getattr(main, "shape", ())
    # The second axis of sound and images is a band or a channel, not tokens.
    are_tokens = len(shape) == 2 or (len(shape) > 2 and kwargs.get("inputs_embeds") is main)
    return shape[0] if len(shape) > 1 else 1, shape[1] if are_tokens else None


def size_of_generate(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeOfCall:
    """Return how large a call is; a watch reads this for each call."""
    rows, prompt_tokens = rows_and_tokens(model, args, kwargs)
    return rows, prompt_tokens, new_tokens(model, args, kwargs, prompt_tokens)
