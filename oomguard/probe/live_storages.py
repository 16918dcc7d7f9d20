"""Count the bytes of live tensor storages; fake tensors count like real ones.

This module does not import torch: every object with an ``untyped_storage`` is a tensor here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

_PARTS: Final = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


class PeakMeter:
    """Hold a separate peak, which a reset of the device's own peak does not change."""

    __slots__ = ("peak_bytes",)

    def __init__(self, live_bytes: int) -> None:
        self.peak_bytes = live_bytes


class LiveStorages:
    """Count the bytes of adopted storages that are still alive, each storage once.

    With ``keep_events``, every change is recorded as (storage number, bytes): a new size, or 0 at
    its end.
    """

    def __init__(self, *, keep_events: bool = False) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self.events: list[tuple[int, int]] | None = [] if keep_events else None
        self._sizes: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._numbers = 0
        self._meters: list[PeakMeter] = []
        # No peak is lower, so an operation that leaves fewer bytes alive changes none. This saves
        # most comparisons.
        self._lowest_peak_bytes = 0

    def adopt(self, leaf: Any) -> None:
        """Count the tensor's storage from now on until nothing refers to it; ignore other objects.

        ``peak_bytes`` is not updated. Call ``note_peak`` after all results of an operation are
        adopted.
        """
        if getattr(leaf, "untyped_storage", None) is None or leaf.is_meta:
            return
        try:
            storage = leaf.untyped_storage()
        except NotImplementedError:  # a sparse tensor has no storage, but its parts have
            for part in _parts(leaf):
                self.adopt(part)
            return
        key = storage._cdata
        size = storage.nbytes()
        number, known = self._sizes.get(key, (0, 0))
        if number == 0:
            self._numbers += 1
            number = self._numbers
            self._ends[key] = weakref.ref(storage, functools.partial(self._end, key))
        elif known == size:
            return
        self._sizes[key] = (number, size)
        self.bytes += size - known
        if self.events is not None and (size or known):
            self.events.append((number, size))

    def drop(self, leaf: Any) -> None:
        """Stop counting a tensor's storage."""
        key = leaf.untyped_storage()._cdata
        self._ends.pop(key, None)
        self._end(key, None)

    @contextlib.contextmanager
    def passing(self, sizes: Sequence[int]) -> Iterator[None]:
        """Count temporary blocks inside the ``with`` block, also in the peak.

        Negative sizes, which may fail, are ignored.
        """
        needed_bytes = sum(size for size in sizes if size > 0)
        first = self._numbers + 1
        self._numbers += len(sizes)
        self.bytes += needed_bytes
        if self.events is not None:
            self.events += enumerate(sizes, first)
        self.note_peak()
        try:
            yield
        finally:
            self.bytes -= needed_bytes
            if self.events is not None:
                self.events += [(number, 0) for number in range(first, first + len(sizes))]

    def take_events(self) -> list[tuple[int, int]]:
        """Return the recorded changes and forget them."""
        events = self.events
        self.events = []
        return events or []

    def note_peak(self) -> None:
        """Update the peak with the bytes alive now."""
        if self.bytes > self._lowest_peak_bytes:
            self._raise_peaks()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.bytes
        self._lowest_peak_bytes = min(self._lowest_peak_bytes, self.bytes)

    def begin_meter(self) -> PeakMeter:
        """Start measuring another peak, until ``end_meter``."""
        meter = PeakMeter(self.bytes)
        self._meters.append(meter)
        self._lowest_peak_bytes = min(self._lowest_peak_bytes, meter.peak_bytes)
        return meter

    def end_meter(self, meter: PeakMeter) -> None:
        """Stop measuring this peak."""
        with contextlib.suppress(ValueError):
            self._meters.remove(meter)

    def _raise_peaks(self) -> None:
        meters: tuple[PeakMeter, ...] | None = None
        while meters != (
            now := tuple(self._meters)
        ):  # another thread may have started a meter with a lower peak meanwhile
            meters = now
            self.peak_bytes = lowest = max(self.peak_bytes, self.bytes)
            for meter in meters:
                meter.peak_bytes = max(meter.peak_bytes, self.bytes)
                lowest = min(lowest, meter.peak_bytes)
            self._lowest_peak_bytes = lowest

    def _end(self, key: int, _reference: object) -> None:
        number, size = self._sizes.pop(key, (0, 0))
        self._ends.pop(key, None)
        self.bytes -= size
        if self.events is not None and size:
            self.events.append((number, 0))


def _parts(tensor: Any) -> Iterator[Any]:
    """Yield the dense tensors of a sparse one; none for an opaque layout (MKL-DNN)."""
    for name in _PARTS.get(str(tensor.layout), ()):
        yield getattr(tensor, name)()
