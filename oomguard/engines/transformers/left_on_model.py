"""What a call leaves on its model for the next one, a value for each row (Qwen-VL's ``rope_deltas``): put together after the last part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

# Left on a module without a trace that tells of it: images of any size are not followed.
_NAMES: Final = ("rope_deltas",)


@contextlib.contextmanager
def put_together(
    model: Any,
    kept: dict[int, list[tuple[Any, str, Any]]],
    start: int,
    rows_left: int,
    leaves: Sequence[tuple[str, str]] = (),
) -> Iterator[None]:
    """Keep what a part that begins at row ``start`` leaves; with no rows left, leave what all parts have.

    Args:
        model: the model.
        kept: what earlier parts left, by their first row.
        start: the first row of the part.
        rows_left: rows that come after it.
        leaves: by module and attribute, what a trace has told to have one entry a row.
    """
    yield
    kept[start] = [
        (module, name, value)
        for path, module in model.named_modules()
        for name in dict.fromkeys((*_NAMES, *(name for of, name in leaves if of == path)))
        if getattr(value := getattr(module, name, None), "ndim", 0) > 0
    ]
    if rows_left == 0 and len(kept) > 1:
        import torch

        for found in zip(*(kept[begin] for begin in sorted(kept)), strict=False):
            module, name, _ = found[0]
            setattr(module, name, torch.cat([value for _, _, value in found]))
