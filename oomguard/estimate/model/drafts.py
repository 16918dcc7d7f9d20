"""Read which draft model, or which MTP layers, speculative decoding adds.

The draft runs on the last pipeline stage and is sharded like the target. Its layers take blocks
from the same pool (vllm/config/speculative.py, v1/spec_decode, 0.32). An n-gram or suffix method
uses no device memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.core.errors import SettingError

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
