"""A model read once, to be budgeted under many settings: its shape, its parameters, its encoder and
its draft.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.core.errors import ConfigError, SettingError
from oomguard.core.facts import format_gib
from oomguard.estimate.model.drafts import Speculation, read_speculation
from oomguard.estimate.model.files import ModelFiles, find_model
from oomguard.estimate.model.layer_kinds import not_read
from oomguard.estimate.model.layouts import laid_out
from oomguard.estimate.model.parameters import (
    built_on_meta,
    completed,
    counted,
    is_tied,
    well_counted,
)
from oomguard.estimate.model.quantized import loaded, quantized, quantizes_mtp
from oomguard.estimate.model.shape import (
    DTYPE_BYTES,
    ModelShape,
    count_of,
    encoder_decoder,
    is_count,
    read_shape,
    shown,
    text_part,
)
from oomguard.estimate.model.vision_encoder import Encoder, read_vision_encoder
from oomguard.estimate.model.weight_headers import SUFFIX, Parameter, packed

# Whether a configuration and the headers of the weights beside it are of one model: an engine
# refuses them when they are not.

_DECODER: Final = r"(?:model\.|language_model\.|transformer\.|decoder\.|text_model\.)*"
_TABLE: Final = re.compile(_DECODER + r"(?:embed_tokens|wte)\.weight")
_LAYER: Final = re.compile(_DECODER + r"(?:layers|h)\.(\d+)\.")
# Vocabularies are padded in a file or beside it: https://huggingface.co/Qwen has 151,643 to 152,064
# of one tokenizer.
_PADDED_RATIO: Final = 0.05
_HINT: Final = "give the folder of one model: its config.json and its own weights"


def check_headers(parameters: Sequence[Parameter], shape: ModelShape, path: str) -> None:
    """Raise ConfigError where the weights' headers are of another model than the configuration.

    Args:
        parameters: the tensors that the headers announce.
        shape: the configuration's numbers.
        path: the configuration's path, for the message.
    """
    for parameter in parameters:
        if parameter.floating and len(parameter.shape) == 2 and _TABLE.fullmatch(parameter.name):
            _check_table(parameter, shape, path)
    layers = {int(match.group(1)) for p in parameters if (match := _LAYER.match(p.name))}
    more = shape.number("num_nextn_predict_layers") or 0
    if layers and not shape.layers <= len(layers) <= shape.layers + more:
        raise ConfigError(
            f"num_hidden_layers is {shape.layers}, the weights' headers have {len(layers)} layers",
            path=path,
            hint=_HINT,
        )


def _check_table(table: Parameter, shape: ModelShape, path: str) -> None:
    rows, width = table.shape
    wanted = shape.number("word_embed_proj_dim") or shape.hidden
    if width == wanted and abs(rows - shape.vocab) <= _PADDED_RATIO * shape.vocab:
        return
    said = f"vocab_size is {shape.vocab} and hidden_size {wanted}"
    raise ConfigError(
        f"{said}, the weights' headers have {table.name} as {rows} by {width}",
        path=path,
        hint=_HINT,
    )


# The layers that predict further tokens (MTP), of a model whose configuration alone is there: no
# family's decoder builds them.
#
# Each is as large as the last layer of the decoder, in half precision where a quantised checkpoint
# leaves it alone, beside the projection of the embedding and the hidden state that it starts from;
# embedding and head are the decoder's own. Sources: vllm/model_executor/models/deepseek_mtp.py and
# qwen3_5_mtp.py of 0.27.1.

_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_MOST_LAYERS: Final = 8
_OF_AN_ENCODER: Final = re.compile(r"vision|visual|audio|encoder\.")


def mtp_layers(parameters: Sequence[Parameter], shape: ModelShape) -> tuple[Parameter, ...]:
    """Return the parameters of a model's MTP layers, named as the layers behind its last; none
    where it has none.

    Args:
        parameters: the decoder's own, as they are loaded.
        shape: the model's numbers.
    """
    count = next((number for name in _COUNTS if (number := shape.number(name))), 0)
    last = re.compile(rf"(?:^|\.)layers\.{shape.layers - 1}\.")
    own = [p for p in parameters if last.search(p.name) and not _OF_AN_ENCODER.search(p.name)]
    if not own or not 0 < count <= _MOST_LAYERS:
        return ()
    if not quantizes_mtp(shape):
        own = [replace(p, bytes=p.elements * shape.dtype_bytes) for p in own]
    found = []
    for index in range(shape.layers, shape.layers + count):
        found += [replace(p, name=last.sub(f"model.layers.{index}.", p.name)) for p in own]
        size = (shape.hidden, 2 * shape.hidden)
        found.append(
            Parameter(
                f"model.layers.{index}.eh_proj.weight",
                size,
                2 * shape.hidden**2 * shape.dtype_bytes,
            )
        )
    return tuple(found)


# The parameters of an EAGLE head by its configuration alone, which reads as a decoder of one layer.
#
# It looks words up in the target's embedding, EAGLE also ends in the target's head. EAGLE-3 has a
# head of its own vocabulary, a projection of three of the target's hidden states, and a first layer
# whose attention reads the embedding beside the hidden state. Sources:
# vllm/model_executor/models/llama_eagle.py and llama_eagle3.py, vllm/v1/spec_decode/eagle.py of
# 0.30.

METHODS: Final = frozenset({"eagle", "eagle3"})
_EMBEDDING: Final = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_HEAD: Final = re.compile(r"(?:^|\.)lm_head\.weight$")
_FIRST_INPUTS: Final = re.compile(r"\.layers\.0\.self_attn\.(?:q|k|v)_proj\.weight$")
_AUXILIARY_STATES: Final = 3


def eagle_parameters(
    parameters: Sequence[Parameter], shape: ModelShape, method: str
) -> Iterator[Parameter]:
    """Yield the parameters that a head holds beside its target.

    Args:
        parameters: those of the decoder that its configuration reads as.
        shape: the head's numbers.
        method: ``eagle`` or ``eagle3``.
    """
    own_head = method == "eagle3"
    states = _AUXILIARY_STATES if method == "eagle3" else 2
    if own_head:
        target = shape.number("target_hidden_size") or shape.hidden
    else:
        target = shape.hidden
    for parameter in parameters:
        if _EMBEDDING.search(parameter.name) or (_HEAD.search(parameter.name) and not own_head):
            continue
        if _HEAD.search(parameter.name):
            yield _matrix(
                parameter.name, shape.number("draft_vocab_size") or shape.vocab, shape.hidden, shape
            )
        elif own_head and _FIRST_INPUTS.search(parameter.name):
            yield _matrix(parameter.name, parameter.shape[0], 2 * shape.hidden, shape)
        else:
            yield parameter
    yield _matrix("model.fc.weight", shape.hidden, states * target, shape)


def _matrix(name: str, rows: int, columns: int, shape: ModelShape) -> Parameter:
    return Parameter(name, (rows, columns), rows * columns * shape.dtype_bytes)


# The audio encoder of a model of an encoder and a decoder (Whisper), read from its configuration.
#
# Source: vllm/model_executor/models/whisper.py, 0.32. families.toml has the names of its numbers.
# Audio encoders whose tokens are part of the prompt (Qwen2-Audio) are not read.

_MLP_TENSORS: Final = 2


def read_audio_encoder(config: Mapping[str, Any], output_width: int) -> Encoder | None:
    """Read the encoder; None where the model's decoder does not attend across to one, or where a
    number is missing.
    """
    both = encoder_decoder(config)
    if both is None:
        return None
    names = both["encoder"]
    found = [config.get(names[name]) for name in ("width", "mlp_width", "tokens_per_item")]
    counts = [number for number in found if is_count(number) and number > 0]
    if len(counts) != len(found):
        return None
    width, mlp, tokens = counts
    return Encoder(
        width,
        mlp,
        _MLP_TENSORS,
        1,
        tokens,
        output_width,
        modality=names["modality"],
        in_prompt=False,
    )


# Numbers that a published file may leave to its family's default.
_OFTEN_LEFT_OUT: Final = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# By how much counting from the shape alone may be off: plain families differ in norms, biases and
# gates, others in much more.
_COUNTED_WELL_RATIO = 0.15
_COUNTED_BADLY_RATIO = 0.8


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
        encoder: the encoder of images or audio, None where it has none or its numbers are not
            given.
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
    model: ModelFiles,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    speculative_config: str | None = None,
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
        found = replace(
            found, parameters=(*found.parameters, *mtp_layers(found.parameters, found.shape))
        )
    return replace(
        found, speculation=speculation, draft=draft, encoder=_encoder(model, found.shape)
    )


def _read_draft(files: ModelFiles, dtype: str, method: str) -> Model:
    draft = read_model(files, dtype=dtype)
    if method not in METHODS or files.parameters is not None:
        return draft
    return replace(draft, parameters=tuple(eagle_parameters(draft.parameters, draft.shape, method)))


def _encoder(model: ModelFiles, shape: ModelShape) -> Encoder | None:
    """Read the encoder from the file, with its family's defaults where the file leaves its numbers
    out.
    """
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
        assumed.append(
            "weights: counted from the configuration, transformers does not build this model here"
        )
    if found is None and shape.has_encoder:
        assumed.append("weights: the encoder's of images or audio are not counted")
    if model.gguf_bytes is not None and (quantization == "gguf" or model.name.endswith(SUFFIX)):
        assumed.append(
            f"weights: {format_gib(model.gguf_bytes)} by the GGUF file's size, packed as they are"
        )
        parameters = packed(found or counted(shape), model.gguf_bytes)
        return Model(model.name, shape, parameters, _certain(shape, assumed), tuple(assumed))
    parameters = quantized(found or counted(shape), shape, quantization, assumed)
    if found is not None:
        uncertain = 0.0
    elif exact:
        uncertain = _COUNTED_WELL_RATIO
    else:
        uncertain = _COUNTED_BADLY_RATIO
    certain = _certain(shape, assumed)
    return Model(
        model.name, shape, parameters, certain, tuple(assumed), weights_uncertainty_ratio=uncertain
    )


def _shape(model: ModelFiles, assumed: list[str]) -> ModelShape:
    """Read the numbers; record the family's default of one that the file leaves out as an
    assumption.
    """
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
    """Whether everything that the cache follows from was read; record as an assumption what was
    not.
    """
    unread = not_read(shape)
    if unread:
        assumed.append(
            f"{', '.join(unread)} in the configuration: not read, so the KV cache may differ by "
            "much"
        )
    return not unread


def element_bytes(name: str) -> int:
    """Return the bytes of an element of a data type by vLLM's name of it; raises SettingError for
    another name.
    """
    if name not in DTYPE_BYTES:
        raise SettingError(f"dtype is {name!r}", hint=f"one of auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
