"""The numbers in a model's ``config.json`` that its memory follows from, whatever its family calls
them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from oomguard.core.errors import ConfigError, InputError
from oomguard.core.files import read_regular, read_tables

# The JSON objects of a model's folder, which a stranger wrote: bounded in bytes and depth, each
# key once.

# Published configurations have up to some megabytes, indices of weights too, and both a depth below
# ten.
MAX_CONFIG_BYTES: Final = 16_000_000
MAX_DEPTH: Final = 64
_SHOWN_CHARS: Final = 60


def shown(value: object) -> str:
    """Return a stranger's value for a message: on one line, without control characters,
    cut short.
    """
    text = repr(value)
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}…"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: there is no such file, or it holds no JSON object that can be used.
        InputError: it is no regular file, too large, or cannot be read.
    """
    try:
        content = read_regular(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            "no such file", path=str(path), hint="a model folder holds a config.json"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}", hint="expected a JSON file of the model"
        ) from None
    return parse_object(content, path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object; raises ConfigError, naming ``path``, for anything else."""
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_each_once)
    except _TwiceError as error:
        raise ConfigError(
            f"{error} stands twice in one object, with two values", path=str(path)
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", path=str(path)) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}", path=str(path)) from None
    except ValueError:
        raise ConfigError("has a number of thousands of digits", path=str(path)) from None
    except RecursionError:
        raise _too_deep(path) from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"holds a {type(parsed).__name__}, not an object", path=str(path))
    if _is_deeper(parsed, MAX_DEPTH):
        raise _too_deep(path)
    return parsed


@contextlib.contextmanager
def mistakes_in(path: str) -> Iterator[None]:
    """Give the ConfigErrors that are raised inside the name of their file, where they have none
    yet.
    """
    try:
        yield
    except ConfigError as error:
        if error.path is not None:
            raise
        raise ConfigError(str(error), path=path, hint=error.hint) from None


class _TwiceError(Exception):
    """A key that stands twice in one object, with two values: readers differ in which of them
    counts.
    """


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value and value == value:  # noqa: PLR0124 - NaN is not two values
                raise _TwiceError(shown(name))
    return found


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(f"nested more than {MAX_DEPTH} deep", path=str(path))


def _is_deeper(value: object, levels: int) -> bool:
    """Whether a parsed value is nested deeper than so many levels."""
    level: list[object] = [value]
    for _ in range(levels):
        level = [inner for part in level for inner in _inside(part)]
        if not level:
            return False
    return True


def _inside(part: object) -> Iterable[object]:
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return (inner for inner in values if isinstance(inner, (dict, list)))


# What the published families of models call things, and what their configurations leave to a
# default: one data file.

_FILE: Final = Path(__file__).with_name("families.toml")
FAMILIES: Final[dict[str, Any]] = read_tables("families", [_FILE])[_FILE]


def encoder_decoder(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]] | None:
    """Return what a model of an encoder and a decoder calls the numbers of both, None for any
    other.
    """
    kind = config.get("model_type")
    found: Mapping[str, Mapping[str, str]] | None = (
        FAMILIES["encoder_decoder"].get(kind) if isinstance(kind, str) else None
    )
    return found


_ALIASES: Final[Mapping[str, list[str]]] = FAMILIES["aliases"]
DTYPE_BYTES: Final[Mapping[str, int]] = FAMILIES["dtype_bytes"]
# Larger than in any model: above it a value is a mistake, which arithmetic would only hide.
MAX_COUNT: Final = 10**9
MAX_LAYERS: Final = 1000
_ONE_FOR_ALL: Final = frozenset(
    {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "head_dim"}
)
_MAX_FACTOR: Final = 100_000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder, in counts and not in bytes.

    ``config`` is the language model's part of the configuration, ``outer`` the whole file.
    ``default_length`` is the longest request where the user gives none, ``max_positions`` the
    longest that the model is for; each None where the file does not say.
    """

    config: Mapping[str, Any]
    outer: Mapping[str, Any]
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int
    max_positions: int | None
    default_length: int | None
    path: str = "config.json"

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder of images or audio beside the language model."""
        encoders = FAMILIES["names"]["encoders"]
        return self.outer is not self.config or any(
            isinstance(self.outer.get(part), Mapping) for part in encoders
        )

    @property
    def unknown_dtype(self) -> str | None:
        """The data type that the file names and nobody knows, None where it is known or the file
        names none.
        """
        name = _dtype(self.config, self.outer)
        if name is None or name in DTYPE_BYTES:
            return None
        return name

    def number(self, name: str) -> int | None:
        """Return a count under any of its names, of a list the largest; None where it is missing or
        null.

        Raises:
            ConfigError: the count is absurd.
        """
        with mistakes_in(self.path):
            return count_of(self.config, name)


def read_shape(config: Mapping[str, Any], path: str = "config.json") -> ModelShape:
    """Read the numbers of a parsed configuration; raises ConfigError with the field that is missing
    or absurd.
    """
    text = text_part(config)
    with mistakes_in(path):
        heads_or_none = count_of(text, "num_attention_heads")
        layers = _needed(text, "num_hidden_layers")
        hidden = _needed(text, "hidden_size")
        if heads_or_none is None and _attention_free(text):
            heads = 1
        else:
            heads = _needed(text, "num_attention_heads")
        return ModelShape(
            config=text,
            outer=config,
            model_type=_model_type(text, config),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_kv_heads(text, heads),
            head_dim=_head_dim(text, hidden, heads),
            vocab=_needed(text, "vocab_size"),
            dtype_bytes=_dtype_bytes(text, config),
            max_positions=_longest(text, config),
            default_length=_default_length(text, config),
            path=path,
        )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration; all of it where there is only one part.

    Of a model of an encoder and a decoder that is the decoder, its numbers under the names that all
    decoders have.
    """
    part = config
    while True:
        names = (
            name for name in FAMILIES["names"]["text_parts"] if isinstance(part.get(name), Mapping)
        )
        inner = next((part[name] for name in names), None)
        if inner is None:
            return _decoder(part)
        part = inner


def _decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    both = encoder_decoder(config)
    if both is None:
        return config
    return {
        **config,
        **{name: config[own] for name, own in both["decoder"].items() if own in config},
    }


def _model_type(text: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    for part in (text, outer):
        name = part.get("model_type")
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"model_type is {shown(name)}, not text")
        if name:
            return name
    return ""


def _attention_free(text: Mapping[str, Any]) -> bool:
    return "state_size" in text or "ssm_state_size" in text


def _needed(config: Mapping[str, Any], name: str) -> int:
    value = count_of(config, name)
    if value is None:
        others = ", ".join((name, *_ALIASES.get(name, ())))
        raise ConfigError(f"{name} is missing (looked for {others})")
    return value


def count_of(config: Mapping[str, Any], name: str) -> int | None:
    """Return a count under any of its names, of a list the largest; None where it is missing or
    null.

    Raises:
        ConfigError: the count is absurd.
    """
    for key in (name, *_ALIASES.get(name, ())):
        value = config.get(key)
        if value is None:
            continue
        if (
            name not in _ONE_FOR_ALL
            and isinstance(value, list)
            and value
            and all(is_count(item) for item in value)
        ):
            value = max(value)  # one for each layer: peaks follow from the largest
        if not is_count(value):
            raise ConfigError(f"{key} is {shown(value)}, not a count")
        assert isinstance(value, int)  # noqa: S101 - for the type checker: is_count has just asked
        if name == "num_hidden_layers" and value > MAX_LAYERS:
            raise ConfigError(
                f"{key} is {value}, more than any model has: at most {MAX_LAYERS} are read"
            )
        if value == 0 and name in _ONE_FOR_ALL:
            raise ConfigError(f"{key} is 0, not a count above zero")
        return value
    return None


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a count that a model can have, 0 included."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how positions are stretched; empty where they are not."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(found, Mapping):
        return found
    return {}


def rope_kind(config: Mapping[str, Any]) -> str:
    """Return the name of the way positions are stretched; empty where they are not."""
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type")
    if isinstance(kind, str):
        return kind
    return ""


def rope_factor(config: Mapping[str, Any]) -> float:
    """Return the factor that positions are stretched by; 1.0 where the file gives none, or none
    that is sensible.
    """
    factor = rope_scaling(config).get("factor")
    if (
        isinstance(factor, (int, float))
        and not isinstance(factor, bool)
        and 0 < factor <= _MAX_FACTOR
    ):
        return float(factor)
    return 1.0


def _longest(text: Mapping[str, Any], outer: Mapping[str, Any]) -> int | None:
    """Return the longest request that the model is for, None where its file does not say."""
    known = [value for name in FAMILIES["names"]["lengths"] if (value := count_of(text, name))]
    if not known:
        return None
    longest = count_of(text, "model_max_length") or min(known)
    stretched = rope_scaling(text).get("original_max_position_embeddings")
    if rope_kind(text) == "yarn" and is_count(stretched):
        return int(stretched * rope_factor(text))
    if rope_kind(text) in FAMILIES["positions"]["in_the_length"] or "gemma3" in str(
        outer.get("model_type")
    ):
        return longest
    return int(longest * rope_factor(text))


def _default_length(text: Mapping[str, Any], outer: Mapping[str, Any]) -> int | None:
    """Return the longest request where the user gives none: for LongRoPE the length before it is
    stretched.
    """
    if rope_kind(text) == "longrope":
        return count_of(text, "original_max_position_embeddings") or _longest(text, outer)
    return _longest(text, outer)


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    """Return the heads that keep keys and values: all of them, unless the family says fewer in one
    of its ways.
    """
    attention = text.get("attn_config")
    if isinstance(attention, Mapping):
        named = count_of(attention, "num_key_value_heads")
    else:
        named = None
    if named is None:
        named = count_of(text, "num_key_value_heads")
    if named == 0 and not _attention_free(text):
        raise ConfigError("num_key_value_heads is 0, not a count above zero")
    kind = str(text.get("model_type"))
    shared = text.get("multi_query", True)
    if kind in FAMILIES["types"]["one_head_unless_new"]:
        if not text.get("new_decoder_architecture"):
            if shared:
                return 1
            return heads
    elif kind == "gpt_bigcode" or text.get("multi_query") is True:
        if shared:
            return 1
        return heads
    if text.get("multi_query_attention") is False:
        return heads
    return named or heads


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    named = count_of(text, "head_dim")
    if named:
        return named
    if hidden % heads and not _attention_free(text):
        raise ConfigError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is "
            "missing"
        )
    if hidden < heads:
        raise ConfigError(
            f"hidden_size is {hidden}, less than num_attention_heads {heads}, and head_dim is "
            "missing"
        )
    return hidden // heads


def _dtype_bytes(text: Mapping[str, Any], outer: Mapping[str, Any]) -> int:
    """Return the bytes of an element of the activations: half precision where the file names no
    type, or float32.

    Source: vllm/config/model.py, _resolve_auto_dtype, which loads float32 checkpoints in half
        precision.
    """
    name = _dtype(text, outer)
    return min(DTYPE_BYTES.get(name or "", 2), 2)


def _dtype(text: Mapping[str, Any], outer: Mapping[str, Any]) -> str | None:
    """Return the data type that the file names, None where it names none."""
    for part in (text, outer):
        if part.get("dtype"):
            key = "dtype"
        else:
            key = "torch_dtype"
        name = part.get(key)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{key} is {shown(name)}, not the name of a data type")
        if name:
            return name.removeprefix("torch.")
    return None
