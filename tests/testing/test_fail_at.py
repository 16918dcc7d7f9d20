"""The Nth allocation fails whatever is free, once; those after it go on."""

from __future__ import annotations

import pytest

from oomguard.core.errors import SettingError

torch = pytest.importorskip("torch", reason="torch is not installed")
import oomguard  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402


def failures(device, many=10):
    failed = []
    with device:
        for number in range(1, many + 1):
            try:
                torch.zeros(256)
            except torch.OutOfMemoryError:
                failed.append(number)
    return failed


def test_the_allocations_of_these_numbers_fail_once(subtests):
    for caching_allocator in [False, True]:
        for fail_at, failed in [
            (3, [3]),
            ((2, 5), [2, 5]),
            ([], []),
            ({1}, [1]),
            (range(4, 10**12, 4), [4, 8]),
        ]:
            with subtests.test(caching_allocator=caching_allocator, fail_at=fail_at, failed=failed):
                assert (
                    failures(
                        limit_memory("64 MiB", fail_at=fail_at, caching_allocator=caching_allocator)
                    )
                    == failed
                )


def test_the_message_tells_that_there_was_room():
    with (
        limit_memory("64 MiB", fail_at=1),
        pytest.raises(torch.OutOfMemoryError, match=r"1\.00 KiB\. .* 64\.00 MiB is free"),
    ):
        torch.zeros(256)


def test_results_count_and_what_is_only_read_or_seen_does_not():
    weights = torch.zeros(256)
    with limit_memory("64 MiB") as device:
        weights.sum()
        weights.view(-1, 2).add_(1)
        assert device.allocations == 1
        torch.zeros(4).max(dim=0)
        assert device.allocations == 4


def test_every_allocation_of_a_guarded_function_may_fail_once():
    @oomguard.guard(batch="rows")
    def doubled(rows):
        return list((torch.ones(len(rows)) * torch.tensor(rows)).exp())

    with limit_memory("64 MiB") as device:
        right = doubled([1.0, 2.0, 3.0, 4.0])
    assert device.allocations == 3
    for number in range(1, device.allocations + 1):
        with limit_memory("64 MiB", fail_at=number):
            assert doubled([1.0, 2.0, 3.0, 4.0]) == right


def test_what_numbers_no_allocation_is_refused(subtests):
    for fail_at in [0, -1, True, "3", [3, 0], [1.5], range(9), range(9, -1, -1)]:
        with subtests.test(fail_at=fail_at), pytest.raises(SettingError):
            limit_memory("64 MiB", fail_at=fail_at)
