"""vLLM's own command line, told from others; its flags are settings, a script's are evidence."""

from __future__ import annotations

from oomguard.engines.command import Launch
from oomguard.engines.vllm.launch import settings_in_force


def test_the_flags_of_vllms_own_command_are_its_settings():
    found = settings_in_force(Launch(("vllm", "serve", "m", "--gpu-memory-utilization", "0.5")))
    assert (found["gpu_memory_utilization"].value, found["gpu_memory_utilization"].source) == (
        0.5,
        "command",
    )


def test_the_flags_of_a_script_are_evidence_that_it_may_ignore():
    found = settings_in_force(Launch(("python", "train.py", "--gpu-memory-utilization=0.028")))
    assert (found["gpu_memory_utilization"].value, found["gpu_memory_utilization"].source) == (
        0.028,
        "script",
    )
