"""Read a model once, then estimate it under many settings."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import ConfigError, SettingError
from oomguard.core.facts import format_gib
from oomguard.estimate.model.files import SUFFIX, ModelFiles, Parameter, find_model, scale_to_file
from oomguard.estimate.model.layer_caches import unread_fields
from oomguard.estimate.model.parameters import (
    build_on_meta,
    count_parameters,
    fill_defaults,
    is_count_accurate,
    is_tied,
    parameters_from_layout,
)
from oomguard.estimate.model.quantization import (
    quantize_parameters,
    quantizes_mtp,
    size_loaded_parameters,
    unread_quantization,
)
from oomguard.estimate.model.shape import (
    DTYPE_BYTES,
    ModelShape,
    count_of,
    encoder_decoder,
    is_count,
    printable,
    read_shape,
    text_part,
)

if TYPE_CHECKING:
    from oomguard.estimate.model.vision_encoder import Encoder

# Read which draft model, or which MTP layers, speculative decoding adds.
#
# The draft runs on the last pipeline stage and is sharded like the target. Its layers take blocks
# from the same pool (vllm/config/speculative.py, v1/spec_decode, 0.32). An n-gram or suffix method
# uses no device memory.

_MOST_TOKENS: Final = 1000
_NO_MODEL: Final = frozenset({"ngram", "ngram_gpu", "suffix", "[ngram]"})
_MTP: Final = (
    "mtp",
    "deepseek_mtp",
    "mimo_mtp",
    "glm4_moe_mtp",
    "qwen3_next_mtp",
    "ernie_mtp",
    "longcat_flash_mtp",
)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Describe the speculative method, its draft tokens per step, and its draft model.

    ``model`` is None if the method has no draft model.
    """

    method: str
    tokens: int
    model: str | None = None

    @property
    def uses_mtp_layers(self) -> bool:
        """Return whether the target's own MTP layers draft."""
        return self.method in _MTP


def read_speculation(text: str | None) -> Speculation | None:
    """Parse vLLM's ``speculative_config``, a JSON text.

    Returns None for an empty text.

    Raises:
        SettingError: vLLM would reject the value.
    """
    if text is None:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(
            f"speculative_config is not valid JSON: {error}",
            hint='{"model": "DRAFT", "num_speculative_tokens": 5}',
        ) from None
    if not isinstance(config, Mapping):
        raise SettingError(f"speculative_config must be a JSON object, got {text!r}")
    model = config.get("model")
    tokens = config.get("num_speculative_tokens")
    method = _method(config, model)
    if tokens is None and method in _MTP:
        tokens = 1
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= _MOST_TOKENS:
        raise SettingError(
            f"speculative_config.num_speculative_tokens must be a token count, got {tokens!r}"
        )
    if method not in _NO_MODEL and method not in _MTP and not isinstance(model, str):
        raise SettingError(
            f"speculative_config.model must be a folder or a hub name, got {model!r}",
            hint="give a folder or a hub name of the draft model",
        )
    if isinstance(model, str) and method not in _NO_MODEL and method not in _MTP:
        named = model
    else:
        named = None
    return Speculation(method, tokens, named)


def _method(config: Mapping[str, Any], model: object) -> str:
    method = config.get("method")
    if isinstance(method, str):
        return method
    if isinstance(model, str) and model in _NO_MODEL:
        return model
    return "draft_model"


# An engine refuses weights that belong to another configuration, so oomguard compares both.

_DECODER: Final = r"(?:model\.|language_model\.|transformer\.|decoder\.|text_model\.)*"
_TABLE: Final = re.compile(_DECODER + r"(?:embed_tokens|wte)\.weight")
_LAYER: Final = re.compile(_DECODER + r"(?:layers|h)\.(\d+)\.")
# Files and configurations pad vocabularies differently: https://huggingface.co/Qwen has 151,643 to
# 152,064 tokens for one tokenizer.
_PADDED_RATIO: Final = 0.05
_HINT: Final = "give the folder of one model: its config.json and its own weights"


def check_headers(parameters: Sequence[Parameter], shape: ModelShape, path: str) -> None:
    """Raise ConfigError if the weight headers belong to another model than the configuration.

    Args:
        parameters: the tensors in the headers.
        shape: the configuration's numbers.
        path: the configuration's path, for the message.
    """
    for parameter in parameters:
        if parameter.floating and len(parameter.shape) == 2 and _TABLE.fullmatch(parameter.name):
            _check_table(parameter, shape, path)
    layers = set()
    for p in parameters:
        if match := _LAYER.match(p.name):
            layers.add(int(match.group(1)))
    more = shape.number("num_nextn_predict_layers") or 0
    if layers and not shape.layers <= len(layers) <= shape.layers + more:
        raise ConfigError(
            f"num_hidden_layers is {shape.layers}, but the weight headers have "
            f"{len(layers)} layers",
            path=path,
            hint=_HINT,
        )


def _check_table(table: Parameter, shape: ModelShape, path: str) -> None:
    rows, width = table.shape
    wanted = shape.number("word_embed_proj_dim") or shape.hidden
    if width == wanted and abs(rows - shape.vocab) <= _PADDED_RATIO * shape.vocab:
        return
    expected = f"vocab_size is {shape.vocab} and hidden_size {wanted}"
    raise ConfigError(
        f"{expected}, but the weight headers have {table.name} with {rows} by {width} elements",
        path=path,
        hint=_HINT,
    )


# MTP layers predict further tokens. No family's decoder builds them, so their size comes from the
# configuration. Each is as large as the decoder's last layer plus a projection of the embedding and
# the hidden state. It is in half precision if a quantized checkpoint leaves it alone. It shares the
# decoder's embedding and head. Sources: vllm/model_executor/models/deepseek_mtp.py and
# qwen3_5_mtp.py of 0.27.1.

# DeepSeek V4's MTP layer adds an embedding and a head. Sources:
# vllm/models/deepseek_v4/nvidia/mtp.py of 0.32, and a start of 0.25 that printed 75.64 GiB, 1.0 GiB
# more than without both.
_OWN_TABLES: Final = frozenset({"deepseek_v4"})
_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_MOST_LAYERS: Final = 8
_OF_AN_ENCODER: Final = re.compile(r"vision|visual|audio|encoder\.")


def mtp_layers(parameters: Sequence[Parameter], shape: ModelShape) -> tuple[Parameter, ...]:
    """Return the parameters of a model's MTP layers, or nothing if it has none.

    The names continue the numbers of the decoder's layers.

    Args:
        parameters: the decoder's own parameters, as the engine loads them.
        shape: the model's numbers.
    """
    count = 0
    for field in _COUNTS:
        count = count or shape.number(field) or 0
    last = re.compile(rf"(?:^|\.)layers\.{shape.layers - 1}\.")
    own = []
    for p in parameters:
        if last.search(p.name) and not _OF_AN_ENCODER.search(p.name):
            own.append(p)
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
        if shape.model_type in _OWN_TABLES:
            for table in ("embed_tokens", "shared_head.head"):
                name = f"model.layers.{index}.{table}.weight"
                found.append(_matrix(name, shape.vocab, shape.hidden, shape))
    return tuple(found)


# An EAGLE head's configuration reads like a decoder of one layer. EAGLE shares the target's
# embedding and head. EAGLE-3 shares only the embedding: it has a head for its own vocabulary, a
# projection of three hidden states of the target, and a first layer whose attention reads the
# embedding and the hidden state. Sources: vllm/model_executor/models/llama_eagle.py and
# llama_eagle3.py, vllm/v1/spec_decode/eagle.py of 0.30.

METHODS: Final = frozenset({"eagle", "eagle3"})
_EMBEDDING: Final = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_HEAD: Final = re.compile(r"(?:^|\.)lm_head\.weight$")
_FIRST_INPUTS: Final = re.compile(r"\.layers\.0\.self_attn\.(?:q|k|v)_proj\.weight$")
_AUXILIARY_STATES: Final = 3


def eagle_parameters(
    parameters: Sequence[Parameter], shape: ModelShape, method: str
) -> Iterator[Parameter]:
    """Yield the parameters that a head adds to its target.

    Args:
        parameters: the parameters of the equivalent one-layer decoder.
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


# The audio encoder of an encoder-decoder model (Whisper). oomguard does not read audio encoders
# whose tokens are part of the prompt (Qwen2-Audio). Source: vllm/model_executor/models/whisper.py,
# 0.32. families.toml has the names of its numbers.

_MLP_TENSORS: Final = 2


def read_audio_encoder(config: Mapping[str, Any], output_width: int) -> Encoder | None:
    """Read the audio encoder; None without cross-attention to one, or if a number is missing."""
    both = encoder_decoder(config)
    if both is None:
        return None
    names = both["encoder"]
    found = [config.get(names[name]) for name in ("width", "mlp_width", "tokens_per_item")]
    counts = []
    for number in found:
        if is_count(number) and number > 0:
            counts.append(number)
    if len(counts) != len(found):
        return None
    width, mlp, tokens = counts
    from oomguard.estimate.model.vision_encoder import Encoder

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


# A published file may leave these numbers to its family's default.
_OFTEN_LEFT_OUT: Final = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# A count from the shape alone may be off by this much in plain families, which differ in norms,
# biases and gates. Other families differ by more.
_COUNTED_WELL_RATIO = 0.15
_COUNTED_BADLY_RATIO = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Hold a model that oomguard read once, because building its parameters is slow.

    Attributes:
        name: the model as the user named it.
        shape: its numbers.
        parameters: its parameters, with their bytes after loading.
        assumptions: one line for each value that was neither given nor read.
        weights_uncertainty_ratio: the relative uncertainty of the parameter bytes.
        speculation: the speculative method, or None without one.
        draft: the draft model, or None.
        encoder: the image or audio encoder; None if the model has none or its numbers are missing.
        unread: keys of the configuration that may shape the cache or the weights but were not read.
        weights_from_files: whether the sizes come from the weight files, not the configuration.
    """

    name: str
    shape: ModelShape
    parameters: tuple[Parameter, ...]
    assumptions: tuple[str, ...]
    weights_uncertainty_ratio: float = 0.0
    speculation: Speculation | None = None
    draft: Model | None = None
    encoder: Encoder | None = None
    unread: tuple[str, ...] = ()
    weights_from_files: bool = False

    @property
    def exact(self) -> bool:
        """Return whether oomguard read every key that may shape the cache or the weights."""
        return not self.unread


def read_model(
    model: ModelFiles,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    speculative_config: str | None = None,
) -> Model:
    """Read the shape and parameters of a model and its draft.

    Args:
        model: the model's files.
        dtype: the engine's data type; ``auto`` uses the model's own.
        quantization: the method that the engine quantizes with while loading; None for none.
        speculative_config: vLLM's setting of that name, a JSON text; None for none.

    Raises:
        ConfigError: a number of a configuration is missing or absurd.
        InputError: the draft model does not exist.
        SettingError: this model does not support one of the settings.
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
    """Read the encoder from the file, with the family's defaults for missing numbers."""
    if not shape.has_encoder:
        return None
    if (audio := read_audio_encoder(model.config, shape.hidden)) is not None:
        return audio
    from oomguard.estimate.model.vision_encoder import read_vision_encoder

    found = read_vision_encoder(model.config, model.processor, shape.hidden)
    return found or read_vision_encoder(fill_defaults(model.config), model.processor, shape.hidden)


def _read_model(model: ModelFiles, dtype: str, quantization: str | None) -> Model:
    assumed: list[str] = []
    shape = _shape(model, assumed)
    unknown = shape.unknown_dtype
    if dtype == "auto" and unknown is not None:
        assumed.append(
            f"unknown dtype {printable(unknown)} in the configuration: assumed half precision"
        )
    if dtype != "auto":
        shape = replace(shape, dtype_bytes=element_bytes(dtype))
    if model.parameters is not None:
        check_headers(model.parameters, shape, model.config_path)
        parameters = size_loaded_parameters(model.parameters, shape, quantization, assumed)
        unread = _unread(shape, assumed)
        return Model(
            model.name, shape, parameters, tuple(assumed), unread=unread, weights_from_files=True
        )
    tied = is_tied(shape)
    found = parameters_from_layout(shape, tied=tied)
    if found is None and shape.has_encoder:
        found = parameters_from_layout(replace(shape, outer=fill_defaults(shape.outer)), tied=tied)
    if found is None:
        found = build_on_meta(shape)
    if found is not None:
        assumed.append(
            "weights: computed from the configuration, because there are no safetensors files"
        )
    else:
        assumed.append(
            "weights: computed from the configuration, because transformers cannot build "
            "this model here"
        )
    if found is None and shape.has_encoder:
        assumed.append("weights: without the image or audio encoder")
    if model.gguf_bytes is not None and (quantization == "gguf" or model.name.endswith(SUFFIX)):
        assumed.append(f"weights: {format_gib(model.gguf_bytes)}, the size of the packed GGUF file")
        parameters = scale_to_file(found or count_parameters(shape), model.gguf_bytes)
        unread = _unread(shape, assumed)
        return Model(
            model.name, shape, parameters, tuple(assumed), unread=unread, weights_from_files=True
        )
    parameters = quantize_parameters(found or count_parameters(shape), shape, quantization, assumed)
    if found is not None:
        uncertain = 0.0
    elif is_count_accurate(shape):
        uncertain = _COUNTED_WELL_RATIO
    else:
        uncertain = _COUNTED_BADLY_RATIO
    unread = (*_unread(shape, assumed), *unread_quantization(shape))
    return Model(
        model.name,
        shape,
        parameters,
        tuple(assumed),
        weights_uncertainty_ratio=uncertain,
        unread=unread,
    )


def _shape(model: ModelFiles, assumed: list[str]) -> ModelShape:
    """Read the numbers; record each family default in use as an assumption."""
    try:
        shape = read_shape(model.config, model.config_path)
    except ConfigError as error:
        if not _lacks_number(model.config):
            raise
        try:
            return _filled(model, assumed)
        except ConfigError:
            raise error from None  # report the file's own error, not the one after the defaults
    if shape.number("num_key_value_heads") is None and not shape.config.get("attn_config"):
        return _filled(model, assumed)
    return shape


def _lacks_number(config: Mapping[str, Any]) -> bool:
    """Return whether the file leaves out a number that a family's default may give."""
    text = text_part(config)
    if not text.get("model_type", config.get("model_type")):
        return False
    with contextlib.suppress(ConfigError):
        return any(count_of(text, name) is None for name in _OFTEN_LEFT_OUT)
    return False


def _filled(model: ModelFiles, assumed: list[str]) -> ModelShape:
    shape = read_shape(fill_defaults(model.config), model.config_path)
    given = text_part(model.config)
    added = []
    for name in _OFTEN_LEFT_OUT:
        if count_of(given, name) is None and shape.number(name):
            added.append(f"{name} {shape.number(name)}")
    if added:
        assumed.append(
            f"{', '.join(added)}: missing in the file, so the family's default "
            "in transformers applies"
        )
    return shape


def _unread(shape: ModelShape, assumed: list[str]) -> tuple[str, ...]:
    """Return the keys that oomguard did not read; record them as an assumption."""
    unread = unread_fields(shape)
    if unread:
        assumed.append(
            f"{', '.join(unread)} in the configuration: oomguard does not read this, so "
            "the KV cache and the weights may differ by much"
        )
    return unread


def element_bytes(name: str) -> int:
    """Return the bytes per element of a data type by vLLM's name.

    Raises:
        SettingError: vLLM has no such data type.
    """
    if name not in DTYPE_BYTES:
        raise SettingError(f"dtype is {name!r}", hint=f"one of auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
