"""Whose beam each token of a sequence came from, in the record of a search that ran in parts: beams are numbered over the whole batch."""

from __future__ import annotations

from typing import Any

_FIELD = "beam_indices"


def number_beams(record: Any, rows: int, beams: int) -> Any:
    """Return a record whose beams are numbered as in one call of ``rows`` rows: the parts began each with 0.

    Beam ``b`` of row ``r`` has the number ``r * beams + b``; what stands behind the end of a sequence is negative.
    """
    import torch

    indices = record.get(_FIELD) if hasattr(record, "get") else None
    if indices is not None:
        sequences = indices.shape[0] // rows
        first = (
            torch.arange(rows, dtype=indices.dtype, device=indices.device).repeat_interleave(sequences)[:, None] * beams
        )
        record[_FIELD] = torch.where(indices < 0, indices, first + indices % beams)
    return record
