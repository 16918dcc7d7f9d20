"""A function under a guard, as type checkers see it: called as before, with what happened in its calls."""

from __future__ import annotations

from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from oomguard.incident import Attempt, Diagnosis

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")


class GuardedFunction(Protocol[P, R_co]):
    """A guarded function, or a method of a class.

    Attributes:
        attempts: the attempts of its last call that ran out of memory.
        diagnosis: what that call failed of; None if none has failed.
    """

    attempts: tuple[Attempt, ...]
    diagnosis: Diagnosis | None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function, under its guard."""

    @overload
    def __get__(self, instance: None, owner: Any) -> GuardedFunction[P, R_co]: ...
    @overload
    def __get__(self: GuardedFunction[Concatenate[S, Q], R], instance: S, owner: Any) -> GuardedFunction[Q, R]: ...
