"""What a call leaves on its model for the next one, a value for each row (Qwen-VL's ``rope_deltas``): put together after the last part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

_NAMES: Final = ("rope_deltas",)


@contextlib.contextmanager
def put_together(
    model: Any,
    kept: dict[int, list[tuple[Any, str, Any]]],
    start: int,
    rows_left: int,
) -> Iterator[None]:
    """Keep what a part that begins at row ``start`` leaves; with no rows left, leave what all parts have.

    Args:
        model: the model.
        kept: what earlier parts left, by their first row.
        start: the first row of the part.
        rows_left: rows that come after it.
    """
    yield
    kept[start] = [
        (module, name, value)
        for module in model.modules()
        for name in _NAMES
        if getattr(value := getattr(module, name, None), "ndim", 0) > 0
    ]
    if rows_left == 0 and len(kept) > 1:
        import torch

        for found in zip(*(kept[begin] for begin in sorted(kept)), strict=False):
            module, name, _ = found[0]
            setattr(module, name, torch.cat([value for _, _, value in found]))
