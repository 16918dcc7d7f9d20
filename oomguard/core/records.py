"""What the records that users hold share: they show themselves without secrets, prompts and home
folders.

A record knows no masking: it asks the package's public face, above every room, which knows who
draws. So do only records, and a test holds that none imports a room above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The record of one thing that ``oomguard doctor`` checks: what it found, and what to
# do about it.

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


class Record:
    """Base of the frozen records; ``repr`` and ``str`` are masked, also of a record within a list
    (``@dataclass(repr=False)``).
    """

    __slots__ = ()

    def __repr__(self) -> str:
        import oomguard

        return str(oomguard.record_repr(self))


def shown(text: str) -> str:
    """Return a text masked and without terminal escapes."""
    import oomguard

    return str(oomguard.drawn(text))
