"""Why a call is not run in parts, with what to do about it, which is found out only where somebody reads it."""

from __future__ import annotations

from collections.abc import Callable


class Reason(str):
    """A reason; ``told`` gives it with the advice that belongs to it, which may take seconds to find."""

    __slots__ = ("_with_advice",)
    _with_advice: Callable[[str], str]

    @classmethod
    def of(cls, why: str, with_advice: Callable[[str], str]) -> Reason:
        """Return a reason whose advice ``with_advice`` adds."""
        made = cls(why)
        made._with_advice = with_advice
        return made

    def told(self) -> str:
        """Return the reason as a user reads it."""
        return self._with_advice(str(self))


def told(why: str) -> str:
    """Return a reason as a user reads it, where it is one that has advice; else as it is."""
    return why.told() if isinstance(why, Reason) else why
