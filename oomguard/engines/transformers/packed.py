"""Rows that hold several texts one after another, told by positions that begin anew: no such row is read in chunks.

Without a cache transformers hides the texts of a row from each other, by its positions alone; with one, as chunks need, it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomguard.engines.transformers.tensors import is_tensor, of_host

_MASK_AXES: Final = 2


def why_packed(arguments: Mapping[str, Any]) -> str | None:
    """Return why the positions of a call forbid chunks; None where each rises by one, or it is given none."""
    positions: Any = arguments.get("position_ids")
    if not is_tensor(positions) or positions.shape[-1] < 2:
        return None
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(positions, FakeTensor):
        return None  # of a trace: the call's own were looked at before it
    begins = of_host(_begin_anew, positions, arguments.get("attention_mask"))
    return "position_ids do not rise by one throughout, as of a row that holds several texts" if begins else None


def _begin_anew(positions: Any, mask: Any) -> bool:
    begins = positions[..., 1:] - positions[..., :-1] != 1
    if getattr(mask, "ndim", 0) == _MASK_AXES and mask.shape[-1] == positions.shape[-1]:
        shown = mask != 0
        begins = begins & shown[:, 1:] & shown[:, :-1]  # the positions of padding count for nothing
    return bool(begins.any())
