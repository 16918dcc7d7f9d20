"""The rows of a call that were done when it was given up: in the exception, and in the guard."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass, field
from typing import Any

from oomguard.guarding.failure import add_note


@dataclass(frozen=True, slots=True)
class Partial:
    """The first ``done`` rows of a call of ``rows``; ``result`` is what the call would have returned for them alone.

    A tensor of fewer rows than the call's lies on the host. Where the result cannot be pickled, a pickled copy has no rows.
    """

    rows: int
    done: int
    result: Any = field(repr=False)

    def __len__(self) -> int:
        return self.done

    def __reduce__(self) -> tuple[Any, tuple[int, int, bytes]]:
        try:
            return _loaded, (self.rows, self.done, pickle.dumps(self.result))
        except Exception:  # noqa: BLE001 - a user's own type: the exception that holds it has to reach another process
            return _loaded, (self.rows, 0, pickle.dumps(None))


def _loaded(rows: int, done: int, result: bytes) -> Partial:
    return Partial(rows, done, pickle.loads(result))  # noqa: S301 - written by ``__reduce__``, within another pickle


def leave_with(error: BaseException, partial: Partial | None, why_whole: str | None) -> BaseException:
    """Return an explained exception with why its call was not run in parts, and the rows that are done."""
    if why_whole is not None and why_whole not in "".join(getattr(error, "__notes__", ())):
        add_note(error, f"oomguard: not run in parts: {why_whole}")
    if partial is not None:
        keep_in(error, partial)
        done = f"{partial.done} of {partial.rows} rows are done"
        add_note(error, f"oomguard: {done}: `partial` of this exception holds them")
    return error


def keep_in(error: BaseException, partial: Partial) -> None:
    """Put the finished rows into an exception as ``partial``, unless it has an attribute of that name or takes none."""
    if not hasattr(error, "partial"):
        with contextlib.suppress(AttributeError, TypeError):
            error.partial = partial  # type: ignore[attr-defined]
