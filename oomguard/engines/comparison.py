"""What is asked of a call whose rows are compared with each other, where nothing else tells that they can be run apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Comparison(Protocol):
    """A call whose rows are compared, as nothing else tells that they do not look at each other."""

    @property
    def why(self) -> str:
        """Why nothing else tells."""

    @property
    def gives_result(self) -> bool:
        """Whether ``seen`` gives what a part gives."""

    def seen(self, order: Sequence[int]) -> Any:
        """Run the rows of these numbers, and return what is compared of them."""

    def held(self) -> Mapping[str, Any]:
        """Return what a call has left beside its result, by where, as values that can be compared."""

    def passed(self) -> None:
        """Note that the rows do not look at each other: calls of this kind are compared once."""
