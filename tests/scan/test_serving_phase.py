"""What fails once the engine core stands fails at work, not while it loads: the core itself says when it stands."""

from __future__ import annotations

import pytest

from oomguard.diagnosis import diagnose

START = """\
(EngineCore pid=9) INFO 11-21 07:14:43 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./tiny', dtype=torch.float16, max_seq_len=32768
"""
STANDS = "(EngineCore pid=9) INFO 11-21 07:16:31 [core.py:386] init engine (profile, create kv cache, warmup model) took 3.25 s\n"
FAILS = "(EngineCore pid=9) ERROR 11-21 07:17:00 [core.py:900] RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 131072000000 bytes. Error code 12 (Cannot allocate memory)\n"


@pytest.mark.parametrize(
    ("log", "phase"), [(START + FAILS, "load_weights"), (START + STANDS + FAILS, "decode")]
)
def test_failed_allocation_has_the_phase_the_core_named_last(log, phase):
    assert diagnose(log).first_cause.phase == phase
