"""A plugin of vLLM for tests: a worker that fails at a step, as one does whose memory is gone; the real engine around it.

``DYING_TOKEN`` is a token that no engine survives in a prompt. ``DYING_AFTER`` names a file with numbers of steps, a line each: an
engine takes the first line away and fails after so many steps; where no line is left it lives.
"""

import os
from pathlib import Path

REFUSED = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "{} bytes. Error code 12 (Cannot allocate memory)"
)
TRIED_BYTES = 77_309_411_328


def register() -> None:
    """Let the model runner of this process fail where it is asked to, and count its tokens."""
    token, after, counts = (os.environ.get(f"DYING_{name}") for name in ("TOKEN", "AFTER", "COUNTS"))
    if not token and not after:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    own = GPUModelRunner.execute_model

    def execute_model(self, scheduler_output, *args, **kwargs):
        tokens = scheduler_output.total_num_scheduled_tokens
        if token and any(int(token) in (new.prompt_token_ids or ()) for new in scheduler_output.scheduled_new_reqs):
            raise RuntimeError(REFUSED.format(TRIED_BYTES))
        if tokens and counts:
            with Path(counts).open("a") as file:
                file.write(f"{tokens}\n")
        if tokens and after and _is_the_last(self, Path(after)):
            raise RuntimeError(REFUSED.format(TRIED_BYTES))
        return own(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model


def _is_the_last(runner, after: Path) -> bool:
    """Tell whether this step is the one at which the engine is to fail."""
    left = getattr(runner, "_steps_left", None)
    if not left and (lines := after.read_text().split()):
        left = int(lines[0])
        after.write_text("\n".join(lines[1:]))
    if not left:
        return False
    runner._steps_left = left - 1
    return runner._steps_left == 0
