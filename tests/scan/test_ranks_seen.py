"""The number of ranks that share each layer, from the processes that print, where no setting is printed."""

from __future__ import annotations

import pytest

from oomguard.diagnosis import diagnose

REFUSED = (
    "[2026-02-02 06:01:00 TP2] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 2 has a total capacity "
    "of 79.10 GiB of which 3.10 GiB is free. Of the allocated memory 75.00 GiB is allocated by PyTorch, and 12.00 MiB is reserved "
    "by PyTorch but unallocated.\n"
)


def _loading(*ranks: int) -> str:
    return "".join(
        f"[2026-02-02 06:00:00 TP{rank}] Load weight begin. avail mem={70 + rank}.25 GB\n"
        for rank in ranks
    )


@pytest.mark.parametrize(
    ("seen", "ranks"), [((0, 3), 4), ((0, 1, 2, 5), 8), ((2,), None), ((), None)]
)
def test_the_names_of_ranks_tell_how_many_there_are(seen, ranks):
    incident = diagnose(_loading(*seen) + REFUSED).incidents[0]

    assert incident.number("tensor_parallel_size") == ranks


def test_a_printed_number_of_ranks_counts():
    command = "$ python3 -m sglang.launch_server --model-path org/model --tp-size 8\n"

    assert (
        diagnose(command + _loading(0, 1) + REFUSED).incidents[0].number("tensor_parallel_size")
        == 8
    )


def test_what_was_free_at_first_is_the_failing_rank_s():
    assert (
        diagnose(_loading(0, 2, 3) + REFUSED).incidents[0].number("initial_free_bytes")
        == 72.25 * 2**30
    )
    assert diagnose(_loading(0, 3) + REFUSED).incidents[0].number("initial_free_bytes") is None
