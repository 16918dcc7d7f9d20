"""The list of patterns: what each is, what a good tool should do with it, and how its one-row floor
is found.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ANY_SAFE = ("equal", "refused", "original error")
NOT_SPLIT = ("refused", "original error")


@dataclass
class Job:
    """One prepared run: ``call`` is the user's code; ``models`` are on the device before it starts.

    ``guarded`` is given where the guard is part of the pattern (a decorator, a thread); it takes
    the guard's hooks.
    """

    call: Callable[[], Any]
    models: list = field(default_factory=list)
    guarded: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Pattern:
    """A pattern with what was expected of it before it was ever run under the guard."""

    name: str
    build: Callable[[int], Job]
    source: str
    expect: str
    right: tuple[str, ...]
    rows: int
    small: int
    exact: bool
    must_fail: bool
    keeps: float


PATTERNS: dict[str, Pattern] = {}


def pattern(
    source: str,
    expect: str,
    right: tuple[str, ...] = ("equal",),
    rows: int = 16,
    small: int = 1,
    exact: bool = False,
    must_fail: bool = True,
    keeps: float = 2.0,
) -> Callable[[Callable[[int], Job]], Callable[[int], Job]]:
    """Register a builder; ``small`` is the size whose run must fit, ``keeps`` how often the result
    must fit beside it.
    """

    def register(build: Callable[[int], Job]) -> Callable[[int], Job]:
        name = build.__name__
        PATTERNS[name] = Pattern(name, build, source, expect, right, rows, small, exact, must_fail, keeps)
        return build

    return register
