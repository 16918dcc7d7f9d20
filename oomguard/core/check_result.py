"""The record of one thing that ``oomguard doctor`` checks: what it found, and what to
do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "unknown", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing checked: ``text`` is what was found, ``advice`` what to do, a command if one does
    it.
    """

    id: str
    status: Status
    text: str
    advice: str = ""
