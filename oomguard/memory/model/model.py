"""A model read once, to be budgeted under many settings: its shape, its parameters, its encoder and its draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from oomguard.errors import ConfigError, SettingError
from oomguard.facts import format_gib
from oomguard.memory.model import eagle
from oomguard.memory.model.audio_encoder import read_audio_encoder
from oomguard.memory.model.contradictions import check_headers
from oomguard.memory.model.drafts import Speculation, read_speculation
from oomguard.memory.model.encoder import Encoder
from oomguard.memory.model.files import ModelFiles, find_model
from oomguard.memory.model.gguf import SUFFIX, packed
from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.json_file import shown
from oomguard.memory.model.layer_kinds import not_read
from oomguard.memory.model.layouts import laid_out
from oomguard.memory.model.mtp_layers import mtp_layers
from oomguard.memory.model.parameters import built_on_meta, completed, counted, is_tied, well_counted
from oomguard.memory.model.quantized import loaded, quantized
from oomguard.memory.model.shape import DTYPE_BYTES, ModelShape, count_of, read_shape, text_part
from oomguard.memory.model.vision_encoder import read_vision_encoder

# Numbers that a published file may leave to its family's default.
_OFTEN_LEFT_OUT: Final = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# By how much counting from the shape alone may be off: plain families differ in norms, biases and gates, others in much more.
_COUNTED_WELL_RATIO, _COUNTED_BADLY_RATIO = 0.15, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model read once: building its parameters takes longer than a budget.

    Attributes:
        name: the model as the user named it.
        shape: its numbers.
        parameters: its parameters, with the bytes they take once loaded.
        exact: whether everything that its memory follows from was read.
        assumptions: what was neither given nor read, a line each.
        weights_uncertainty_ratio: by how much the bytes of the parameters may be off.
        speculation: how it drafts, None where it does not.
        draft: the draft model.
        encoder: the encoder of images or audio, None where it has none or its numbers are not given.
    """

    name: str
    shape: ModelShape
    parameters: tuple[Parameter, ...]
    exact: bool
    assumptions: tuple[str, ...]
    weights_uncertainty_ratio: float = 0.0
    speculation: Speculation | None = None
    draft: Model | None = None
    encoder: Encoder | None = None


def read_model(
    model: ModelFiles, *, dtype: str = "auto", quantization: str | None = None, speculative_config: str | None = None
) -> Model:
    """Read a model's shape and parameters, and its draft's.

    Args:
        model: the model's files.
        dtype: the data type that the engine runs with; ``auto`` for the model's own.
        quantization: the method that the engine quantises with while it loads.
        speculative_config: vLLM's setting of that name, a JSON text.

    Raises:
        ConfigError: a number of a configuration is missing or absurd.
        InputError: the draft model cannot be found.
        SettingError: one of the settings cannot be had with this model.
    """
    speculation = read_speculation(speculative_config)
    draft = None
    if speculation is not None and speculation.model is not None:
        draft = _read_draft(find_model(speculation.model), dtype, speculation.method)
    found = _read_model(model, dtype, quantization)
    if speculation is not None and speculation.uses_mtp_layers and model.parameters is None:
        found = replace(found, parameters=(*found.parameters, *mtp_layers(found.parameters, found.shape)))
    return replace(found, speculation=speculation, draft=draft, encoder=_encoder(model, found.shape))


def _read_draft(files: ModelFiles, dtype: str, method: str) -> Model:
    draft = read_model(files, dtype=dtype)
    if method not in eagle.METHODS or files.parameters is not None:
        return draft
    return replace(draft, parameters=tuple(eagle.eagle_parameters(draft.parameters, draft.shape, method)))


def _encoder(model: ModelFiles, shape: ModelShape) -> Encoder | None:
    """Read the encoder from the file, with its family's defaults where the file leaves its numbers out."""
    if not shape.has_encoder:
        return None
    if (audio := read_audio_encoder(model.config, shape.hidden)) is not None:
        return audio
    found = read_vision_encoder(model.config, model.processor, shape.hidden)
    return found or read_vision_encoder(completed(model.config), model.processor, shape.hidden)


def _read_model(model: ModelFiles, dtype: str, quantization: str | None) -> Model:
    assumed: list[str] = []
    shape = _shape(model, assumed)
    unknown = shape.unknown_dtype
    if dtype == "auto" and unknown is not None:
        assumed.append(f"dtype {shown(unknown)} in the configuration is not known: half precision")
    if dtype != "auto":
        shape = replace(shape, dtype_bytes=element_bytes(dtype))
    if model.parameters is not None:
        check_headers(model.parameters, shape, model.config_path)
        parameters = loaded(model.parameters, shape, quantization, assumed)
        return Model(model.name, shape, parameters, _certain(shape, assumed), tuple(assumed))
    found = laid_out(shape, tied=is_tied(shape)) or built_on_meta(shape)
    exact = found is not None or well_counted(shape)
    if found is not None:
        assumed.append("weights: from the configuration, no safetensors files beside it")
    else:
        assumed.append("weights: counted from the configuration, transformers does not build this model here")
    if found is None and shape.has_encoder:
        assumed.append("weights: the encoder's of images or audio are not counted")
    if model.gguf_bytes is not None and (quantization == "gguf" or model.name.endswith(SUFFIX)):
        assumed.append(f"weights: {format_gib(model.gguf_bytes)} by the GGUF file's size, packed as they are")
        parameters = packed(found or counted(shape), model.gguf_bytes)
        return Model(model.name, shape, parameters, _certain(shape, assumed), tuple(assumed))
    parameters = quantized(found or counted(shape), shape, quantization, assumed)
    uncertain = 0.0 if found is not None else _COUNTED_WELL_RATIO if exact else _COUNTED_BADLY_RATIO
    certain = _certain(shape, assumed)
    return Model(model.name, shape, parameters, certain, tuple(assumed), weights_uncertainty_ratio=uncertain)


def _shape(model: ModelFiles, assumed: list[str]) -> ModelShape:
    """Read the numbers; record the family's default of one that the file leaves out as an assumption."""
    try:
        shape = read_shape(model.config, model.config_path)
    except ConfigError as error:
        try:
            return _filled(model, assumed)
        except ConfigError:
            raise error from None  # what the file itself has, and not what became of it
    if shape.number("num_key_value_heads") is None and not shape.config.get("attn_config"):
        return _filled(model, assumed)
    return shape


def _filled(model: ModelFiles, assumed: list[str]) -> ModelShape:
    shape = read_shape(completed(model.config), model.config_path)
    given = text_part(model.config)
    added = [
        f"{name} {shape.number(name)}"
        for name in _OFTEN_LEFT_OUT
        if count_of(given, name) is None and shape.number(name)
    ]
    if added:
        assumed.append(f"{', '.join(added)}: not in the file, its family's default in transformers")
    return shape


def _certain(shape: ModelShape, assumed: list[str]) -> bool:
    """Whether everything that the cache follows from was read; record as an assumption what was not."""
    unread = not_read(shape)
    if unread:
        assumed.append(f"{', '.join(unread)} in the configuration: not read, so the KV cache may differ by much")
    return not unread


def element_bytes(name: str) -> int:
    """Return the bytes of an element of a data type by vLLM's name of it; raises SettingError for another name."""
    if name not in DTYPE_BYTES:
        raise SettingError(f"dtype is {name!r}", hint=f"one of auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
