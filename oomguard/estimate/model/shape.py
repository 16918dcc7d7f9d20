"""Read the numbers in a model's ``config.json`` that decide its memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from oomguard.core.errors import ConfigError, InputError
from oomguard.core.files import read_regular, read_tables

# A model folder's JSON files are untrusted input: their size and depth are limited, and a key may
# occur only once.

# Published configurations and weight indices have up to a few megabytes and a depth below ten.
MAX_CONFIG_BYTES: Final = 16_000_000
MAX_DEPTH: Final = 64
_SHOWN_CHARS: Final = 60


def printable(value: object) -> str:
    """Return an untrusted value for a message: one line, shortened, without control characters."""
    text = repr(value)
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}…"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file does not exist, or has no usable JSON object.
        InputError: the file is irregular, too large, or unreadable.
    """
    try:
        content = read_regular(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            "no such file", path=str(path), hint="a model folder needs a config.json"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}", hint="expected a JSON file of the model"
        ) from None
    return parse_object(content, path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object; raises ConfigError with ``path`` for anything else."""
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_each_once)
    except _TwiceError as error:
        raise ConfigError(
            f"the key {error} occurs twice in one object, with two values", path=str(path)
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", path=str(path)) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}", path=str(path)) from None
    except ValueError:
        raise ConfigError("has a number with thousands of digits", path=str(path)) from None
    except RecursionError:
        raise _too_deep(path) from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"holds a {type(parsed).__name__}, not an object", path=str(path))
    if _is_deeper(parsed, MAX_DEPTH):
        raise _too_deep(path)
    return parsed


@contextlib.contextmanager
def mistakes_in(path: str) -> Iterator[None]:
    """Add the path of a file to each ConfigError from the block that has none yet."""
    try:
        yield
    except ConfigError as error:
        if error.path is not None:
            raise
        raise ConfigError(str(error), path=path, hint=error.hint) from None


class _TwiceError(Exception):
    """Report a key that occurs twice in one object with two values.

    JSON readers disagree about which value wins.
    """


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value and value == value:  # noqa: PLR0124 - NaN is not two values
                raise _TwiceError(printable(name))
    return found


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(f"nested more than {MAX_DEPTH} levels deep", path=str(path))


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether a parsed value is nested deeper than ``levels``."""
    level: list[object] = [value]
    for _ in range(levels):
        inner: list[object] = []
        for part in level:
            inner += _inside(part)
        level = inner
        if not level:
            return False
    return True


def _inside(part: object) -> Iterable[object]:
    values: Iterable[object] = ()
    if isinstance(part, dict):
        values = part.values()
    elif isinstance(part, list):
        values = part
    for inner in values:
        if isinstance(inner, (dict, list)):
            yield inner


# One data file has each family's field names and default values.

_FILE: Final = Path(__file__).with_name("families.toml")
FAMILIES: Final[dict[str, Any]] = read_tables("families", [_FILE])[_FILE]


def encoder_decoder(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]] | None:
    """Return the number names of both parts of an encoder-decoder model, or None."""
    kind = config.get("model_type")
    found: Mapping[str, Mapping[str, str]] | None = (
        FAMILIES["encoder_decoder"].get(kind) if isinstance(kind, str) else None
    )
    return found


_ALIASES: Final[Mapping[str, list[str]]] = FAMILIES["aliases"]
DTYPE_BYTES: Final[Mapping[str, int]] = FAMILIES["dtype_bytes"]
# No model has a larger number. A larger value is a mistake that arithmetic would hide.
MAX_COUNT: Final = 10**9
MAX_LAYERS: Final = 1000
_ONE_FOR_ALL: Final = frozenset(
    {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "head_dim"}
)
_MAX_FACTOR: Final = 100_000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hold one decoder's numbers as counts, not bytes.

    ``config`` is the language model's part of the configuration, ``outer`` the whole file.
    ``default_length`` is the longest request if the user gives none. ``max_positions`` is the
    longest request that the model supports. Each is None if the file does not have it.
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
        """Return whether the model has an image or audio encoder next to the language model."""
        if self.outer is not self.config:
            return True
        for part in FAMILIES["names"]["encoders"]:
            if isinstance(self.outer.get(part), Mapping):
                return True
        return False

    @property
    def unknown_dtype(self) -> str | None:
        """Return the file's unknown data type, or None if it is known or absent."""
        name = _dtype(self.config, self.outer)
        if name is None or name in DTYPE_BYTES:
            return None
        return name

    def number(self, name: str) -> int | None:
        """Return a count under any of its names, or the largest of a list.

        Returns None if the field is missing or null.

        Raises:
            ConfigError: the count is absurd.
        """
        with mistakes_in(self.path):
            return count_of(self.config, name)


def read_shape(config: Mapping[str, Any], path: str = "config.json") -> ModelShape:
    """Read the numbers of a parsed configuration.

    Raises:
        ConfigError: a field is missing or absurd; the message names it.
    """
    text = text_part(config)
    with mistakes_in(path):
        _check_architecture(config)
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


# Classes without a head that an engine could serve.
_TRAINING_ONLY: Final = ("ForPreTraining", "ForMaskedLM", "ForNextSentencePrediction")


def _check_architecture(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the configuration names no model, or one that only trains."""
    named = config.get("architectures")
    if not named and not config.get("model_type"):
        raise ConfigError(
            "names no model: architectures and model_type are missing",
            hint="give the config.json of a model, as transformers writes it",
        )
    if isinstance(named, list) and named and all(str(n).endswith(_TRAINING_ONLY) for n in named):
        raise ConfigError(
            f"{printable(named[0])} is a class for training, and no engine serves it",
            hint="give the config.json of a model for generation or pooling",
        )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration, or all of it if it has one part.

    For an encoder-decoder model the part is the decoder. Its numbers get the names that all
    decoders use.
    """
    part = config
    # Some models nest parts: the language model of Qwen2.5-Omni is inside its thinker.
    while (inner := _inner_part(part)) is not None:
        part = inner
    return _decoder(part)


def _inner_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for name in FAMILIES["names"]["text_parts"]:
        part = config.get(name)
        if isinstance(part, Mapping):
            return part
    return None


def _decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    both = encoder_decoder(config)
    if both is None:
        return config
    found = dict(config)
    for name, own in both["decoder"].items():
        if own in config:
            found[name] = config[own]
    return found


def _model_type(text: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    for part in (text, outer):
        name = part.get("model_type")
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"model_type is {printable(name)}, not text")
        if name:
            return name
    return ""


def _attention_free(text: Mapping[str, Any]) -> bool:
    return "state_size" in text or "ssm_state_size" in text


def _needed(config: Mapping[str, Any], name: str) -> int:
    value = count_of(config, name)
    if value is None:
        others = ", ".join((name, *_ALIASES.get(name, ())))
        raise ConfigError(f"{name} is missing (also searched: {others})")
    return value


def count_of(config: Mapping[str, Any], name: str) -> int | None:
    """Return a count under any of its names, or the largest of a list.

    Returns None if the field is missing or null.

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
            value = max(value)  # one per layer: the largest decides the peak
        if not is_count(value):
            raise ConfigError(f"{key} is {printable(value)}, not a count")
        assert isinstance(value, int)  # noqa: S101 - for the type checker: is_count has just asked
        if name == "num_hidden_layers" and value > MAX_LAYERS:
            raise ConfigError(f"{key} is {value}, but oomguard reads at most {MAX_LAYERS}")
        if value == 0 and name in _ONE_FOR_ALL:
            raise ConfigError(f"{key} is 0, not a count above zero")
        return value
    return None


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a count that a model can have, including 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the position scaling of a model, or an empty mapping."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(found, Mapping):
        return found
    return {}


def rope_kind(config: Mapping[str, Any]) -> str:
    """Return the name of the position scaling, or an empty text."""
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type")
    if isinstance(kind, str):
        return kind
    return ""


def rope_factor(config: Mapping[str, Any]) -> float:
    """Return the factor of the position scaling.

    Returns 1.0 if the file has no factor or an absurd one.
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
    """Return the longest request that the model supports, or None if the file does not say."""
    known = []
    for name in FAMILIES["names"]["lengths"]:
        if value := count_of(text, name):
            known.append(value)
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
    """Return the longest request if the user gives none.

    For LongRoPE it is the length before scaling.
    """
    if rope_kind(text) == "longrope":
        return count_of(text, "original_max_position_embeddings") or _longest(text, outer)
    return _longest(text, outer)


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    """Return the number of key-value heads.

    All heads have keys and values unless one of the family's fields sets fewer.
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
    if named and heads % named and not _attention_free(text):
        raise ConfigError(
            f"num_attention_heads is {heads}, not a multiple of num_key_value_heads {named}"
        )
    return named or heads


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    named = count_of(text, "head_dim")
    if named:
        return named
    latent = count_of(text, "qk_rope_head_dim")
    if hidden % heads and latent:
        # Latent attention has other dimensions for queries and values (GLM 4.7 Flash).
        return latent
    if hidden % heads and not _attention_free(text):
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and "
            "head_dim is missing"
        )
    if hidden < heads:
        raise ConfigError(
            f"hidden_size {hidden} is less than num_attention_heads {heads}, and head_dim "
            "is missing"
        )
    return hidden // heads


def _dtype_bytes(text: Mapping[str, Any], outer: Mapping[str, Any]) -> int:
    """Return the bytes per element of the activations.

    Without a data type, or with float32, this is half precision. Source: vllm/config/model.py,
    _resolve_auto_dtype, which loads float32 checkpoints in half precision.
    """
    name = _dtype(text, outer)
    return min(DTYPE_BYTES.get(name or "", 2), 2)


def _dtype(text: Mapping[str, Any], outer: Mapping[str, Any]) -> str | None:
    """Return the data type in the file, or None if it has none."""
    for part in (text, outer):
        if part.get("dtype"):
            key = "dtype"
        else:
            key = "torch_dtype"
        name = part.get(key)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{key} is {printable(name)}, not the name of a data type")
        if name:
            return name.removeprefix("torch.")
    return None
