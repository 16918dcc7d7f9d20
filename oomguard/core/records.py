"""Define the base of records that users see, and the names of memory counters.

A record shows itself without secrets, prompts and home folders. Records do not implement masking.
They ask the package's public module, which is above every package and knows how to display them. A
test checks that no record imports a package above ``core``.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

Status = Literal["ok", "unknown", "problem"]


class Check(NamedTuple):
    """Hold the result of one check of ``oomguard doctor``.

    Attributes:
        text: what the check found.
        advice: what to do, as a command if one does it; "" if nothing is wrong.
    """

    id: str
    status: Status
    text: str
    advice: str = ""


# Counters of memory, by torch's allocator, NVML or the kernel.
HOST: Final = "host"
SIMULATED: Final = "simulated"
ALLOCATED: Final = "allocated"
RESERVED: Final = "reserved"
OWN: Final = "this process"
OTHERS: Final = "other processes"
IN_USE: Final = "in use"
RESIDENT: Final = "resident"


class Counter(NamedTuple):
    """Name one counter of one device, such as ``("cuda:0", "allocated")``."""

    device: str
    what: str


class Record:
    """Base of the frozen records (``@dataclass(repr=False)``); ``repr`` and ``str`` are masked."""

    __slots__ = ()

    def __repr__(self) -> str:
        import oomguard

        return str(oomguard.record_repr(self))


class ShownRecord(Record):
    """Base of the records that users print: ``str`` is the panel of the command line."""

    __slots__ = ()

    def __str__(self) -> str:
        import oomguard

        return str(oomguard.record_text(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--format json`` writes, with secrets masked."""
        import oomguard

        found: dict[str, Any] = oomguard.record_dict(self)
        return found

    def to_markdown(self) -> str:
        """Return the record as Markdown, for an issue tracker or a chat."""
        import oomguard

        return str(oomguard.record_markdown(self))


def shown(text: str) -> str:
    """Return a text with secrets masked and terminal escapes removed."""
    import oomguard

    return str(oomguard.drawn(text))
