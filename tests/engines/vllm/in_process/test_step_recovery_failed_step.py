"""What a step's failure tells, and what a run keeps of the steps that were survived."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from oomguard.analyst.outcome import step_figures
from oomguard.engines.vllm.in_process import step_recovery
from oomguard.engines.vllm.in_process.message_receiver import survived_steps_of

CUDA = (
    "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 79.25 GiB of "
    "which 6.40 MiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 60117996 bytes. Error code 12 (Cannot allocate memory)"
)


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError(CUDA), True),
        (RuntimeError(CPU), True),
        (MemoryError(), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (OutOfMemoryError("CUDA error: out of memory"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_a_failed_allocation_is_recovered(error, expected):
    assert step_recovery.is_out_of_memory(error) is expected


def test_the_size_and_the_limit_are_read_from_the_message():
    gpu = step_recovery.describe(OutOfMemoryError(CUDA))
    assert (gpu["tried_bytes"], gpu["limit"]) == (96 << 20, "6.40 MiB of 79.25 GiB free")
    assert step_recovery.describe(RuntimeError(CPU))["tried_bytes"] == 60117996


def test_the_part_of_the_step_is_the_innermost_known_function():
    def execute_model():
        _get_prompt_logprobs_dict()

    def _get_prompt_logprobs_dict():
        raise OutOfMemoryError(CUDA)

    with pytest.raises(OutOfMemoryError) as raised:
        execute_model()
    assert step_recovery.describe(raised.value)["part"] == "prompt logprobs"


def test_a_worker_runs_no_step_behind_a_failed_one_until_it_is_released():
    def execute_model(fails=False):
        if fails:
            raise OutOfMemoryError(CUDA)
        return "ran"

    runner = SimpleNamespace(execute_model=execute_model, sample_tokens=list)
    worker = SimpleNamespace(model_runner=runner)
    step_recovery.install_in_worker(worker)
    with pytest.raises(OutOfMemoryError):
        runner.execute_model(fails=True)
    with pytest.raises(RuntimeError, match="the step before this one failed"):
        runner.execute_model()
    assert runner.sample_tokens() == []
    assert step_recovery.release_steps(worker, 2)["tried_bytes"] == 96 << 20
    assert runner.execute_model() == "ran"


def test_several_ranks_and_connectors_are_not_recovered():
    def core(ranks=1, **more):
        parallel = SimpleNamespace(world_size=ranks, data_parallel_size=1)
        config = SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(is_encoder_decoder=False), **more
        )
        return SimpleNamespace(vllm_config=config, scheduler=SimpleNamespace())

    assert step_recovery.why_not(core(2)) == "the engine has 2 ranks"
    assert step_recovery.why_not(core(speculative_config=1)) == "it decodes speculatively"
    assert step_recovery.why_not(core(kv_transfer_config=1)) == "it has a KV connector"
    assert "SimpleNamespace" in step_recovery.why_not(core())


def test_an_unknown_version_is_not_hooked(monkeypatch):
    for version, expected in (
        ("0.12.0", "vLLM 0.12.0 is older than 0.13"),
        ("0.99.1+cpu", "vLLM 0.99.1 is newer than"),
        ("dev", "the version of vLLM is unknown"),
    ):
        monkeypatch.setitem(step_recovery.sys.modules, "vllm", SimpleNamespace(__version__=version))
        assert step_recovery.install().startswith(expected)


def test_a_run_reads_the_survived_steps_and_their_figures(tmp_path):
    path = tmp_path / "said.jsonl"
    steps = [
        {"most_tokens": 512, "took_ms": 0.5},
        {"most_tokens": 256, "took_ms": 3.5, "ended": "r1"},
    ]
    rows = [{"pid": 1, "text": "a line"}, *({"pid": 1, "step_recovery": step} for step in steps)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert survived_steps_of(path) == steps
    assert step_figures(steps) == {
        "survived_steps": 2,
        "requests_without_room": 1,
        "smallest_step_tokens": 256,
        "longest_recovery_ms": 3.5,
    }
    assert survived_steps_of(tmp_path / "absent") == []
