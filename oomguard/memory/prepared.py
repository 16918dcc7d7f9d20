"""A model read once: its shape, its parameters, and what it drafts with, to be planned under many settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from oomguard.errors import ConfigError, SettingError
from oomguard.memory.drafts import Speculation, read_speculation
from oomguard.memory.encoder import Encoder, read_encoder
from oomguard.memory.layer_kinds import not_read
from oomguard.memory.model_files import ModelFiles, Parameter, find_model
from oomguard.memory.model_shape import DTYPE_BYTES, ModelShape, count_of, read_shape, text_part
from oomguard.memory.parameters import built_on_meta, completed, counted, well_counted
from oomguard.memory.quantized import loaded, quantized

_ASKED: Final = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
# What counting parameters from the shape alone may be off by: plain families differ in norms, biases and gates, others by much.
_COUNTED_WELL_RATIO, _COUNTED_BADLY_RATIO = 0.15, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A model read once, to be planned under many settings: building its parameters takes longer than planning."""

    name: str
    shape: ModelShape
    parameters: tuple[Parameter, ...]
    exact: bool
    assumptions: tuple[str, ...]
    weights_uncertainty_ratio: float = 0.0
    speculation: Speculation | None = None
    draft: Prepared | None = None
    encoder: Encoder | None = None


def prepare(
    model: ModelFiles, *, dtype: str = "auto", quantization: str | None = None, speculative_config: str | None = None
) -> Prepared:
    """Read a model's shape and parameters, and its draft's; raises ConfigError for their numbers, SettingError for the settings."""
    speculation = read_speculation(speculative_config)
    draft = None
    if speculation is not None and speculation.model is not None:
        draft = prepare(find_model(speculation.model), dtype=dtype)
    found = _prepare(model, dtype, quantization)
    return replace(found, speculation=speculation, draft=draft, encoder=_encoder(model, found.shape))


def _encoder(model: ModelFiles, shape: ModelShape) -> Encoder | None:
    """The tower of images by the file, or by its family's defaults where the file leaves its numbers out."""
    if not shape.has_encoder:
        return None
    found = read_encoder(model.config, model.processor, shape.hidden)
    return found or read_encoder(completed(model.config), model.processor, shape.hidden)


def _prepare(model: ModelFiles, dtype: str, quantization: str | None) -> Prepared:
    assumed: list[str] = []
    shape = _shape(model, assumed)
    if dtype != "auto":
        shape = replace(shape, dtype_bytes=element_bytes(dtype))
    if model.parameters is not None:
        parameters = loaded(model.parameters, shape, quantization, assumed)
        return Prepared(model.name, shape, parameters, _certain(shape, assumed), tuple(assumed))
    found = built_on_meta(shape)
    exact = found is not None or well_counted(shape)
    assumed.append(
        "weights: from the configuration, no safetensors files beside it" if found is not None else
        "weights: counted from the configuration, transformers does not build this model here"
    )  # fmt: skip
    if found is None and shape.has_encoder:
        assumed.append("weights: the encoder's of images or audio are not counted")
    parameters = quantized(found or counted(shape), shape, quantization, assumed)
    uncertain = 0.0 if found is not None else _COUNTED_WELL_RATIO if exact else _COUNTED_BADLY_RATIO
    certain = _certain(shape, assumed)
    return Prepared(model.name, shape, parameters, certain, tuple(assumed), weights_uncertainty_ratio=uncertain)


def _shape(model: ModelFiles, assumed: list[str]) -> ModelShape:
    """The numbers as the file has them; with its family's defaults where it leaves some out, which is said."""
    try:
        shape = read_shape(model.config, model.config_path)
    except ConfigError:
        return _filled(model, assumed)
    if shape.number("num_key_value_heads") is None and not shape.config.get("attn_config"):
        return _filled(model, assumed)
    return shape


def _filled(model: ModelFiles, assumed: list[str]) -> ModelShape:
    shape = read_shape(completed(model.config), model.config_path)
    given = text_part(model.config)
    added = [f"{name} {shape.number(name)}" for name in _ASKED if count_of(given, name) is None and shape.number(name)]
    if added:
        assumed.append(f"{', '.join(added)}: not in the file, its family's default in transformers")
    return shape


def _certain(shape: ModelShape, assumed: list[str]) -> bool:
    """Whether all that decides over the cache is read; what is not is said."""
    unread = not_read(shape)
    if unread:
        assumed.append(f"{', '.join(unread)} in the configuration: not read, so the KV cache may differ by much")
    return not unread


def element_bytes(name: str) -> int:
    """Bytes of an element of a data type by vLLM's name of it; raises SettingError."""
    if name not in DTYPE_BYTES:
        raise SettingError(f"dtype is {name!r}", hint=f"one of auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
