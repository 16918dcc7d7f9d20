"""Peak memory of a transformers ``generate``, from running the model's own code under fake tensors in a child process.

No GPU and no weights: a model of eight billion parameters takes seconds. A child, because fake tensors of a CUDA build would
create a context on the device. Kernels' own scratch memory and the caching allocator's rounding are not in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.errors import InputError, SettingError

# Steps that are run before the rest is drawn as a line: the first is the prefill, the next may still warm up.
_STEPS: Final = 5
_LIMIT_S: Final = 600


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


@dataclass(frozen=True, slots=True)
class TracedPeak:
    """Bytes allocated: the weights, the prefill's peak, the last step's, and the larger of the two with all it stands on."""

    weights_bytes: int
    prefill_bytes: int
    last_step_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at once during the call."""
        return max(self.prefill_bytes, self.last_step_bytes)


def traced_peak(call: GenerateCall) -> TracedPeak:
    """Run the call's first steps under fake tensors; raises InputError where torch or transformers cannot, SettingError for its numbers."""
    for name in ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams"):
        if getattr(call, name) <= 0:
            raise SettingError(f"{name} is {getattr(call, name)}")
    question = {**{name: getattr(call, name) for name in call.__slots__}, "config": dict(call.config)}
    question["steps"] = min(_STEPS, call.max_new_tokens)
    answer = _ask(question)
    peaks = [int(peak) for peak in answer["peaks_bytes"]]
    left = call.max_new_tokens - len(peaks)
    # Each step adds the same: one token to every layer's cache. A static cache adds nothing.
    last = peaks[-1] + (left * (peaks[-1] - peaks[-2]) if len(peaks) > 2 and left > 0 else 0)
    return TracedPeak(int(answer["weights_bytes"]), peaks[0], max(last, *peaks[1:], 0) if len(peaks) > 1 else 0)


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "oomguard.memory.trace_child"], input=json.dumps(question), env=environment,
            capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(f"the trace took more than {_LIMIT_S} seconds", hint="fewer prompt tokens or beams") from None
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        raise InputError(
            f"the model cannot be traced: {last}",
            hint="pip install 'oomguard[hf]' where torch or transformers is missing",
        )
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found
