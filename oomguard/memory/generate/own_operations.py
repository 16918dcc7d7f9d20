"""What the user's own code does in a trace, but for what sizes change: with other numbers of rows it does the same.

Where it does not, the number of rows, or a row's place, decides what is done: a branch, a loop over the rows with a limit, code
that is made at run time, a script. As fake_generate.py this imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from oomguard.memory.generate.origin import NUMBER, Origin, own_line

IsLibrary = Callable[[str], bool]
_NUMBERS: Final = (int, float, complex)
# ``torch.cdist`` takes products of matrices above 25 rows, and this below.
_CHOSEN_BY_SIZE: Final = ("_cdist_forward",)


class OwnOperations:
    """The operations of the user's own code in one trace.

    Args:
        is_library: whether the code of a module of this name is a library's.
    """

    def __init__(self, is_library: IsLibrary) -> None:
        self.is_library = is_library
        self.seen: dict[tuple[Any, ...], Origin] = {}
        self._read: set[Any] = set()

    def line(self) -> tuple[str, int] | None:
        """Return the file and the line of own code that is running; None where a library's is."""
        return own_line(self.is_library)

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> None:
        """Note an operation, and the weights among its inputs; of its numbers only those that it calculates with."""
        place = self.line()
        if place is None:
            return
        numbers: tuple[Any, ...] = ()
        if torch.Tag.pointwise in func.tags:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _NUMBERS)]
            numbers = tuple(None if leaf in self._read else leaf for leaf in given)
        kept = frozenset(name for leaf in inputs if (name := getattr(leaf, "_oomguard_kept", None)))
        self.seen.setdefault((str(func), place, kept, numbers), Origin(NUMBER, *place))

    def read(self, value: Any) -> None:
        """Note that the program was told a value: what it calculates with that differs by the rows that run."""
        self._read.add(value)

    def other(self, of: OwnOperations) -> Origin | None:
        """Return the first operation that is done here or there alone; None where both do the same."""
        alike = self._by_size() | of._by_size()
        mine, theirs = self._plain(of._read, alike), of._plain(self._read, alike)
        apart = [origin for key, origin in mine.items() if key not in theirs]
        apart += [origin for key, origin in theirs.items() if key not in mine]
        return apart[0] if apart else None

    def _by_size(self) -> set[tuple[str, int]]:
        """Return the lines at which torch itself chooses by sizes how it calculates the same."""
        return {place for name, place, *_ in self.seen if any(each in name for each in _CHOSEN_BY_SIZE)}

    def _plain(self, read: set[Any], alike: set[tuple[str, int]]) -> dict[tuple[Any, ...], Origin]:
        known = self._read | read
        return {
            (name, place, kept, tuple(None if number in known else number for number in numbers)): origin
            for (name, place, kept, numbers), origin in self.seen.items()
            if place not in alike
        }
