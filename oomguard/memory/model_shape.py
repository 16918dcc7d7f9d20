"""The numbers of any model's ``config.json`` that decide memory, under the names that all model families gave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from oomguard.errors import ConfigError

# Where a model of several parts keeps the language model's own configuration.
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config", "language_model")
_ENCODERS: Final = ("vision_config", "audio_config")
# The canonical name of a number first, then what other families call it.
_ALIASES: Final = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads", "num_attention_groups"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "block_ff_dim"),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_k", "top_k_experts"),
    "moe_intermediate_size": ("expert_intermediate_size", "moe_ffn_hidden_size"),
    "sliding_window": ("window_size",),
}  # fmt: skip
DTYPE_BYTES: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_ONE_HEAD_UNLESS_NEW: Final = frozenset({"falcon", "RefinedWebModel", "RefinedWeb"})
# Larger than any model has; above it a value is a mistake, and arithmetic with it would only hide that.
MAX_COUNT: Final = 10**9
_MAX_LAYERS: Final = 10_000
_SHOWN_CHARS: Final = 60
_ONE_FOR_ALL: Final = frozenset({"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "head_dim"})
_MAX_FACTOR: Final = 100_000
# Where vLLM looks for the longest request: the smallest counts, and model_max_length over all of them
# (vllm/transformers_utils/model_arch_config_convertor.py, 0.32).
_LENGTHS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Stretched positions that the file has written into its length already (vllm/config/model.py, _get_and_verify_max_len).
_STRETCHED: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", ""}
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder: counts, not bytes; ``config`` is the language model's part, ``outer`` the whole file."""

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
        """Whether there are parts beside the language model's: an encoder of images or audio, in whatever form the file has it."""
        return self.outer is not self.config or any(isinstance(self.outer.get(part), Mapping) for part in _ENCODERS)

    def number(self, name: str) -> int | None:
        """A count under any of its names, of a list its largest; None where it is missing or null.

        Raises ConfigError for an absurd one.
        """
        try:
            return count_of(self.config, name)
        except ConfigError as error:
            raise ConfigError(str(error), path=self.path) from None


def read_shape(config: Mapping[str, Any], path: str = "config.json") -> ModelShape:
    """The numbers of a parsed configuration; raises ConfigError naming the field that is missing or absurd."""
    text = text_part(config)
    try:
        heads_or_none = count_of(text, "num_attention_heads")
        layers, hidden = _needed(text, "num_hidden_layers"), _needed(text, "hidden_size")
        heads = 1 if heads_or_none is None and _attention_free(text) else _needed(text, "num_attention_heads")
        return ModelShape(
            text, config, str(text.get("model_type") or config.get("model_type") or ""),
            layers, hidden, heads, _kv_heads(text, heads), _head_dim(text, hidden, heads), _needed(text, "vocab_size"),
            _dtype_bytes(text, config), _longest(text, config), _default_length(text, config), path,
        )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(str(error), path=path) from None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own part of a configuration; the whole of it where there is one part."""
    part = config
    while True:
        inner = next((part[name] for name in _TEXT_PARTS if isinstance(part.get(name), Mapping)), None)
        if inner is None:
            return part
        part = inner


def _attention_free(text: Mapping[str, Any]) -> bool:
    return "state_size" in text or "ssm_state_size" in text


def _needed(config: Mapping[str, Any], name: str) -> int:
    value = count_of(config, name)
    if value is None:
        others = ", ".join((name, *_ALIASES.get(name, ())))
        raise ConfigError(f"{name} is missing (looked for {others})")
    return value


def count_of(config: Mapping[str, Any], name: str) -> int | None:
    """A count under any of its names, of a list its largest; None where it is missing or null. Raises ConfigError for an absurd one."""
    for key in (name, *_ALIASES.get(name, ())):
        value = config.get(key)
        if value is None:
            continue
        if name not in _ONE_FOR_ALL and isinstance(value, list) and value and all(is_count(item) for item in value):
            value = max(value)  # by layer: the largest decides over peaks
        if not is_count(value):
            raise ConfigError(f"{key} is {repr(value)[:_SHOWN_CHARS]}, not a count")
        assert isinstance(value, int)  # noqa: S101 - just asked
        if name == "num_hidden_layers" and value > _MAX_LAYERS:
            raise ConfigError(f"{key} is {value}, more than any model has")
        if value == 0 and name in _ONE_FOR_ALL:
            raise ConfigError(f"{key} is 0")
        return value
    return None


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a number that a model can have, 0 included."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How positions are stretched, empty where they are not."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    return found if isinstance(found, Mapping) else {}


def rope_kind(config: Mapping[str, Any]) -> str:
    """The name of the stretching, empty where there is none."""
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type")
    return kind if isinstance(kind, str) else ""


def rope_factor(config: Mapping[str, Any]) -> float:
    """By how much positions are stretched, 1.0 where nothing sensible is said."""
    factor = rope_scaling(config).get("factor")
    if isinstance(factor, (int, float)) and not isinstance(factor, bool) and 0 < factor <= _MAX_FACTOR:
        return float(factor)
    return 1.0


def _longest(text: Mapping[str, Any], outer: Mapping[str, Any]) -> int | None:
    """The longest request that the model is for, None where its file does not say."""
    known = [value for name in _LENGTHS if (value := count_of(text, name))]
    if not known:
        return None
    longest = count_of(text, "model_max_length") or min(known)
    if rope_kind(text) in _STRETCHED or "gemma3" in str(outer.get("model_type")):
        return longest
    return int(longest * rope_factor(text))


def _default_length(text: Mapping[str, Any], outer: Mapping[str, Any]) -> int | None:
    """The longest request where the user gives none: of LongRoPE models the length before it is stretched."""
    if rope_kind(text) == "longrope":
        return count_of(text, "original_max_position_embeddings") or _longest(text, outer)
    return _longest(text, outer)


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    """Heads that keep keys and values: all of them, unless the family says fewer in one of its ways."""
    attention = text.get("attn_config")
    named = count_of(attention, "num_key_value_heads") if isinstance(attention, Mapping) else None
    named = named or count_of(text, "num_key_value_heads")
    kind = str(text.get("model_type"))
    if kind in _ONE_HEAD_UNLESS_NEW and not text.get("new_decoder_architecture"):
        # The old decoder shares one head, the new one has groups (vllm/model_executor/models/falcon.py).
        return 1 if text.get("multi_query", True) else heads
    if kind == "gpt_bigcode" or (text.get("multi_query") is True and kind not in _ONE_HEAD_UNLESS_NEW):
        return 1 if text.get("multi_query", True) else heads
    return heads if text.get("multi_query_attention") is False else named or heads


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    named = count_of(text, "head_dim")
    if named:
        return named
    if hidden % heads and not _attention_free(text):
        raise ConfigError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing"
        )
    return hidden // heads


def _dtype_bytes(text: Mapping[str, Any], outer: Mapping[str, Any]) -> int:
    """Bytes of an element of the activations; half precision where nothing is said, or only float32 (vLLM's `auto`)."""
    for part in (text, outer):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            known = DTYPE_BYTES.get(name.removeprefix("torch."))
            # vLLM loads float32 checkpoints in half precision (vllm/config/model.py, _resolve_auto_dtype).
            return 2 if known is None else min(known, 2)
    return 2
