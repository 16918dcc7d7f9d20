"""Which of the places a command gets.

A place that nobody uses comes first, the smallest of them on which the plan fits with its margin: a larger one stays for who needs it.
Only then one that others use, the one with most room: what they hold may grow, and what they free while an engine profiles spoils what
it measures. Several devices for one command are of one kind where they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oomguard.placement.need import Fitness, Need
from oomguard.placement.places import Place

Accepts = Callable[[Fitness], bool]


def fitting(need: Need, places: Sequence[Place], accepts: Accepts, *, emptied: bool = False) -> list[Place]:
    """Return the places on which a command would start, the best first; of equally good ones in their own order, the user's."""
    judged = [(place, need.on(place, emptied=emptied)) for place in places if place.cannot is None]
    kept = [(place, fitness) for place, fitness in judged if accepts(fitness)]
    # Of one that nothing is known about, all that is known is that it may be large.
    largest_first = -1 if need.start is None else 1

    def order(pair: tuple[Place, Fitness]) -> tuple[bool, bool, int]:
        place, fitness = pair
        size = largest_first * (place.total_bytes or 0) if place.is_empty else -(place.free_bytes or 0)
        return not fitness.has_margin, not place.is_empty, size

    return [place for place, _ in sorted(kept, key=order)]  # sorted() leaves what serves equally well as it came


def chosen_of(usable: Sequence[Place], count: int, candidates: Sequence[Place]) -> tuple[Place, ...] | None:
    """Return the ``count`` best of the places that can be taken, in the order of the candidates: that is the user's own where one
    was given, and it numbers the devices that the program sees. None where there are fewer.
    """
    best = first_of_one_kind(usable, count)
    return None if best is None else tuple(place for place in candidates if place in best)


def first_of_one_kind(places: Sequence[Place], count: int) -> tuple[Place, ...] | None:
    """Return the first ``count`` places of one kind, else the first of any kind; None where there are fewer."""
    for one in places:
        alike = [place for place in places if (place.name, place.total_bytes) == (one.name, one.total_bytes)]
        if len(alike) >= count:
            return tuple(alike[:count])
    return tuple(places[:count]) if len(places) >= count else None
