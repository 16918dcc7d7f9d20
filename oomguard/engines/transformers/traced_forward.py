"""What a model's call would need with other numbers of rows: its own code, run under fake tensors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from oomguard.engines.transformers.allocator_need import AllocatorNeed, is_asked_for, largest_two
from oomguard.engines.transformers.followed import Followed
from oomguard.log import get_logger
from oomguard.memory.generate.traced_steps import events_between

if TYPE_CHECKING:
    from oomguard.memory.generate.drawing import Drawn

# After this no further number of rows is tried: the answer so far is known to fit.
_LIMIT_S: Final = 60.0

# Returns the arguments of a call, with what a function makes of each tensor in them that holds rows.
WithRows = Callable[[Callable[[Any], Any]], dict[str, Any]]


class TracedForward:
    """One call of a model, to be asked for the bytes that ``n`` rows of it take beyond what is alive before it.

    Args:
        model: the model.
        total_rows: rows of the whole call, whose results stand together in the end.
        arguments: its arguments by name, with other tensors for those that hold rows.
        mask: its attention mask; None where it has none.
        around: entered around a call of the model that it is given.
        refuse: called with the reason where the results show that they do not hold one entry a row.
        drew: called where random numbers are drawn, with whether each draw gives one number for all rows.
        layout: where it is noted at which axis the tensors of the result hold the rows, and how many entries a row has there.
        leaves: where the tensors are noted that a call leaves on its model, one entry a row.
        refuse_again: called with the reason where a call that is made once more finds something else than the first did.
        unlisted: what nothing but following the call tells of its arguments; None where their names do.
    """

    def __init__(
        self,
        model: Any,
        total_rows: int,
        arguments: WithRows,
        mask: Any,
        refuse: Callable[[str], object],
        around: Callable[[Any], AbstractContextManager[object]],
        drew: Callable[[bool], object],
        layout: dict[str, tuple[int, int]],
        leaves: list[tuple[str, str]],
        refuse_again: Callable[[str], object],
        unlisted: str | None = None,
    ) -> None:
        self._unlisted = unlisted
        self._layout, self._leaves, self._refuse_again = layout, leaves, refuse_again
        self._refuse, self._around, self._drew = refuse, around, drew
        self._model, self._total_rows, self._arguments, self._mask = model, total_rows, arguments, mask
        self._twin: Any = None
        self._traces: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._mask_is_full = False
        self._started_s = time.monotonic()
        self._failed = False
        self._entries: list[tuple[int, ...]] = []
        self._results_bytes = 0

    def why_together(self) -> str | None:
        """Return what makes a row of the call depend on those beside it, None where nothing does or that cannot be told."""
        return self._followed().why_together()

    def why_not_again(self) -> str | None:
        """Return what the call changes that it reads, None where nothing, or that cannot be told."""
        return self._followed().why_not_again()

    def _followed(self) -> Followed:
        return Followed(
            self._model,
            self._arguments,
            self._total_rows,
            self._mask,
            self._around,
            layout=self._layout,
            leaves=self._leaves,
            refuse_again=self._refuse_again,
            unlisted=self._unlisted,
        )

    def need_bytes(self, rows: int, room_bytes: int | None = None) -> int | None:
        """Return the bytes of ``rows`` rows at their peak, the results of others not among them; None where that cannot be told.

        On CUDA a need within ``room_bytes`` is also replayed through torch's caching allocator, as for ``generate``.
        """
        if self._failed or time.monotonic() - self._started_s > _LIMIT_S:
            return None
        import torch

        try:
            # Under inference_mode a question about values would not come through as the operation that the trace answers.
            with torch.inference_mode(mode=False):
                return self._traced(rows, room_bytes)
        except Exception as error:  # noqa: BLE001 - a model's own code under fake tensors: anything, and all means "not known"
            self._failed = True
            get_logger().debug("the call cannot be traced", error=f"{type(error).__name__}: {error}")
            return None

    @functools.cached_property
    def _allocator(self) -> AllocatorNeed:
        return AllocatorNeed(next(iter(self._model.parameters())))

    def estimated_bytes(self, rows: int, room_bytes: int) -> int | None:
        """Return the same on the line through the two largest numbers of rows that were traced; None where they did not do the same."""
        line = largest_two(self._traces, rows)
        if line is None:
            return None
        (need, events), (other_need, other_events), share = line
        mixed = events_between(events, other_events, share)
        if mixed is None:
            return None
        return self._allocator.need_bytes(round(need + share * (other_need - need)), lambda: mixed, room_bytes)

    def asks_for(self, rows: int, size_bytes: float, slack_bytes: float) -> bool | None:
        """Return whether a call asks its allocator for so many bytes; None where that does not tell, or nobody hands out blocks."""
        line = largest_two(self._traces, rows)
        if line is None or not self._allocator.hands_out_blocks:
            return None
        (_, events), (_, other_events), share = line
        mixed = events_between(events, other_events, share)
        return None if mixed is None else is_asked_for(mixed, size_bytes, slack_bytes)

    def results_bytes(self) -> int:
        """Return the bytes of the results of all rows, as the last trace tells them."""
        return self._results_bytes

    def _traced(self, rows: int, room_bytes: int | None) -> int | None:
        from oomguard.memory.generate.fake_forward import trace_forward
        from oomguard.memory.generate.fake_generate import is_full, rows_like, twin_of

        if self._twin is None:
            devices = {tensor.device for tensor in (*self._model.parameters(), *self._model.buffers())}
            if len(devices) != 1:
                self._failed = True  # the peak of each of several devices is not told apart
                return None
            self._twin, self._mask_is_full = twin_of(self._model), is_full(self._mask)
        arguments: Mapping[str, Any] = self._arguments(lambda tensor: rows_like(self._twin, tensor, rows))
        with self._around(self._twin.model):
            traced = trace_forward(
                self._twin,
                arguments,
                mask_is_full=self._mask_is_full,
                keep_events=self._allocator.hands_out_blocks,
                drew=lambda drawn: self._note_draws(drawn, rows),
            )
        self._look_at(traced.shapes, rows)
        self._results_bytes = -(
            -traced.result_bytes * self._total_rows // rows
        )  # they stand in places made for all rows
        self._traces[rows] = traced.need_bytes, traced.events
        return self._allocator.need_bytes(traced.need_bytes, lambda: traced.events, room_bytes)

    def _note_draws(self, drawn: Drawn, rows: int) -> None:
        if drawn.many:
            self._drew(False)
        elif drawn.alone and rows > 1:  # of one row, one number may be all that the rows have
            self._drew(True)

    def _look_at(self, shapes: tuple[tuple[int, ...], ...], rows: int) -> None:
        """Refuse results that hold their rows along no axis where they may stand, or another axis with them."""
        known = {(0, 1), *self._layout.values()}
        of_rows = [shape for shape in shapes if shape and shape != (0,)]
        entries: list[tuple[int, ...]] = []
        for shape in of_rows:
            axes = [axis for axis, each in sorted(known) if axis < len(shape) and shape[axis] == rows * each]
            if not axes:
                self._refuse(f"a result has the shape {shape} for {rows} rows")
                return
            entries.append((*shape[: axes[0]], *shape[axes[0] + 1 :]))
        if self._layout:
            return  # a prime number of rows has told each axis
        self._entries = self._entries or entries
        for shape, own, first in zip(of_rows, entries, self._entries, strict=False):
            if own != first:
                self._refuse(f"a result has the shape {shape} for {rows} rows")
                return
