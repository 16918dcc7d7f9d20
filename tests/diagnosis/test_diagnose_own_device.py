"""The size of this machine's GPUs stands in for one that vLLM did not print; NVML is the only thing simulated."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident
from oomguard.diagnosis import assess, default_rules, own_device_total
from oomguard.probe import nvml
from oomguard.probe.nvml import Device
from oomguard.remedy.policy import Policy


@pytest.fixture
def gpus(monkeypatch):
    """Put GPUs of these totals into the machine; None: NVML does not answer."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*totals_bytes):
        found = (
            None
            if totals_bytes == (None,)
            else tuple(Device(n, "a GPU", t, t, {}) for n, t in enumerate(totals_bytes))
        )
        monkeypatch.setattr(nvml, "devices", lambda: found)

    return put


def nothing_left(**more):
    """vLLM's "No available memory for the cache blocks" as it is printed on a GPU: without the device's total."""
    facts = {
        "kv_cache_available_bytes": Fact("kv_cache_available_bytes", -GIB, slack=0.005 * GIB),
        "gpu_memory_utilization_ratio": Fact("gpu_memory_utilization_ratio", 0.5),
        **{name: Fact(name, value) for name, value in more.items()},
    }
    return Incident(
        "kv_cache_none_left", "No available memory for the cache blocks.", "vllm", facts=facts
    )


def test_utilization_is_solved_by_this_machines_gpus(gpus):
    gpus(24 * GIB, 24 * GIB)

    found = assess(nothing_left(), default_rules(), Policy(), local_models=True)

    raised = next(patch for patch in found.plan if patch.setting == "gpu_memory_utilization")
    assert found.facts["device_total_bytes"].source == "measured"
    assert 0.5 + 1 / 24 < raised.new < 0.7


def test_a_saved_log_is_of_another_machine(gpus):
    gpus(24 * GIB)

    found = assess(nothing_left(), default_rules(), Policy())

    assert found.number("device_total_bytes") is None


@pytest.mark.parametrize("totals", [(None,), (), (24 * GIB, 80 * GIB), (None, None), (0,)])
def test_sizes_that_are_unknown_or_differ_stand_in_for_nothing(gpus, totals):
    gpus(*totals)

    assert own_device_total(nothing_left()) == {}


def test_what_was_printed_or_runs_on_the_cpu_is_left_alone(gpus):
    gpus(24 * GIB)

    assert own_device_total(nothing_left(device_total_bytes=8 * GIB)) == {}
    assert own_device_total(nothing_left(on_cpu=True)) == {}


def test_a_part_of_a_gpu_has_a_size_of_its_own(gpus, monkeypatch):
    gpus(80 * GIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-41b3fda2-9c1f-5a9e-9f0e-0a3c1a2b3c4d")

    assert own_device_total(nothing_left()) == {}


def test_margin_covers_driver_memory_that_torch_does_not_count(gpus):
    gpus(23034 << 20)  # an L4 as NVML tells it, of which torch counts 22.05 GiB

    total = own_device_total(nothing_left())["device_total_bytes"]

    assert total.value - total.slack <= 22.05 * GIB <= total.value
