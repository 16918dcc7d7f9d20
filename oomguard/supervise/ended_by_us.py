"""An attempt that we ended ourselves, since it could not go on by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndedByUs:
    """Why we ended it.

    Attributes:
        why: in one line, with its numbers.
        is_hang: it hung, and lived: what is printed while it is ended says nothing of the cause.
    """

    why: str
    is_hang: bool = True
