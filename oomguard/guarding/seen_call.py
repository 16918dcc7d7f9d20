"""The call of a model that no guard watches, as the frames of its failure show it: its rows, and the tokens of one."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any, Final

from oomguard.facts import Fact
from oomguard.guarding.frames import frames_of, locals_of

# What a model's first argument is called where it has one row an entry; the second axis is tokens in those of text.
_TEXT: Final = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHER: Final = ("pixel_values", "input_features", "input_values", "hidden_states", "x", "input")


def seen_call(error: BaseException) -> dict[str, Fact]:
    """Return the rows and tokens of the outermost model call that a failure went through; empty where none is seen."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    with contextlib.suppress(Exception):  # what a frame holds is the user's: nothing of it may take the failure's place
        found = next((call for frame in frames_of(error) if (call := _call_in(frame, torch))), {})
        return {name: Fact(name, value, "measured") for name, value in found.items()}
    return {}


def _call_in(frame: FrameType, torch: Any) -> dict[str, int]:
    if frame.f_code.co_name != "forward":
        return {}
    seen = locals_of(frame)
    if not isinstance(seen.get("self"), torch.nn.Module):
        return {}
    for name in (*_TEXT, *_OTHER):
        value = seen.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            tokens = {"prompt_tokens": value.shape[1]} if name in _TEXT else {}
            return {"batch_size": value.shape[0], **tokens}
    return {}
