"""What fake tensors would hold, where it follows from a call's arguments alone: computed beside
them, on the host.

Each value is there twice: as the whole call has it (``whole``), and as it might be where fewer rows
run together (``other``). As fake_generate.py this imports torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# Larger ones are not computed: such a value is not known.
_MOST_ENTRIES: Final = 1 << 22
# What these make holds nothing yet.
_EMPTY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
# What these give of a value that has rows is one of its rows.
ONE_ROW: Final = frozenset({"select", "unbind", "slice", "split", "chunk"})


@dataclass(frozen=True, slots=True)
class Known:
    """A value, as the whole call has it and as another number of rows might."""

    whole: torch.Tensor
    other: torch.Tensor

    @property
    def differs(self) -> bool:
        """Whether it depends on how many rows run together, or on which."""
        return not _same(self.whole, self.other)

    def entry(self, *, other: bool = False) -> Any:
        """Return the one entry of either value as a number."""
        with _disable_current_modes():
            return (self.other if other else self.whole).item()


class KnownValues:
    """The values of the fake tensors of one trace, of ``rows`` rows each.

    Args:
        rows: the number of rows, which divides a dimension where that holds rows, and no other.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._changed: dict[int, Any] = {}  # storages that hold by now what is not known

    def give(
        self, fake: torch.Tensor, whole: torch.Tensor, other: torch.Tensor | None = None
    ) -> None:
        """Note what a fake tensor holds; both values are this trace's own."""
        fake._oomguard_known = Known(whole, whole.clone() if other is None else other)

    def of(self, tensor: Any) -> Known | None:
        """Return what a tensor holds; None where that is not known."""
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return Known(tensor.detach().cpu().clone(), tensor.detach().cpu().clone())
        known: Known | None = getattr(tensor, "_oomguard_known", None)
        if known is None or known.whole.untyped_storage()._cdata in self._changed:
            return None
        return known

    def compute(
        self, func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]
    ) -> list[Known] | None:
        """Compute an operation's results beside the fake ones, note them, and return them; None
        where they cannot be known.
        """
        found = self._computed(func, args, kwargs, outs)
        if found is None:
            if func._schema.is_mutable:
                self._forget(func, args, kwargs)
            return None
        for fake, known in zip(outs, found, strict=True):
            fake._oomguard_known = known
        return found

    def _computed(
        self, func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]
    ) -> list[Known] | None:
        if name_of(func) in _EMPTY or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not outs or sum(out.numel() for out in outs) > _MOST_ENTRIES:
            return None
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(self.of(leaf) is None for leaf in inputs):
            return None
        with contextlib.suppress(Exception), _disable_current_modes():
            memo: dict[int, Known] = {id(leaf): self.of(leaf) for leaf in inputs}  # type: ignore[misc]
            whole = _leaves(_run(func, args, kwargs, lambda leaf: memo[id(leaf)].whole))
            other = _leaves(_run(func, args, kwargs, lambda leaf: memo[id(leaf)].other))
            if [tuple(leaf.shape) for leaf in whole] == [tuple(out.shape) for out in outs]:
                return [Known(one, two) for one, two in zip(whole, other, strict=True)]
        return None

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        for target in written(func, args, kwargs):
            if isinstance(known := getattr(target, "_oomguard_known", None), Known):
                for value in (known.whole, known.other):
                    storage = value.untyped_storage()
                    self._changed[storage._cdata] = storage

    def reduced(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[torch.Tensor],
        known: Sequence[Known],
    ) -> list[Known] | None:
        """Return one value of all rows with what single rows would have given as ``other``; None
        where all give the same.

        Args:
            func: the operation, whose results hold no rows.
            args: its arguments.
            kwargs: its arguments by name.
            inputs: those of them that hold rows.
            known: its results.
        """
        with _disable_current_modes():
            if name_of(func) in ONE_ROW:
                first = self.of(inputs[0])
                if first is None:
                    return [Known(one.whole, _opposite(one.whole)) for one in known]
                one_of = [
                    *self._cut(first.whole, like=known[0].whole),
                    *self._cut(first.other, like=known[0].whole),
                ]
                if all(_same(one_of[0], row) for row in one_of):
                    return None
                return [Known(one.whole, _farthest(one.whole, one_of)) for one in known]
            rows = self._single(func, args, kwargs, inputs)
            if rows is None:
                return [Known(one.whole, _opposite(one.whole)) for one in known]
            found = [
                _against(
                    one, [pair[0][number] for pair in rows], [pair[1][number] for pair in rows]
                )
                for number, one in enumerate(known)
            ]
            if all(one is old for one, old in zip(found, known, strict=True)):
                return None
            return found

    def _single(
        self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]
    ) -> list[tuple[Any, Any]] | None:
        """Return what the operation gives for each row alone, as (whole, other); None where that
        cannot be told.
        """
        memo: dict[int, Known] = {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                if (known := self.of(leaf)) is None:
                    return None
                memo[id(leaf)] = known
        of_rows = {id(leaf) for leaf in inputs}
        cut = {
            key: (self._cut(value.whole), self._cut(value.other))
            for key, value in memo.items()
            if key in of_rows
        }
        if not all(all(pair) for pair in cut.values()):
            return None
        found = []
        for row in range(self._rows):
            try:
                whole, other = (
                    _leaves(
                        _run(func, args, kwargs, functools.partial(_row_of, cut, memo, row, number))
                    )
                    for number in (0, 1)
                )
            except Exception:  # noqa: BLE001
                # an operation that needs all rows: what one gives is not known
                return None
            found.append((whole, other))
        return found

    def _cut(
        self, value: torch.Tensor, *, like: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return a value's rows, each with its dimension of rows unless ``like`` has none; empty
        where it has several.
        """
        dims = [dim for dim, size in enumerate(value.shape) if size and size % self._rows == 0]
        if len(dims) != 1:
            return ()
        rows: tuple[torch.Tensor, ...] = value.split(value.shape[dims[0]] // self._rows, dims[0])
        if like is None or like.dim() == value.dim():
            return rows
        return tuple(row.squeeze(dims[0]) for row in rows)


def name_of(func: Any) -> str:
    """Return an operation's name without its namespace."""
    return str(func._schema.name).partition("::")[2]


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            if number < len(args):
                value = args[number]
            else:
                value = kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _run(func: Any, args: Any, kwargs: Any, value: Callable[[Any], Any]) -> Any:
    """Run an operation on the host, on what stands for its tensors."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return value(leaf)
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return leaf

    given, named = tree_map(changed, (tuple(args), dict(kwargs)))
    if "pin_memory" in named:
        named["pin_memory"] = False
    return func(*given, **named)


def _row_of(
    cut: Mapping[int, Sequence[Sequence[torch.Tensor]]],
    memo: Mapping[int, Known],
    row: int,
    number: int,
    leaf: Any,
) -> Any:
    """Return what stands for a tensor where one row runs alone: that row of it, or all of what
    holds none.
    """
    one = memo[id(leaf)]
    if id(leaf) in cut:
        return cut[id(leaf)][number][row]
    return (one.whole, one.other)[number]


def _leaves(out: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with _disable_current_modes():
        if one.shape != other.shape:
            return False
        # no number equals itself not
        return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


def _against(one: Known, wholes: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Known:
    """Return a value of all rows beside what single rows give; itself where it is what each of them
    gives.
    """
    alike = all(_same(wholes[0], row) for row in wholes) and all(
        _same(others[0], row) for row in others
    )
    if alike and _same(wholes[0], one.whole) and _same(others[0], one.other):
        return one
    return Known(one.whole, others[0] if alike else _farthest(one.whole, [*wholes, *others]))


def _opposite(value: torch.Tensor) -> torch.Tensor:
    if value.dtype == torch.bool:
        return ~value
    return value + 1


def _farthest(value: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, entry by entry, the one of ``others`` that is farthest from ``value``."""
    if any(other.shape != value.shape for other in others):
        return _opposite(value)
    stacked = torch.stack(list(others))
    off = (stacked.double() - value.double()).abs().nan_to_num(float("inf"))
    return stacked.gather(0, off.argmax(0, keepdim=True))[0]
