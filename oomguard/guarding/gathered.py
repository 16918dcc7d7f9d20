"""Results of parts, put into their place as they come: joining them later would take their memory twice.

A part's result is copied, so that a view of something larger (``logits[:, -1]``) lets go of the rest. Where the device has
no room for the results they wait on the host; tokens always do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from oomguard.engines.protocol import WatchedCall
from oomguard.guarding.fields import Fields, FieldsPart
from oomguard.guarding.places import Place, place_result
from oomguard.guarding.record import place_of


class Gathered:
    """The results of one call's parts, of whatever kind the first one is.

    Args:
        rows: rows of the whole call.
        pad_value: what fills a row that ended earlier than others; None: all rows have one length.
        weigh: what the mean loss in a part's result weighs, where the results are records of fields; None: they are not.
        on_host: whether they wait on the host from the start.
        several: how many entries a row may have in a field, beside one.
        layout: at which axis fields hold their rows, and how many entries a row has there, by name, as far as it is known by then.
    """

    def __init__(
        self,
        rows: int,
        pad_value: int | None = None,
        weigh: Callable[[Any, int, int], float | None] | None = None,
        *,
        on_host: bool = False,
        several: Collection[int] = (),
        layout: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self._layout = layout
        self.rows, self._pad_value, self._weigh, self._several = rows, pad_value, weigh, several
        self.done = 0
        self.is_parked = on_host
        self._place: Place | None = None

    @classmethod
    def of(cls, call: WatchedCall) -> Gathered:
        """Return the place for the results of a call that has not begun."""
        return cls(
            call.rows, call.pad_value, call.weigh, on_host=call.waits_on_host, several=call.several, layout=call.layout
        )

    def add(self, part: Any, rows: int) -> str | None:
        """Put the result of the next ``rows`` rows into its place; return why that cannot be done, None where it was."""
        if self._weigh is not None:
            part = FieldsPart(part, rows, self._weigh(part, self.done, self.done + rows))
            self._place = self._place or Fields(
                self.rows, is_parked=self.is_parked, several=self._several, layout=self._layout
            )
        elif self._place is None:
            self._place = place_of(part, rows, self.rows, self._pad_value, is_parked=self.is_parked)
        problem = self._place.add(part)
        if problem is None:
            self.done += rows
        return problem

    def take(self, call: WatchedCall, part: Any, rows: int) -> str | None:
        """Put what the next rows of a call gave into its place, with what it leaves out of it or puts before it; as ``add``."""
        return self.add(call.completed(part, self.done, self.done + rows), rows)

    @property
    def device_bytes(self) -> int:
        """Bytes of the results on a device; 0 where they are on the host, or there are none."""
        return 0 if self._place is None or self.is_parked else self._place.device_bytes

    def park(self) -> None:
        """Move the results to the host, and keep there what is still to come."""
        self.is_parked = True
        if self._place is not None:
            self._place.park()

    def result(self) -> Any:
        """Return all rows in order; may run out of memory where they waited on the host."""
        assert self._place is not None  # noqa: S101 - a call that was split has parts
        return self._place.result()

    def result_of(self, call: WatchedCall) -> Any:
        """Return all rows as the whole call would have given them; may run out of memory too."""
        return call.finished(self.result(), place_result)

    def finished(self) -> Any:
        """Return the rows that are done, in order; None before the first."""
        return None if self._place is None else self._place.finished()
