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
    """Let the model runner of this process fail where it is asked to."""
    token, after = os.environ.get("DYING_TOKEN"), os.environ.get("DYING_AFTER")
    if not token and not after:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    own = GPUModelRunner.execute_model

    def execute_model(self, scheduler_output, *args, **kwargs):
        if token and any(int(token) in (new.prompt_token_ids or ()) for new in scheduler_output.scheduled_new_reqs):
            raise RuntimeError(REFUSED.format(TRIED_BYTES))
        if after and scheduler_output.total_num_scheduled_tokens:
            if not hasattr(self, "_steps_left"):
                lines = Path(after).read_text().split()
                self._steps_left = int(lines[0]) if lines else -1
                Path(after).write_text("\n".join(lines[1:]))
            self._steps_left -= 1
            if self._steps_left == 0:
                raise RuntimeError(REFUSED.format(TRIED_BYTES))
        return own(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model
