"""A picture as a few plain shapes in pixels, y downwards, which SVG and PNG are drawn from: both show the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

# Colours by what they mean: (light page, dark page). A picture of pixels is light.
COLORS: Final[dict[str, tuple[str, str]]] = {
    "back": ("#ffffff", "#1b1e24"),
    "text": ("#1f2328", "#e6e9ee"),
    "dim": ("#6b7683", "#98a3b1"),
    "grid": ("#e3e7ec", "#333943"),
    "limit": ("#b3261e", "#f0796f"),
    "failed": ("#b3261e", "#f0796f"),
    "call": ("#c9d9f5", "#2b3f63"),
    "span": ("#e3e7ec", "#39404b"),
    "bad call": ("#f3c9c5", "#5a2b28"),
    "mark": ("#8a5a44", "#c49a86"),
    "allocated": ("#3b6fd4", "#6f9bff"),
    "reserved": ("#c9772b", "#e8a365"),
    "in use": ("#1c93a8", "#4fc3d6"),
    "this process": ("#a64ac9", "#c98be6"),
    "other processes": ("#cc4136", "#f0796f"),
    "repaired": ("#c9772b", "#e8a365"),
    "other runs": ("#c9d9f5", "#2b3f63"),
    "resident": ("#2e9a5b", "#53c785"),
}
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; ``title`` is shown where a reader points at it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float = 1.0
    is_dashed: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text; ``y`` is its base line."""

    x: float
    y: float
    text: str
    color: str = "text"
    anchor: Anchor = "start"
    size: float = 12.0


@dataclass(frozen=True, slots=True)
class Picture:
    """The shapes, from back to front; ``words`` say what is shown to who cannot see it."""

    width: int
    height: int
    shapes: tuple[Rect | Line | Label, ...]
    words: str
