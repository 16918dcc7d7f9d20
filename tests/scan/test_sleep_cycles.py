"""The sleeps of an engine in the logs of trainers: which was the first that kept memory, and who had it."""

from __future__ import annotations

import pytest

from oomguard.diagnosis.diagnose import diagnose

WRAPPINGS = {
    "verl": ("(WorkerDict pid=4021, ip=10.0.0.7) ", "(WorkerDict pid=4021, ip=10.0.0.7) "),
    "verl in color": (
        "\x1b[36m(WorkerDict pid=4021)\x1b[0m ",
        "\x1b[36m(TaskRunner pid=3)\x1b[0m ",
    ),
    "NeMo-RL": ("(VllmGenerationWorker pid=812) ", "(DTensorPolicyWorker pid=900) "),
    "OpenRLHF": ("(LLMRayActor pid=5150) ", "(PolicyModelActor pid=5151) "),
    "slime": ("(RolloutRayActor pid=77) ", "(MegatronTrainRayActor pid=78) "),
    "TRL": ("[rank0]: ", "[rank0]: "),
    "none": ("", ""),
}
WAKE = """Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/vllm/device_allocator/cumem.py", line 227, in wake_up
    create_and_map(handle)
RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"""
STEP = """Traceback (most recent call last):
  File "/work/train.py", line 90, in step
    loss.backward()
  File "/env/lib/python3.12/site-packages/torch/_tensor.py", line 647, in backward
    torch.autograd.backward(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 4.10 GiB is free. Process 812 has 52.40 GiB memory in use. Including non-PyTorch memory, this process has 22.50 GiB memory in use. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."""


def log(sleeps: list[tuple[float, float]], failure: str, wrapping: str) -> str:
    engine, trainer = WRAPPINGS[wrapping]
    lines = []
    for freed, used in sleeps:
        lines.append(
            f"{engine}INFO 03-02 10:00:00 [gpu_worker.py:104] Sleep mode freed {freed:.2f} GiB "
            f"memory, {used:.2f} GiB memory is still in use."
        )
        lines.append(
            f"{engine}INFO 03-02 10:05:00 [executor_base.py:203] It took 0.8 seconds to wake up."
        )
    lines.pop()
    return "\n".join([*lines, *(trainer + line for line in failure.splitlines())]) + "\n"


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_first_sleep_that_kept_memory_is_named(wrapping):
    sleeps = [(61.2, 2.1), (61.2, 2.2), (40.9, 22.6), (20.0, 43.0)]
    for failure, phase in ((WAKE, "wake_up"), (STEP, "training")):
        incident = diagnose(log(sleeps, failure, wrapping)).first_cause
        assert (incident.phase, incident.causes[0].id) == (phase, "sleep_wake")
        assert incident.facts["sleep_failed_cycle"].value == 3
        assert incident.actions[0].id == "release_before_wake"
        assert "Sleep 3 was the first that did not release" in incident.causes[0].explanation


def test_memory_that_another_program_took_is_not_the_engines():
    sleeps = [(61.2, 2.1), (61.2, 2.1), (61.1, 30.5)]
    incident = diagnose(log(sleeps, WAKE, "none")).first_cause
    assert incident.facts["sleep_kept_by_engine"].value is False
    assert "another program had more memory" in incident.causes[0].explanation


def test_a_sleep_that_frees_nothing_is_the_first(tmp_path):
    incident = diagnose(log([(0.0, 63.1)], STEP, "TRL")).first_cause
    assert incident.facts["sleep_failed_cycle"].value == 1
    assert incident.causes[0].id == "sleep_wake"


def test_a_trainer_next_to_a_good_sleeper_is_its_own_cause():
    incident = diagnose(log([(61.2, 2.1)] * 4, STEP, "verl")).first_cause
    assert "sleep_failed_cycle" not in incident.facts
    assert incident.causes[0].id != "sleep_wake"
