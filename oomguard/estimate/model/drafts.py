"""What speculative decoding adds: a draft model's weights and layers of cache, or the target's own
MTP layers.

The draft runs on the last pipeline stage, sharded as the target is; its layers draw blocks from the
same pool (vllm/config/speculative.py, v1/spec_decode, 0.32). An n-gram or suffix method holds
nothing on the device.
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
    """A method, the tokens it drafts in a step, and the name of the draft model; None where the
    method has none.
    """

    method: str
    tokens: int
    model: str | None = None

    @property
    def uses_mtp_layers(self) -> bool:
        """Whether the target's own MTP layers draft."""
        return self.method in _MTP


def read_speculation(text: str | None) -> Speculation | None:
    """Read vLLM's ``speculative_config``, a JSON text; raises SettingError for what vLLM would not
    take.
    """
    if text is None:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(
            f"speculative_config is no JSON: {error}",
            hint='{"model": "DRAFT", "num_speculative_tokens": 5}',
        ) from None
    if not isinstance(config, Mapping):
        raise SettingError(f"speculative_config is {text!r}, not an object")
    model = config.get("model")
    tokens = config.get("num_speculative_tokens")
    method = _method(config, model)
    if tokens is None and method in _MTP:
        tokens = 1
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= _MOST_TOKENS:
        raise SettingError(
            f"speculative_config.num_speculative_tokens is {tokens!r}, not a count of tokens"
        )
    if method not in _NO_MODEL and method not in _MTP and not isinstance(model, str):
        raise SettingError(
            f"speculative_config.model is {model!r}",
            hint="a folder or a hub name of the draft model",
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
