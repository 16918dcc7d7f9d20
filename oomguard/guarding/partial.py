"""The rows of a call that were done when it was given up: left in its exception."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from oomguard.engines.protocol import WatchedCall
from oomguard.guarding.failure import add_note, run_guarded
from oomguard.guarding.gathered import Gathered
from oomguard.guarding.side_by_side import SideBySide
from oomguard.partial import Partial


@dataclass(frozen=True, slots=True)
class DoneRows:
    """What a call that is given up leaves.

    Attributes:
        partial: the rows that are done; None before the first, and where they are not known to be those of the whole call.
        withheld: why rows that ran are not among them; None where all are.
    """

    partial: Partial | None = None
    withheld: str | None = None

    @classmethod
    def of(cls, gathered: Gathered, call: WatchedCall, compared: SideBySide) -> DoneRows:
        """Return what was done of a call, put together; nothing where that cannot be."""
        if not gathered.done:
            return cls()
        if (why := call.unsettled or compared.unsettled) is not None:
            return cls(withheld=f"{gathered.done} of {gathered.rows} rows ran, and are not handed out: {why}")
        finished, error = run_guarded(gathered.finished, (), {})
        return cls(Partial(gathered.rows, gathered.done, finished)) if error is None else cls()

    def leave_with(self, error: BaseException, why_whole: str | None) -> BaseException:
        """Return an explained exception with why its call was not run in parts, and the rows that are done."""
        if why_whole is not None and why_whole not in "".join(getattr(error, "__notes__", ())):
            add_note(error, f"oomguard: not run in parts: {why_whole}")
        if self.withheld is not None:
            add_note(error, f"oomguard: {self.withheld}")
        if self.partial is not None:
            keep_in(error, self.partial)
            done = f"{self.partial.done} of {self.partial.rows} rows are done"
            add_note(error, f"oomguard: {done}: `partial` of this exception holds them")
        return error


def keep_in(error: BaseException, partial: Partial) -> None:
    """Put the finished rows into an exception as ``partial``, unless it has an attribute of that name or takes none."""
    if not hasattr(error, "partial"):
        with contextlib.suppress(AttributeError, TypeError):
            error.partial = partial  # type: ignore[attr-defined]
