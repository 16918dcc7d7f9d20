"""The memory map of one device: its segments laid end to end and cut into cells of one size, few enough to draw."""

from __future__ import annotations

from typing import Any, Final

from oomguard.snapshots.records import MapCell

# As many cells as a picture has room for: 24 rows of 240.
CELLS: Final = 24 * 240
# A cell that is partly live is shown by how much of it is, in steps.
_STEPS: Final = 4

_Run = tuple[str, int]


class MemoryMap:
    """Collects the segments of a device, each as runs of blocks in one state."""

    def __init__(self) -> None:
        self._segments: list[tuple[Any, int, list[_Run]]] = []

    def add(self, group: Any, address: int, runs: list[_Run], is_free: bool) -> None:
        """Add a segment by the group that it belongs to; ``is_free`` says that all of it is free."""
        named = runs if is_free else [("split" if kind == "free" else kind, size) for kind, size in runs]
        self._segments.append((group, address, named))

    def cells(self) -> tuple[MapCell, ...]:
        """Return the map: equal cells that follow each other are one, and a segment's first cell says so."""
        total = sum(size for _, _, runs in self._segments for _, size in runs)
        if not total:
            return ()
        cell_bytes = max(1, -(-total // CELLS))
        drawn = _Cells(cell_bytes)
        for _, _, runs in sorted(self._segments, key=lambda row: (str(row[0]), row[1])):
            drawn.begin_segment()
            for kind, size in runs:
                drawn.add(kind, size)
        return drawn.finished()


class _Cells:
    """Pours runs of bytes into cells."""

    def __init__(self, cell_bytes: int) -> None:
        self._cell_bytes = cell_bytes
        self._done: list[MapCell] = []
        self._filled: dict[str, int] = {}
        self._room = cell_bytes
        self._begins = False

    def begin_segment(self) -> None:
        self._begins = True

    def add(self, kind: str, size: int) -> None:
        while size:
            part = min(size, self._room)
            self._filled[kind] = self._filled.get(kind, 0) + part
            self._room -= part
            size -= part
            if not self._room:
                self._close()
                whole = size // self._cell_bytes
                if whole:
                    self._put(kind, 1.0 if kind == "live" else 0.0, whole)
                    size -= whole * self._cell_bytes

    def finished(self) -> tuple[MapCell, ...]:
        if self._filled:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        held = sum(self._filled.values())
        live = self._filled.get("live", 0)
        share = round(_STEPS * live / held) / _STEPS
        others = {kind: size for kind, size in self._filled.items() if kind != "live"}
        kind = "live" if share == 1 or not others else max(others, key=lambda name: others[name])
        self._put(kind, 1.0 if kind == "live" else share, 1)
        self._filled, self._room = {}, self._cell_bytes

    def _put(self, kind: str, share: float, cells: int) -> None:
        begins, self._begins = self._begins, False
        last = self._done[-1] if self._done else None
        if last is not None and not begins and (last.kind, last.share) == (kind, share):
            self._done[-1] = MapCell(kind, last.cells + cells, share, last.begins_segment)
        else:
            self._done.append(MapCell(kind, cells, share, begins))
