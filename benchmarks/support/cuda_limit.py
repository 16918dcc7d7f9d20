"""A CUDA device of fewer bytes than it has, for tests and benchmarks that run where
there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def limit_cuda(capacity_bytes: int) -> Iterator[None]:
    """Let torch's allocator reserve no more than this in this process; what other processes take of
    the device does not count.
    """
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        capacity_bytes / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
