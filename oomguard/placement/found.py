"""What one look at the devices found, and what a command was given of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from oomguard.placement.locks import Lock
from oomguard.placement.places import Place


@dataclass(slots=True)
class Taken:
    """Places that a command has, with their leases, and the variables under which it sees them and no others."""

    places: tuple[Place, ...]
    env: Mapping[str, str]
    locks: Mapping[str, Lock] = field(default_factory=dict)
    _is_released: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """What they are leased under."""
        return frozenset(place.key for place in self.places)

    @property
    def shown(self) -> str:
        """How a person is told of them."""
        return ", ".join(place.shown for place in self.places)

    @property
    def holds_all(self) -> bool:
        """Whether its leases are held still, as far as there are any."""
        return not self._is_released

    def release(self) -> None:
        """Give the leases back."""
        self._is_released = True
        for lock in self.locks.values():
            lock.close()


@dataclass(frozen=True, slots=True)
class Now:
    """What one look found.

    Attributes:
        candidates: the places that may be taken, whoever has them.
        usable: those on which the command would start now, leased or not, the best first.
        leased: which of all places somebody else has, with who that is in words.
        kept: which free ones are kept for who came before.
        hides: what is hidden from the run, in words; None where nothing is.
    """

    candidates: tuple[Place, ...]
    usable: tuple[Place, ...]
    leased: Mapping[str, str]
    kept: Collection[str]
    hides: str | None = None

    @property
    def open(self) -> list[Place]:
        """The places that can be taken now."""
        return [place for place in self.usable if place.key not in self.leased and place.key not in self.kept]
