"""A plugin of vLLM for tests: the real engine, whose worker fails as if it ran out of memory.

``DYING_TOKEN`` is a token that no engine survives in a prompt.
"""

import os

REFUSED = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate "
    "{} bytes. Error code 12 (Cannot allocate memory)"
)
TRIED_BYTES = 77_309_411_328


def register() -> None:
    """Let the model runner of this process fail at a prompt with the token."""
    token = os.environ.get("DYING_TOKEN")
    if not token:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    own = GPUModelRunner.execute_model

    def execute_model(self, scheduler_output, *args, **kwargs):
        if any(
            int(token) in (new.prompt_token_ids or ())
            for new in scheduler_output.scheduled_new_reqs
        ):
            raise RuntimeError(REFUSED.format(TRIED_BYTES))
        return own(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model
