"""Peak memory of a transformers ``generate``, from running the model's own code under fake tensors in a child process.

It takes no GPU and no weights, and seconds for a model of eight billion parameters. It runs in a child, since fake tensors of a
CUDA build would create a context on the device. Scratch memory of kernels and the caching allocator's rounding are not in it.
"""

from __future__ import annotations

from typing import Final

from oomguard.errors import SettingError
from oomguard.installation import install_hint
from oomguard.memory.child import ask_child
from oomguard.memory.generate.call import PlannedCall
from oomguard.memory.generate.traced_steps import TracedSteps

_LIMIT_S: Final = 600
_ENVIRONMENT: Final = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


def traced_steps(call: PlannedCall) -> TracedSteps:
    """Run a call's first steps under fake tensors.

    Raises:
        InputError: torch or transformers is missing, or cannot run the model.
        SettingError: a number of the call is not above zero.
    """
    for name in ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams"):
        if getattr(call, name) <= 0:
            raise SettingError(f"{name} is {getattr(call, name)}")
    question = {**{name: getattr(call, name) for name in call.__slots__}, "config": dict(call.config)}
    answer = ask_child(
        "oomguard.memory.generate.trace_child",
        question,
        limit_s=_LIMIT_S,
        environment=_ENVIRONMENT,
        failed="the model cannot be traced",
        late="the trace took more than {} seconds",
        hint=f"if torch or transformers is missing: {install_hint('hf')}",
        late_hint="fewer prompt tokens or beams",
    )
    return TracedSteps(
        weights_bytes=answer["weights_bytes"],
        start_bytes=answer["start_bytes"],
        peaks_bytes=tuple(answer["peaks_bytes"]),
        events=tuple((number, size) for number, size in answer["events"]),
        events_seen=tuple(answer["events_seen"]),
        end_bytes=answer["end_bytes"],
    )
