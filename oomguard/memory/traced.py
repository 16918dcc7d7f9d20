"""What running a call's first steps under fake tensors showed: the bytes alive at each, and what follows for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Steps that are run before the rest is drawn as a line: the first is the prefill, the next may still warm up.
STEPS: Final = 5
# Steps drawn on for the allocator's replay: each is a few thousand events, and what it wastes is there long before.
_MOST_REPEATS: Final = 256


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """Bytes: the weights, all that lived when the call began, and each step's peak with both in it.

    ``end_bytes`` is the last step's peak, where it was traced apart from the first steps.
    ``events`` are the allocations and ends in order, (storage number, bytes or 0), where they were asked for;
    ``events_seen`` counts those up to the end of each step.
    """

    weights_bytes: int
    start_bytes: int
    peaks_bytes: tuple[int, ...]
    events: tuple[tuple[int, int], ...] = ()
    events_seen: tuple[int, ...] = ()
    end_bytes: int | None = None

    def last_step_bytes(self, steps: int) -> int:
        """The largest peak of the steps after the first; 0 where there is only one.

        Of more steps than were traced the last is the end's where that was traced, else each is taken to add the same.
        """
        peaks = self.peaks_bytes
        if len(peaks) < 2:
            return 0
        left = steps - len(peaks)
        if left > 0 and self.end_bytes is not None:
            return max(self.end_bytes, *peaks[1:])
        last = peaks[-1] + (left * (peaks[-1] - peaks[-2]) if len(peaks) > 2 and left > 0 else 0)
        return max(last, *peaks[1:])

    def peak_bytes(self, steps: int) -> int:
        """The most that is alive at once in a call of ``steps`` steps."""
        return max(self.peaks_bytes[0], self.last_step_bytes(steps))

    def all_events(self, steps: int) -> Iterator[tuple[int, int]]:
        """The allocations and ends of ``steps`` steps: those traced, and the last step again as often as are left.

        Every size goes on as it went from the last step but one to the last; of very many steps some stand for several. Only
        the traced ones where the last two did not do the same.
        """
        yield from self.events
        left = steps - len(self.events_seen)
        pattern = self._pattern() if left > 0 else None
        if pattern is None:
            return
        first = self.events_seen[-2]
        born = {(0, at): self.events[first + at][0] for at, entry in enumerate(pattern) if entry.bytes}
        fresh = max(number for number, _ in self.events)
        repeats = min(left, _MOST_REPEATS)
        for step in range(1, repeats + 1):
            for at, entry in enumerate(pattern):
                if entry.bytes:
                    fresh += 1
                    born[step, at] = fresh
                    yield fresh, entry.bytes + step * left // repeats * entry.rise_bytes
                else:
                    yield born.pop((step - entry.age, entry.place)), 0

    def _pattern(self) -> list[_Repeated] | None:
        """What the last step does, None where the step before it did something else."""
        if len(self.events_seen) < 4:
            return None
        start, middle, end = self.events_seen[-3:]
        before, last = self.events[start:middle], self.events[middle:end]
        if len(before) != len(last):
            return None
        older = {number for number, _ in self.events[:start]}
        earlier = {number: at for at, (number, size) in enumerate(before) if size}
        newer: dict[int, int] = {}
        pattern = []
        for at, ((_, size_before), (number, size)) in enumerate(zip(before, last, strict=True)):
            if bool(size_before) != bool(size):
                return None
            if size:
                if number in older or number in earlier or number in newer:
                    return None  # one that grew in place
                newer[number] = at
                pattern.append(_Repeated(size, size - size_before, 0, at))
            elif number in newer:
                pattern.append(_Repeated(0, 0, 0, newer[number]))
            elif number in earlier:
                pattern.append(_Repeated(0, 0, 1, earlier[number]))
            else:
                return None
        return pattern


@dataclass(frozen=True, slots=True)
class _Repeated:
    """One event of a step: a new storage of ``bytes``, ``rise_bytes`` more than a step ago; or, with 0, the end of the one
    that was new ``age`` steps ago at ``place``."""

    bytes: int
    rise_bytes: int
    age: int
    place: int
