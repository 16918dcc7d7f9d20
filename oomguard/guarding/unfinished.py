"""The rows of a call that were done when it was given up: left in its exception."""

from __future__ import annotations

import contextlib

from oomguard.core.partial_results import Partial
from oomguard.guarding.collate import Gathered
from oomguard.guarding.failure import add_note, run_guarded


def partial_of(gathered: Gathered) -> Partial | None:
    """Return the rows of a call that are done, put together; None before the first, or if they
    cannot be.
    """
    if not gathered.done:
        return None
    finished, error = run_guarded(gathered.finished, (), {})
    if error is None:
        return Partial(gathered.rows, gathered.done, finished)
    return None


def leave_in(error: BaseException, partial: Partial | None, why_whole: str | None) -> BaseException:
    """Return an explained exception with why its call was not run in parts, and the rows that are
    done.
    """
    if why_whole is not None and why_whole not in "".join(getattr(error, "__notes__", ())):
        add_note(error, f"oomguard: not run in parts: {why_whole}")
    if partial is not None:
        keep_in(error, partial)
        done = f"{partial.done} of {partial.rows} rows are done"
        add_note(error, f"oomguard: {done}: `partial` of this exception holds them")
    return error


def keep_in(error: BaseException, partial: Partial) -> None:
    """Put the finished rows into an exception as ``partial``, unless it has an attribute of that
    name or takes none.
    """
    if not hasattr(error, "partial"):
        with contextlib.suppress(AttributeError, TypeError):
            error.partial = partial  # type: ignore[attr-defined]
