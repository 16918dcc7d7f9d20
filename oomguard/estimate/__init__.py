"""Estimate memory: what a model, a KV cache, an engine start and a generate call need."""

from __future__ import annotations

from typing import Literal

# ``unsure`` when more is uncertain than spare, or when something of unknown size is not counted.
Fit = Literal["yes", "no", "unsure"]


def answer(
    spare_bytes: int, uncertain_bytes: int, *, above_bytes: int | None = None, unread: bool = False
) -> Fit:
    """Return whether something fits, from the bytes to spare and their uncertainty.

        >>> answer(3 << 30, 2 << 30)
        'yes'

    Args:
        spare_bytes: the bytes beyond the need; negative if they are missing.
        uncertain_bytes: by how much fewer bytes may be to spare.
        above_bytes: by how much more may be to spare; None: as much.
        unread: whether something of unknown size is not counted.
    """
    if above_bytes is None:
        above_bytes = uncertain_bytes
    if spare_bytes + above_bytes < 0:
        return "no"
    if unread or spare_bytes < uncertain_bytes:
        return "unsure"
    return "yes"
