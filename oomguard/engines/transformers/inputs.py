"""Read the inputs of a call: its rows, its size, and the images, videos and sounds of each row."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    by_class = {}
    for model in models:
        for name in model["classes"]:
            by_class[name] = model
    return by_class


def _wrapping(cls: type) -> Mapping[str, Any]:
    """Return how a model class delegates ``generate``; empty if it generates itself."""
    models = _wrapping_models()
    for base in cls.__mro__:
        if base.__name__ in models:
            return models[base.__name__]
    return {}


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
    # A decoder behind an encoder starts without the prompt, so the whole length is new.
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
        # Ignore the positions of padding.
        begins = begins & shown[:, 1:] & shown[:, :-1]
    return bool(begins.any())


# The names of the argument for the KV cache: ``cache`` since transformers 5.24. Releases with the
# new name still take the old one, with a warning.
CACHE_NAMES: Final = ("cache", "past_key_values")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the KV cache that a call gets; None without one."""
    for name in CACHE_NAMES:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def name_in(model: Any) -> str | None:
    """Return the name of the cache argument of a model's forward; None without one."""
    parameters = inspect.signature(type(model).forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    return None


def with_cache(arguments: Mapping[str, Any], name: str, cache: Any) -> dict[str, Any]:
    """Return a call's arguments with this cache under this name only."""
    others = {}
    for key, value in arguments.items():
        if key not in CACHE_NAMES:
            others[key] = value
    return {**others, name: cache}


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
    for name in _INPUTS:
        if kwargs.get(name) is not None:
            return name
    own = _own_name(model)
    if kwargs.get(own) is not None:
        return own
    return None


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
    # PEFT's wrapper hands the arguments on, so only the model inside names them.
    get_base = getattr(model, "get_base_model", None)
    if callable(get_base):
        inner = type(get_base())
    else:
        inner = None
    for kind in (*type(model).__mro__, *(inner.__mro__ if inner is not None else ())):
        if "generate" in vars(kind):
            parameters = list(inspect.signature(vars(kind)["generate"]).parameters.values())[1:]
            if parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                positional = []
                for each in parameters:
                    if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                        positional.append(each.name)
                return tuple(positional)
    return _NAMES


def _own_name(model: Any) -> str:
    """Return the name of a model's main input; an encoder's comes first, as in transformers."""
    if _is_encoder_decoder(model):
        encoder = getattr(model, "encoder", None)
    else:
        encoder = None
    for each in (encoder, model):
        name = getattr(each, "main_input_name", None)
        if isinstance(name, str):
            return name
    return ""


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


# Images, videos and sounds are split with the rows of text that they belong to.


def tokens_by_size(model: Any, sizes: Any) -> list[int] | None:
    """Return the number of text tokens that stand for each image; None if the model is unknown.

    Args:
        model: the model.
        sizes: height and width of each image, a tensor with two columns.
    """
    if sizes.ndim != 2 or sizes.shape[1] != 2:
        return None
    inner = getattr(model, "model", model)
    vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
    pairs = [(int(height), int(width)) for height, width in sizes.tolist()]
    if hasattr(inner, "pack_image_features"):
        return compute_on_host(_packed, inner, vision, pairs)
    if getattr(vision, "model_type", None) == "pixtral":
        side = vision.patch_size * getattr(model.config, "spatial_merge_size", 1)
        return [(height // side) * (width // side) for height, width in pairs]
    return None


def _packed(inner: Any, vision: Any, pairs: list[tuple[int, int]]) -> list[int] | None:
    """Let the model's own code pack dummy tiles of one number per patch, and count the result."""
    import torch

    tiles = getattr(sys.modules[type(inner).__module__], "image_size_to_num_patches", None)
    if tiles is None or not isinstance(getattr(vision, "image_size", None), int):
        return None
    config = inner.config
    patches = (vision.image_size // vision.patch_size) ** 2
    counts = [tiles(pair, config.image_grid_pinpoints, vision.image_size) for pair in pairs]
    try:
        _, lengths = inner.pack_image_features(
            [torch.zeros(count, patches, 1) for count in counts],
            torch.tensor(pairs),
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            image_newline=torch.zeros(1),
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # Another version of the model, or tiles that it cuts in another way.
        return None
    return [int(length) for length in lengths]


_DATA: Final = Path(__file__).with_name("media.toml")
_PIXEL_AXES: Final = 4
_IMAGES_AXES: Final = 5
_TOWERS: Final = (
    "no token stands for it, and a two-tower model compares every image with every text"
)
_NOT_COUNTED: Final = "the text's tokens do not match it"
Starts = dict[str, tuple[int, ...]]


@functools.cache
def data() -> Mapping[str, Any]:
    """Return the contents of media.toml."""
    return tomllib.loads(_DATA.read_text())


@dataclass(frozen=True, slots=True)
class Media:
    """The row of each entry of some arguments.

    Attributes:
        starts: by argument, the index at which each row's entries begin, and the end.
        outputs: the result fields for these arguments; none has one entry per row.
        unmarked: arguments with one entry per text in a model whose texts have no token for them.
    """

    starts: Mapping[str, tuple[int, ...]]
    outputs: tuple[str, ...] = field(default=(), compare=False)
    unmarked: tuple[str, ...] = field(default=(), compare=False)

    def part(self, arguments: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the arguments for rows ``start`` to ``stop``; None for one without entries."""
        cut = {}
        for name, starts in self.starts.items():
            first = starts[start]
            last = starts[stop]
            if last > first:
                cut[name] = arguments[name][first:last]
            else:
                cut[name] = None
        return cut

    def given_to(self, arguments: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return ``part`` without empty arguments, because ``generate`` treats None as an image."""
        given = {}
        for name, value in self.part(arguments, start, stop).items():
            if value is not None:
                given[name] = value
        return given


def media_of(model: Any, arguments: Mapping[str, Any], ids: Any) -> Media | str:
    """Return the rows of a call's media (empty without media), or a text with why unknown."""
    starts: Starts = {}
    config = getattr(model, "config", None)
    outputs = list[str]()
    unmarked = list[str]()
    for name in dict.fromkeys(kind["values"] for kind in data()["kind"]):
        if arguments.get(name) is None:
            continue
        found = _of_rows(model, name, arguments, ids)
        kind = _kind_of(name, arguments)
        if found is None and _is_one_a_text(config, arguments[name], ids):
            unmarked.append(name)
            continue
        if found is None:
            found = _starts(model, kind, config, arguments, ids)
        if isinstance(found, str):
            return f"oomguard does not know which rows the argument {name} belongs to: {found}"
        starts.update(found)
        outputs.append(kind["outputs"])
    if unmarked and starts:
        return (
            f"oomguard does not know which rows the argument {unmarked[0]} belongs to: no token "
            "stands for it"
        )
    return Media(starts, tuple(outputs), tuple(unmarked))


def _is_one_a_text(config: Any, values: Any, ids: Any) -> bool:
    """Return whether there is one entry per text, and the model has no token for media."""
    has_tokens = any(_token_of(kind, config) is not None for kind in data()["kind"])
    if getattr(ids, "ndim", 0):
        texts = ids.shape[0]
    else:
        texts = None
    return is_tensor(values) and values.shape[:1] == (texts,) and not has_tokens


def _kind_of(name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kind of an argument, by the other arguments that count its entries."""
    last: Mapping[str, Any] = {}
    for kind in data()["kind"]:
        if kind["values"] != name:
            continue
        last = kind
        counts = _named_in(kind, ("grid", "numbers", "sizes", "mask"))
        if all(arguments.get(argument) is not None for argument in counts):
            break
    # If no kind has all its counts, the last one explains what is missing.
    return last


def _named_in(kind: Mapping[str, Any], ways: Iterable[str]) -> list[str]:
    """Return the arguments that a kind names for these ways to count, if it names any."""
    named = []
    for how in ways:
        if how in kind:
            named.append(kind[how])
    return named


def _of_rows(model: Any, name: str, arguments: Mapping[str, Any], ids: Any) -> Starts | str | None:
    """Return the row starts of media that a model reads row by row; None for other models."""
    names = {base.__name__ for base in type(model).__mro__}
    found = None
    for entry in data()["of_rows"]:
        if name in entry["arguments"] and names & set(entry["classes"]):
            found = entry
            break
    if found is None or getattr(ids, "ndim", 0) != 2:
        return None
    rows = ids.shape[0]
    given = []
    for each in found["arguments"]:
        value = arguments.get(each)
        if value is None:
            continue
        if not is_tensor(value) or value.shape[:1] != (rows,):
            return f"the argument {each} does not have one entry per row"
        given.append(each)
    if "images" in found and not _tokens_count_images(
        arguments[found["images"]], _own_tokens(model, ids, "image")
    ):
        return _NOT_COUNTED
    return {each: tuple(range(rows + 1)) for each in given}


def _tokens_count_images(pixels: Any, own: list[int] | None) -> bool:
    """Return whether each row has the tokens of its images; images of zeros are padding."""
    if pixels.ndim != _IMAGES_AXES or own is None:
        return False
    images = compute_on_host(lambda: [sum(_which_show(row.detach().to("cpu"))) for row in pixels])
    each, more = divmod(sum(own), max(1, sum(images)))
    return not more and own == [each * number for number in images]


def _which_show(images: Any) -> list[bool]:
    """Return which images are not all zeros."""
    return [bool(shows) for shows in images.flatten(1).any(-1).tolist()]


def _own_tokens(model: Any, ids: Any, what: str) -> list[int] | None:
    """Return the media tokens in each row; None if the configuration names no token."""
    for kind in data()["kind"]:
        if any(name.startswith(what) for name in kind["token"]):
            return _tokens(kind, getattr(model, "config", None), ids)
    return None


def _token_of(kind: Mapping[str, Any], config: Any) -> int | None:
    """Return the token that stands for a kind of media; None if the configuration names none."""
    for name in kind["token"]:
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return None


def _tokens(kind: Mapping[str, Any], config: Any, ids: Any) -> list[int] | None:
    token = _token_of(kind, config)
    if token is None or getattr(ids, "ndim", 0) != 2 or ids.dtype.is_floating_point:
        return None
    return compute_on_host(
        lambda rows: [int(count) for count in (rows == token).sum(1).tolist()], ids
    )


def _starts(
    model: Any, kind: Mapping[str, Any], config: Any, arguments: Mapping[str, Any], ids: Any
) -> Starts | str:
    counts = [kind.get(how) for how in ("grid", "mask", "numbers", "sizes")]
    values = arguments[kind["values"]]
    (grid, mask, numbers, sizes) = (name and arguments.get(name) for name in counts)
    for value in (values, grid, mask, numbers, sizes):
        if value is not None and not is_tensor(value):
            return "it is not a tensor"
    own = _tokens(kind, config, ids)
    if own is None:
        return _why_no_token(config, values, ids)
    per_item = {}
    for name in kind.get("each", ()):
        if arguments.get(name) is not None:
            per_item[name] = arguments[name]
    found: Starts | str
    if grid is not None:
        found = _by_grid(kind, config, values, grid, own)
    elif numbers is not None:
        found = _by_numbers(kind, values, numbers.tolist(), own)
    else:
        if sizes is not None:
            if len(sizes) == len(values):
                each = tokens_by_size(model, sizes)
            else:
                each = None
        elif mask is None:
            each = _tokens_of_each(values, sum(own))
        else:
            each = _tokens_of_sounds(model, kind, mask, values)
        if each is None:
            first = None
        else:
            first = _numbers_by_row(own, each)
        names = _named_in(kind, ("values", "sizes", "mask"))
        if first is None:
            found = _NOT_COUNTED
        else:
            found = dict.fromkeys(names, first)
    if isinstance(found, str):
        return found
    if grid is not None:
        first = found[kind.get("grid", "")]
    else:
        first = found[kind["values"]]
    for name, value in per_item.items():
        if len(value) != first[-1]:
            return f"the argument {name} has {len(value)} entries for {first[-1]}"
        found[name] = first
    return found


def _by_grid(
    kind: Mapping[str, Any], config: Any, values: Any, grid: Any, own: list[int]
) -> Starts | str:
    """Return where each row's patches and images begin, from the patches of each image."""
    merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    patches = [t * height * width for t, height, width in grid.tolist()]
    if not merged or sum(patches) != values.shape[0]:
        return f"{kind['grid']} does not match it"
    numbers = _numbers_by_row(own, [count // merged**2 for count in patches])
    if numbers is None:
        return _NOT_COUNTED
    ends = (0, *itertools.accumulate(patches))
    return {kind["values"]: tuple(ends[number] for number in numbers), kind["grid"]: numbers}


def _by_numbers(
    kind: Mapping[str, Any], values: Any, numbers: list[int], own: list[int]
) -> Starts | str:
    """Return where each row's images begin, from the image counts in the call."""
    has_images = [number > 0 for number in numbers]
    if has_images != [tokens > 0 for tokens in own] or sum(numbers) != values.shape[0]:
        return f"{kind['numbers']} does not match it"
    return {
        kind["values"]: (0, *itertools.accumulate(numbers)),
        kind["numbers"]: tuple(range(len(numbers) + 1)),
    }


def _tokens_of_sounds(
    model: Any, kind: Mapping[str, Any], mask: Any, values: Any
) -> list[int] | None:
    """Return the tokens of each sound, as the model computes them; None if it cannot."""
    try:
        lengths = operator.attrgetter(kind["lengths"])(getattr(model, "model", model))
    except AttributeError:
        return None
    if mask.ndim != 2 or mask.shape[0] != values.shape[0]:
        return None
    return compute_on_host(
        lambda sounds: [int(tokens) for tokens in lengths(sounds.sum(-1))[-1].tolist()], mask
    )


def _why_no_token(config: Any, values: Any, ids: Any) -> str:
    if getattr(ids, "ndim", 0):
        texts = ids.shape[0]
    else:
        texts = None
    if texts is not None and values.ndim and texts != values.shape[0]:
        return f"no token stands for it, and there are {texts} texts for {values.shape[0]} images"
    has_text = getattr(config, "text_config", None) is not None
    if has_text and getattr(config, "vision_config", None) is not None:
        return _TOWERS
    return "no token stands for it"


def _tokens_of_each(values: Any, tokens: int) -> list[int] | None:
    """Return the tokens of each image if all have the same number; None if not."""
    if values.ndim != _PIXEL_AXES or not tokens or tokens % values.shape[0]:
        return None
    return [tokens // values.shape[0]] * values.shape[0]


def _numbers_by_row(own: Iterable[int], each: list[int]) -> tuple[int, ...] | None:
    """Return the index of each row's first image, and the end.

    None if a row's tokens are not those of whole images.
    """
    numbers = [0]
    number = 0
    for tokens in own:
        left = tokens
        while left > 0 and number < len(each):
            left -= each[number]
            number += 1
        if left:
            return None
        numbers.append(number)
    if number == len(each):
        return tuple(numbers)
    return None
