"""What a call of ``generate`` would need with other numbers of rows: its own model's code, run under fake tensors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from oomguard.engines.transformers.allocator_need import AllocatorNeed, is_asked_for, largest_two
from oomguard.engines.transformers.followed import Followed
from oomguard.engines.transformers.tensors import of_host
from oomguard.log import get_logger
from oomguard.memory.generate.traced_steps import TracedSteps, between

# After this no further number of rows is tried: the answer so far is known to fit.
_LIMIT_S: Final = 120.0


class TracedCall:
    """One call, to be asked for the bytes that ``n`` rows of it take beyond what is alive before it."""

    def __init__(
        self,
        model: Any,
        row_arguments: Mapping[str, Any],
        others: Mapping[str, Any],
        steps: int,
        *,
        record_rows: int | None = None,
        around: Callable[[Any], AbstractContextManager[object]] = nullcontext,
        refuse_again: Callable[[str], object] = lambda why: None,
        unlisted: str | None = None,
    ) -> None:
        """Take a call apart.

        Args:
            model: the model.
            row_arguments: arguments that hold one row per input, and are cut.
            others: arguments that are given as they are.
            steps: tokens of the longest answer.
            record_rows: rows of the whole call, where its result is a record of what each step gave; None where it is tokens.
            around: entered around a call of the model that it is given.
            refuse_again: called with the reason where a call that is made once more finds something else than the first did.
            unlisted: what nothing but following the call tells of its arguments; None where their names do.
        """
        self._refuse_again, self._unlisted = refuse_again, unlisted
        self._model, self._row_arguments, self._others, self._steps = model, row_arguments, others, steps
        self._record_rows, self._results_bytes, self._around = record_rows, 0, around
        self._mask_is_full = False
        self._twin: Any = None
        self._traces: dict[int, TracedSteps] = {}
        self._started_s = time.monotonic()
        self._failed = False

    def why_together(self) -> str | None:
        """Return what makes a row of the call depend on those beside it, None where nothing does or that cannot be told."""
        return self._followed().why_together()

    def why_not_again(self) -> str | None:
        """Return what the call changes that it reads, None where nothing, or that cannot be told."""
        return self._followed().why_not_again()

    def _followed(self) -> Followed:
        rows = next((int(tensor.shape[0]) for tensor in self._row_arguments.values()), 0)

        def arguments(change: Callable[[Any], Any]) -> dict[str, Any]:
            return {**self._others, **{name: change(value) for name, value in self._row_arguments.items()}}

        mask = self._row_arguments.get("attention_mask")
        return Followed(
            self._model,
            arguments,
            rows,
            mask,
            self._around,
            steps=self._steps,
            pad=self._pad,
            refuse_again=self._refuse_again,
            unlisted=self._unlisted,
        )

    def need_bytes(self, rows: int, room_bytes: int | None = None) -> int | None:
        """Return the bytes of ``rows`` rows at the call's peak; None where the model cannot be traced, or not in time.

        On CUDA a need within ``room_bytes`` is also replayed through torch's caching allocator there, and is above it where
        the allocator would run out.
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
        found = self._drawn(rows)
        return None if found is None else self._need(found, room_bytes)

    def asks_for(self, rows: int, size_bytes: float, slack_bytes: float) -> bool | None:
        """Return whether a call asks its allocator for so many bytes; None where that does not tell, or nobody hands out blocks."""
        found = self._drawn(rows) if self._traces and self._allocator.hands_out_blocks else None
        return None if found is None else is_asked_for(found.own_events(self._steps), size_bytes, slack_bytes)

    def _drawn(self, rows: int) -> TracedSteps | None:
        """Return what a call does on the line through two others."""
        line = largest_two(self._traces, rows)
        return line and between(*line)

    def results_bytes(self) -> int:
        """Return the bytes of the results of all rows, as the last trace tells them; 0 for tokens: they wait on the host."""
        return self._results_bytes

    @property
    def _pad(self) -> int | None:
        """The token that transformers takes for padding."""
        pad = self._others.get("pad_token_id")
        if pad is None:
            pad = getattr(getattr(self._model, "generation_config", None), "pad_token_id", None)
        return pad if isinstance(pad, int) else None

    def _pads(self, ids: Any) -> bool:
        """Return whether the inputs hold tokens that transformers takes for padding."""
        return (
            self._pad is not None
            and not ids.dtype.is_floating_point
            and of_host(lambda tokens: bool((tokens == self._pad).any()), ids)
        )

    def _traced(self, rows: int, room_bytes: int | None) -> int | None:
        from oomguard.memory.generate.fake_generate import is_full, rows_like, trace_call, twin_of

        if self._twin is None:
            devices = {tensor.device for tensor in (*self._model.parameters(), *self._model.buffers())}
            if len(devices) != 1:
                self._failed = True  # the peak of each of several devices is not told apart
                return None
            self._twin = twin_of(self._model)
            mask = self._row_arguments.get("attention_mask")
            self._mask_is_full = is_full(mask)
            ids = self._row_arguments.get("input_ids", self._row_arguments.get("inputs"))
            if mask is None and ids is not None and self._pads(ids):
                # transformers makes the mask itself where it finds padding.
                self._row_arguments = {**self._row_arguments, "attention_mask": ids}
                self._mask_is_full = False
        arguments = {name: rows_like(self._twin, value, rows) for name, value in self._row_arguments.items()}
        with self._around(self._twin.model):
            traced = trace_call(
                self._twin,
                {**self._others, **arguments},
                self._steps,
                mask_is_full=self._mask_is_full,
                keep_events=self._allocator.hands_out_blocks,
                keeps_steps=self._record_rows is not None,
            )
        if self._record_rows is not None:
            held = traced.end_held_bytes(self._steps) - traced.start_bytes
            self._results_bytes = -(-held * self._record_rows // rows)
        self._traces[rows] = traced
        return self._need(traced, room_bytes)

    def _need(self, traced: TracedSteps, room_bytes: int | None) -> int:
        tensor_bytes = traced.peak_bytes(self._steps) - traced.start_bytes
        return self._allocator.need_bytes(tensor_bytes, lambda: traced.own_events(self._steps), room_bytes)
