"""Peak memory of a transformers ``generate``, from running the model's own code under fake tensors in a child process.

No GPU and no weights: a model of eight billion parameters takes seconds. A child, because fake tensors of a CUDA build would
create a context on the device. Kernels' own scratch memory and the caching allocator's rounding are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.errors import SettingError
from oomguard.memory.child import ask_child
from oomguard.memory.traced import TracedSteps

_LIMIT_S: Final = 600
_ENVIRONMENT: Final = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The numbers of one call of ``generate``; ``config`` is the model's, ``dtype`` torch's name of the weights' type."""

    config: Mapping[str, Any]
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int = 1
    attn_implementation: str = "sdpa"
    cache_implementation: str | None = None
    dtype: str = "bfloat16"


def traced_steps(call: GenerateCall) -> TracedSteps:
    """Run the call's first steps under fake tensors; raises InputError where torch or transformers cannot, SettingError for its numbers."""
    for name in ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams"):
        if getattr(call, name) <= 0:
            raise SettingError(f"{name} is {getattr(call, name)}")
    question = {**{name: getattr(call, name) for name in call.__slots__}, "config": dict(call.config)}
    answer = ask_child(
        "oomguard.memory.trace_child", question, limit_s=_LIMIT_S, environment=_ENVIRONMENT,
        failed="the model cannot be traced", late="the trace took more than {} seconds",
        hint="pip install 'oomguard[hf]' where torch or transformers is missing", late_hint="fewer prompt tokens or beams",
    )  # fmt: skip
    return TracedSteps(
        answer["weights_bytes"], answer["start_bytes"], tuple(answer["peaks_bytes"]),
        tuple((number, size) for number, size in answer["events"]), tuple(answer["events_seen"]), answer["end_bytes"],
    )  # fmt: skip
