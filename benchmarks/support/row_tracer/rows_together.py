"""Whether a row of a call depends on those beside it: the call under fake tensors, whose number of
rows is a prime.

The prime divides no other size of the call, so a dimension holds rows where it divides it. An
operation that is given rows and whose result holds none makes one value of all of them. That
changes a row once it meets rows again, or once the program asks for it; not where single rows would
have given the same (``known_values``). As fake_generate.py this imports torch.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from support.row_tracer.known_values import Known, KnownValues, name_of, written
from support.row_tracer.origin import PLACE, Of, Origin, line_of_model
from support.row_tracer.result_layout import named
from support.row_tracer.rows_mixed import (
    Places,
    arguments_of,
    found_places,
    goes_along,
    mixes_along,
)
from support.row_tracer.rows_order import RowOrder
from support.row_tracer.rows_placed import PlacedRows

_DATA: Final = Path(__file__).with_name("rows_together.toml")
# Whether a mask hides anything; the longest row is told by it too, and is another question.
_ASKS: Final = frozenset({"all", "any"})
_READ: Final = torch.ops.aten._local_scalar_dense.default
_INDEX: Final = torch.ops.aten.index.Tensor


@functools.cache
def _data(name: str) -> Any:
    return tomllib.loads(_DATA.read_text())[name]


class RowsTogether(TorchDispatchMode):  # type: ignore[misc]
    """Follows rows through the operations of one call, and notes what makes a row depend on others.

    Args:
        rows: the prime number of rows.
        answers_other: whether what the program asks of one value of all rows is answered as fewer
            rows might.

    Attributes:
        found: what makes a row depend on others, in order.
        asked: the values of all rows that the program asked for.
        by_values: whether another call's values may tell otherwise.
        stream: what was done, in order, as far as it can be compared with another call.
        placed: what comes from a row's place.
        writes: by the names of tensors that ``keep`` got, where they are written to, and whether
            what is written depends on rows.
    """

    def __init__(self, rows: int, *, answers_other: bool = False) -> None:
        super().__init__()
        self._rows = rows
        self._answers_other = answers_other
        self.values = KnownValues(rows)
        self.found: list[Origin] = []
        self.asked: list[Origin] = []
        self.by_values = False
        self.stream: list[int] = []
        self._marks: dict[int, tuple[Any, Of]] = {}
        self._numbers = 0
        self._places = Places()
        self._order = RowOrder(rows, _data("looks_otherwise")["operations"])
        self.placed = PlacedRows(rows, self.values)
        self.writes: dict[str, tuple[Origin, bool]] = {}
        self._kept: dict[int, tuple[Any, str]] = {}

    def begin(self, fake: torch.Tensor, name: str) -> None:
        """Note that a tensor holds rows of the argument ``name``."""
        fake._oomguard_of = Of(frozenset({name}))

    def keep(self, fake: torch.Tensor, name: str) -> None:
        """Note that a tensor is there before the call and after it: what writes to it is told, by
        this name.
        """
        storage = fake.untyped_storage()
        self._kept[storage._cdata] = storage, name
        fake._oomguard_kept = name

    def of_rows(self, fake: torch.Tensor) -> bool:
        """Return whether a tensor depends on rows."""
        return self._of(fake) is not None

    def look_at_result(self, result: Any) -> None:
        """Note what a call gives that a row's place tells, and not what the row holds."""
        for name, tensor in named(result, "its result"):
            if self.placed.decides(tensor, of_rows=self.of_rows(tensor)):
                self._report(Origin(PLACE, name, 0))

    def name(self, fake: torch.Tensor) -> None:
        """Number a tensor that is there before the call."""
        self._numbers += 1
        fake._oomguard_number = self._numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and follow what it makes."""
        del types
        kwargs = kwargs or {}
        if func is _READ:
            return self._read(func, args[0])
        out = None
        if torch.Tag.dynamic_output_shape in func.tags or func is _INDEX:
            out = found_places(func, args, arguments_of(func, args, kwargs))
        if out is None:
            out = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._note(func, args, kwargs, outs)
        self._order.note(name_of(func), inputs, outs)
        self._follow(func, args, kwargs, inputs, outs)
        if func._schema.is_mutable and self._kept:
            self._note_writes(func, args, kwargs, inputs)
        return out

    def _note_writes(
        self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]
    ) -> None:
        for target in written(func, args, kwargs):
            storage, name = self._kept.get(target.untyped_storage()._cdata, (None, ""))
            if storage is not None and target.numel():
                depends = any(self.of_rows(leaf) for leaf in inputs)
                origin, before = self.writes.get(
                    name, (Origin(name_of(func), *line_of_model()), False)
                )
                self.writes[name] = origin, before or depends

    def _note(self, func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> None:
        given = tree_map_only(
            torch.Tensor, lambda leaf: getattr(leaf, "_oomguard_number", -1), (args, kwargs)
        )
        self.stream.append(hash((str(func), str(given))))
        for leaf in outs:
            self._numbers += 1
            leaf._oomguard_number = self._numbers

    def _follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> None:
        name = name_of(func)
        if name in _data("makes_anew")["operations"]:
            told = []
        else:
            told = [(leaf, self._of(leaf)) for leaf in inputs]
        of_rows = [(leaf, of) for leaf, of in told if of is not None]
        leaves = [leaf for leaf, _ in of_rows]
        placed = self.placed.among(inputs, leaves)
        known = self.values.compute(func, args, kwargs, outs)
        if self.placed.note(func, name, args, kwargs, inputs, outs, leaves, placed):
            self._report(Origin(PLACE, *line_of_model()))
        if not of_rows:
            return
        with_rows = [leaf for leaf, _ in of_rows if self._has_rows(leaf)]
        alone = [leaf for leaf, _ in of_rows if not self._has_rows(leaf)]
        overflow = name in _data("overflow")["operations"] or any(of.overflow for _, of in of_rows)
        is_count = name in _data("counts")["operations"] and all(
            leaf.dtype == torch.bool for leaf in leaves
        )
        counts = is_count or all(of.counts for _, of in of_rows)
        of = Of(frozenset().union(*(of.names for _, of in of_rows)), None, overflow, counts)
        origin = next(
            (of.origin for leaf, of in of_rows if of.origin and not self._has_rows(leaf)), None
        )
        if with_rows and self._mixes_rows(func, name, args, kwargs, with_rows, outs):
            self._report(self._origin(func, of, with_rows[0]))
        born = None
        if with_rows and not all(map(self._has_rows, outs)):
            born = self._born(func, args, kwargs, with_rows, outs, known, of)
        for number, leaf in enumerate(outs):
            if known is not None:
                here = known[number]
            else:
                here = None
            if self._has_rows(leaf):
                if (
                    alone
                    and not self._puts_together(name, alone)
                    and not self._is_harmless(name, origin, here)
                ):
                    self._report(origin or self._origin(func, of, inputs[0]))
                self._mark(func, args, kwargs, leaf, of)
            elif with_rows:
                self._mark(func, args, kwargs, leaf, born)
            else:
                same = here is not None and not here.differs
                self._mark(func, args, kwargs, leaf, None if same else replace(of, origin=origin))

    def _born(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        with_rows: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        known: Sequence[Known] | None,
        of: Of,
    ) -> Of | None:
        """Return what values of all rows depend on; None where they are the same for every number
        of rows.
        """
        origin = self._origin(func, of, with_rows[0])
        harmless = _data("changes_no_row")
        if any(part in origin.file for part in harmless["files"]) or any(
            part in origin.text for part in harmless["lines"]
        ):
            return None
        if known is not None:
            self.by_values = True
            reduced = self.values.reduced(func, args, kwargs, with_rows, known)
            if reduced is None:
                return None
            for leaf, value in zip(outs, reduced, strict=True):
                if not self._has_rows(leaf):
                    self.values.give(leaf, value.whole, value.other)
        return replace(of, origin=origin)

    def _is_harmless(self, name: str, origin: Origin | None, known: Known | None) -> bool:
        if known is not None:
            return not known.differs
        if name in _data("puts_in_groups")["operations"]:
            return True
        if name in _data("looks_up")["operations"] and origin is not None and origin.counts:
            return True
        return origin is not None and origin.overflow

    def _mixes_rows(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        with_rows: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> bool:
        """Return whether an operation computes rows of other rows, though its result holds rows."""
        first = with_rows[0]
        given = arguments_of(func, args, kwargs)
        begins = name == "cumsum" and goes_along(given, first, self._is_rows)
        if self._places.is_limited(name, with_rows, outs, begins=begins):
            return True
        if mixes_along(name, given, first, self._is_rows):
            return True
        if "batch_norm" in name:
            return len(outs) > 1 and outs[1].numel() > 0 and not self._has_rows(outs[1])
        if name == "roll":
            return any(
                self._is_rows(first.shape[dim]) for dim in (args[2] if len(args) > 2 else ())
            )
        return any(self._count(leaf) > 1 for leaf in outs) and all(
            self._count(leaf) < 2 for leaf in with_rows
        )

    def _read(self, func: Any, tensor: torch.Tensor) -> Any:
        """Answer what the program asks for: as the whole call would where that is known."""
        of = self._of(tensor)
        known = self.values.of(tensor)
        if known is None:
            value = func(tensor)
        else:
            value = known.entry()
        if of is None or of.origin is None or (known is not None and not known.differs):
            return value
        origin = of.origin
        is_yes_or_no = tensor.dtype == torch.bool
        if origin.overflow or (is_yes_or_no and origin.operation in _ASKS and of.is_of_mask):
            return value
        if known is None and not is_yes_or_no and origin.counts:
            return value  # how many of the rows' tokens go where: the rows are put together again
        if known is None and not is_yes_or_no:
            self._report(origin)
            return value
        self.asked.append(origin)
        if self._answers_other:
            if known is None:
                return not value
            return known.entry(other=True)
        return value

    def _origin(self, func: Any, of: Of, given: torch.Tensor) -> Origin:
        counts = (
            name_of(func) in _data("counts")["operations"] and not given.dtype.is_floating_point
        )
        return Origin(name_of(func), *line_of_model(), counts, of.overflow)

    def _report(self, origin: Origin) -> None:
        self.found.append(origin)

    def _puts_together(self, name: str, alone: Sequence[torch.Tensor]) -> bool:
        """Return whether values of single rows become rows again: as many of them as there are."""
        return name in {"stack", "cat"} and len(alone) % self._rows == 0

    def _mark(self, func: Any, args: Any, kwargs: Any, leaf: torch.Tensor, of: Of | None) -> None:
        leaf._oomguard_of = of
        if of is not None and func._schema.is_mutable:
            for target in written(func, args, kwargs):
                storage = target.untyped_storage()
                old = self._marks.get(storage._cdata)
                if old is None:
                    merged = of
                else:
                    merged = replace(of, names=of.names | old[1].names)
                self._marks[storage._cdata] = storage, merged

    def _of(self, tensor: torch.Tensor) -> Of | None:
        of: Of | None = getattr(tensor, "_oomguard_of", None)
        if (
            of is None
            and self._marks
            and (mark := self._marks.get(tensor.untyped_storage()._cdata))
        ):
            of = mark[1]
        return of

    def _is_rows(self, size: int) -> bool:
        return bool(size) and size % self._rows == 0

    def _count(self, tensor: torch.Tensor) -> int:
        return sum(self._is_rows(size) for size in tensor.shape)

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return any(self._is_rows(size) for size in tensor.shape)
