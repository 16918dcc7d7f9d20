"""Partial results: the rows of a call that were done when it was given up."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Partial:
    """``done`` of ``rows`` rows; ``result`` is what the call would have returned for the first
    ``done`` of them alone.

    Of a vLLM that computes vectors ``result`` is a list of them, one for each request in the order
    asked, None for one that failed. A tensor of fewer rows than the call's lies on the host. Where
    the result cannot be pickled, a pickled copy has no rows.
    """

    rows: int
    done: int
    result: Any = field(repr=False)

    def __len__(self) -> int:
        return self.done

    def __reduce__(self) -> tuple[Any, tuple[int, int, bytes]]:
        try:
            return _loaded, (self.rows, self.done, pickle.dumps(self.result))
        except Exception:  # noqa: BLE001
            # a user's own type: the exception that holds it has to reach another process
            return _loaded, (self.rows, 0, pickle.dumps(None))


def _loaded(rows: int, done: int, result: bytes) -> Partial:
    # written by ``__reduce__``, within another pickle
    return Partial(rows, done, pickle.loads(result))  # noqa: S301
