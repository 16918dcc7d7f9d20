"""The argument of ``generate`` that has one row per input, and how large a call is by it."""

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

# The tensors in what a call is given or gives, told without torch, and what they hold as the host
# sees it.

T = TypeVar("T")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor; a class of tensors is none."""
    return hasattr(value, "untyped_storage") and not isinstance(value, type)


def of_host(compute: Callable[..., T], *given: Any) -> T:
    """Return what is computed of these values, tensors among them as copies on the host: a device
    that is full has no room for it.
    """
    with torch_memory.on_host():
        return compute(
            *(value.detach().to("cpu") if is_tensor(value) else value for value in given)
        )


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a value: it, or those in its entries."""
    if is_tensor(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(entry)


# Options of one call of ``generate``, as transformers resolves them.

_WRAPPING: Final = Path(__file__).with_name("wrapping_models.toml")


def option_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an option of the call as transformers resolves it: keyword, given configuration, the
    model's own.

    Of a model that calls the ``generate`` of one inside it, that one's options count.
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
    """Return how a class of models hands its ``generate`` on; empty of one that
    generates itself.
    """
    found: Mapping[str, Any] = next(
        (m for c in cls.__mro__ if (m := _wrapping_models().get(c.__name__))), {}
    )
    return found


def new_tokens(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], prompt_tokens: int | None
) -> int | None:
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
    if prompt_tokens is None:
        return None
    return max(0, int(total) - prompt_tokens)


def tokens_in(value: Any) -> tuple[int, ...]:
    """Return the tokens that an option names: none, one, or several."""
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(int(token) for token in value)
    return (int(value),)


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or has one in it."""
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(entry) for entry in value)
    if isinstance(value, dict):
        return any(holds_tensors(entry) for entry in value.values())
    return hasattr(value, "untyped_storage")


# Rows that hold several texts one after another, told by positions that begin anew: no such row is
# read in chunks.
#
# Without a cache transformers hides the texts of a row from each other, by its positions alone;
# with one, as chunks need, it does not.

_MASK_AXES: Final = 2


def why_packed(arguments: Mapping[str, Any]) -> str | None:
    """Return why the positions of a call forbid chunks; None where each rises by one, or it is
    given none.
    """
    positions: Any = arguments.get("position_ids")
    if not is_tensor(positions) or positions.shape[-1] < 2:
        return None
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(positions, FakeTensor):
        return None  # of a trace: the call's own were looked at before it
    begins = of_host(_begin_anew, positions, arguments.get("attention_mask"))
    if begins:
        return "position_ids do not rise by one throughout, as of a row that holds several texts"
    return None


def _begin_anew(positions: Any, mask: Any) -> bool:
    begins = positions[..., 1:] - positions[..., :-1] != 1
    if getattr(mask, "ndim", 0) == _MASK_AXES and mask.shape[-1] == positions.shape[-1]:
        shown = mask != 0
        begins = begins & shown[:, 1:] & shown[:, :-1]  # the positions of padding count for nothing
    return bool(begins.any())


# The argument of a model that takes its cache, whatever this release of transformers calls it:
# ``cache`` since 5.24.

# A release that has a new name still takes the old ones, with a warning.
NAMES: Final = ("cache", "past_key_values")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache that a call is given, None where it is given none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def name_in(model: Any) -> str | None:
    """Return what a model's forward calls its cache; None where it takes none."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def with_cache(arguments: Mapping[str, Any], name: str, cache: Any) -> dict[str, Any]:
    """Return a call's arguments with this cache under this name, and under no other."""
    return {**{key: value for key, value in arguments.items() if key not in NAMES}, name: cache}


# As transformers calls them.
_NAMES: Final = ("inputs", "generation_config")
# What a call is made for, the first that it has; ``context`` is lm-evaluation-harness's.
_INPUTS: Final = ("inputs", "context", "input_ids", "inputs_embeds", "input_features")


def inputs_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that has one row per input; None where there is none."""
    if args:
        return args[0]
    return kwargs.get(input_name(model, kwargs) or "")


def input_name(model: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the keyword argument that has one row per input, the model's own (images,
    sound) where it has no tokens.
    """
    found = next((name for name in _INPUTS if kwargs.get(name) is not None), None)
    if found is None and kwargs.get(own := _own_name(model)) is not None:
        return own
    return found


def by_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name: a ``generate`` of the model's own may give those by
    position other names.
    """
    return {**dict(zip(positional_names(model), args, strict=False)), **kwargs}


def main_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the argument that has one row per input, given by position or by name."""
    if args:
        return positional_names(model)[0]
    return input_name(model, kwargs)


def positional_names(model: Any) -> tuple[str, ...]:
    """Return how a model's ``generate`` calls its arguments by position; of one that takes any, the
    one that it hands them to.
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
    """Return what a model calls its main input; the encoder's name counts, as in transformers."""
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
    """Return the rows of a call, 1 where it has none that can be told, and the tokens of its
    prompt.
    """
    main = inputs_of(model, args, kwargs)
    shape: Any = getattr(main, "shape", ())
    # Features of sound and of images are no tokens: their second axis is a band or a channel.
    are_tokens = len(shape) == 2 or (len(shape) > 2 and kwargs.get("inputs_embeds") is main)
    return shape[0] if len(shape) > 1 else 1, shape[1] if are_tokens else None


def size_of_generate(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeOfCall:
    """Return how large a call is: a watch asks at each one, and for no more."""
    rows, prompt_tokens = rows_and_tokens(model, args, kwargs)
    return rows, prompt_tokens, new_tokens(model, args, kwargs, prompt_tokens)
