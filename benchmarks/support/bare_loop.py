"""What a plain loop over rows gives, in the sizes that a guard used: a GPU's last bits depend on
how many rows run together.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from support.call_results import Kept, tensors


def loop_of(call: Callable[[int, int], Any], sizes: Sequence[int], whole: Kept) -> Kept | None:
    """Return what a loop over rows in these sizes gives, put together as the whole call's result;
    None where it cannot be.

    A loss over the rows of a part stands for no row: it is not put together.

    Args:
        call: makes the call on rows from one number up to another.
        sizes: the rows of each part.
        whole: the result of all rows at once.
    """
    import torch

    if not sizes or any(not tensor.dim() for tensor in whole.tensors):
        return None
    parts = []
    start = 0
    total = sum(sizes)
    for size in sizes:
        with noise_of_all(start, start + size, total):
            torch.manual_seed(0)
            parts.append([tensor.to("cpu") for tensor in tensors(call(start, start + size))])
        start += size
    if any(len(part) != len(whole.tensors) for part in parts):
        return None
    return Kept(
        whole.kind, whole.fields, [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
    )


@contextlib.contextmanager
def noise_of_all(start: int, stop: int, rows: int) -> Iterator[None]:
    """Sample inside what all rows would have drawn for rows ``start`` to ``stop``: a loop alone
    draws other tokens.

    torch draws one token a row as the largest p/q, q exponential noise of the shape of p
    (aten/src/ATen/native/Distributions.cpp).
    """
    import torch

    own = torch.multinomial

    def multinomial(probabilities: Any, num_samples: int) -> Any:
        assert num_samples == 1
        each = len(probabilities) // (stop - start)
        noise = probabilities.new_empty((rows * each, probabilities.shape[1])).exponential_(1)
        return (probabilities / noise[start * each : stop * each]).argmax(-1, keepdim=True)

    torch.multinomial = multinomial
    try:
        yield
    finally:
        torch.multinomial = own
