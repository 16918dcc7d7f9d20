"""Other processes on the simulated device: their share is gone, is told, and comes and goes."""

from __future__ import annotations

import pytest

from oomguard.core.errors import SettingError

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.probe import torch_memory  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

MIB = 2**20


def test_what_others_hold_is_not_free_and_stands_in_the_message(subtests):
    for caching_allocator in [False, True]:
        given = {"other_processes": "16 MiB", "caching_allocator": caching_allocator}
        with subtests.test(**given), limit_memory("48 MiB", **given) as device:
            kept = torch.zeros(5 * MIB)
            assert (device.free_bytes, torch_memory.free_bytes()) == (12 * MIB, 12 * MIB)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                torch.zeros(4 * MIB)
            assert (
                "GPU 0 has a total capacity of 48.00 MiB of which 12.00 MiB is free. Process 1234 has 16.00 MiB memory in use. "
                "Including non-PyTorch memory, this process has 20.00 MiB memory in use."
            ) in str(caught.value)
            assert kept.numel() == 5 * MIB


def test_a_neighbour_comes_and_goes():
    with limit_memory("16 MiB") as device:
        device.other_processes_bytes = 12 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2 * MIB)
        device.other_processes_bytes = 0
        assert torch.zeros(2 * MIB).nbytes == 8 * MIB


def test_a_neighbour_takes_no_more_than_is_free():
    with limit_memory("16 MiB", other_processes="2 MiB") as device:
        kept = torch.zeros(2 * MIB)
        with pytest.raises(
            SettingError, match=r"torch holds 8\.00 MiB of the device's .*, so 8\.00 MiB are left"
        ):
            device.other_processes_bytes = 9 * MIB
        with pytest.raises(SettingError):
            device.other_processes_bytes = -1
        with pytest.raises(SettingError, match="not a size of other processes: '1'"):
            device.other_processes_bytes = "1"
        assert device.other_processes_bytes == 2 * MIB
        device.other_processes_bytes = "3 MiB"
        assert device.other_processes_bytes == 3 * MIB
        device.other_processes_bytes = 16 * MIB - kept.nbytes
        assert device.free_bytes == 0


def test_others_that_leave_nothing_or_are_no_size_are_refused(subtests):
    for others in ["8 MiB", "9 MiB", "many", -1]:
        with subtests.test(others=others), pytest.raises(SettingError):
            limit_memory("8 MiB", other_processes=others)
