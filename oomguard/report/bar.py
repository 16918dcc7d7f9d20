"""Compute the shares of the memory bar, for the terminal, the HTML page and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.core.incident import Budget

FREE: Final = "free"
REST: Final = "not accounted for"
# A smaller rest is only rounding of printed figures.
_SMALLEST_REST_RATIO: Final = 0.01

# One color for each part, the same in every report: (terminal, light page, dark page).
COLORS: Final[dict[str, tuple[str, str, str]]] = {
    "weights": ("blue", "#3b6fd4", "#6f9bff"),
    "tensors": ("blue", "#3b6fd4", "#6f9bff"),
    "KV cache": ("green", "#2e9a5b", "#53c785"),
    "activations": ("yellow", "#d0a215", "#e6c250"),
    "CUDA graphs": ("magenta", "#a64ac9", "#c98be6"),
    "non-torch": ("cyan", "#1c93a8", "#4fc3d6"),
    "reserved by torch, unused": ("bright_yellow", "#c9772b", "#e8a365"),
    "not shown as this process's": ("red", "#cc4136", "#f0796f"),
    "other processes": ("red", "#cc4136", "#f0796f"),
    "in use before the KV cache": ("blue", "#3b6fd4", "#6f9bff"),
    "in use at the start": ("red", "#cc4136", "#f0796f"),
    FREE: ("dim", "#c9ced6", "#4a5160"),
    REST: ("dim", "#e6e9ee", "#2c313b"),
}
_OTHERS: Final = (
    ("bright_magenta", "#8a5a44", "#c49a86"),
    ("bright_cyan", "#5b7083", "#9db2c4"),
    ("bright_red", "#b0478c", "#e08bc2"),
)


@dataclass(frozen=True, slots=True)
class BarSegment:
    """Hold one part of the bar; ``ratio`` is its share of the whole, 0 to 1."""

    name: str
    bytes: int
    ratio: float
    source: str
    color: tuple[str, str, str]


def segments(budget: Budget) -> tuple[BarSegment, ...]:
    """Return the parts with their shares of the device, and the unnamed rest.

    Empty if no part is known. If the total is unknown, or the parts add up to more, the shares
    refer to the sum of the parts.
    """
    parts = [part for part in budget.parts if part.bytes > 0]
    known = sum(part.bytes for part in parts)
    total = max(budget.device_total_bytes or 0, known)
    if not parts or total <= 0:
        return ()
    others = iter(_OTHERS * len(parts))
    rows = [
        BarSegment(
            part.name,
            part.bytes,
            part.bytes / total,
            part.source,
            COLORS.get(part.name) or next(others),
        )
        for part in parts
    ]
    if total - known > _SMALLEST_REST_RATIO * total:
        rows.append(BarSegment(REST, total - known, (total - known) / total, "", COLORS[REST]))
    return tuple(rows)


def contradiction(budget: Budget) -> str:
    """Return the line about printed numbers that contradict each other; "" if there are none."""
    if budget.conflict is None:
        return ""
    return f"The printed numbers contradict each other: {budget.conflict}."


def cells(shares: Sequence[BarSegment], width: int) -> list[int]:
    """Return the number of cells for each segment; together they fill ``width``.

    Each segment gets at least one cell if there are enough cells.
    """
    if len(shares) >= width:
        return [1] * width + [0] * (len(shares) - width)
    exact = [segment.ratio * width for segment in shares]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) > width:
        counts[max(range(len(counts)), key=lambda i: (counts[i] > 1, counts[i] - exact[i]))] -= 1
    while sum(counts) < width:
        counts[max(range(len(counts)), key=lambda i: exact[i] - counts[i])] += 1
    return counts


def percent(ratio: float) -> str:
    """Format a share (0 to 1) as a short percentage: 0.4 %, 12 %."""
    value = 100 * ratio
    if 0 < value < 0.1:
        return "<0.1 %"
    if value < 10:
        return f"{value:.1f} %"
    return f"{value:.0f} %"
