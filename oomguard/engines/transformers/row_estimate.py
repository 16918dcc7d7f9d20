"""What one row of a call needs in closed form, from the model's configuration alone."""

from __future__ import annotations

from typing import Any

from oomguard.errors import OomguardError
from oomguard.memory.generate.closed_form import generate_row_bytes
from oomguard.memory.model.shape import read_shape


def estimate_row_bytes(
    model: Any, prompt_tokens: int | None, max_new_tokens: int | None, *, sequences: int = 1
) -> int | None:
    """Return the bytes that one row of ``generate`` needs beyond the weights; None if no closed form holds.

    Args:
        model: the model; its configuration is read, and nothing else.
        prompt_tokens: tokens of the prompt, padding included.
        max_new_tokens: tokens that the call may generate.
        sequences: beams, or sequences that are returned for a row.
    """
    config: Any = getattr(model, "config", None)
    if prompt_tokens is None or max_new_tokens is None or not hasattr(config, "to_dict"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    eager = getattr(config, "_attn_implementation", None) == "eager"
    try:
        shape = read_shape(config.to_dict())
        return sequences * generate_row_bytes(shape, prompt_tokens, max_new_tokens, padded=True, eager=eager)
    except (OomguardError, TypeError, ValueError):
        return None
