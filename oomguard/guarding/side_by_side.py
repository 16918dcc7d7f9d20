"""Rows of a part run beside other rows, and alone: a model that nobody can read is asked whether its rows look at each other.

Asked once for a kind of call, after the first part of several rows, where following the rows under fake tensors failed, or the code
is no library's. The same rows at the same places beside others have to come out equal to the last bits, whatever they are computed
with; fewer of them alone as far as other kernels allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.comparison import Comparison
from oomguard.engines.protocol import WatchedCall
from oomguard.guarding.beginning import Generators
from oomguard.guarding.failure import run_guarded
from oomguard.memory.generate.result_layout import named
from oomguard.observe import torch_memory
from oomguard.observe.exceptions import may_be_oom

# Of the largest number of a tensor. The same kernels in the same shapes give the same bits, but for sums in another order.
_SAME_EPS: Final = {"torch.float32": 32.0, "torch.float64": 1e4}
# Other shapes may take other kernels, and half a batch other sums.
_ALONE_RATIO: Final = {"torch.float32": 1e-4, "torch.float64": 1e-6, "torch.float16": 1e-2, "torch.bfloat16": 5e-2}
_TF32_RATIO: Final = 1e-2
_LEAST: Final = 1e-6
# How many other rows stand beside those of a part, and from which size on a larger part is compared again.
_OTHERS: Final = 24
_AGAIN: Final = 4
# Two rows have each other beside them: what is halved has four.
_FEWEST: Final = 4
_ITS_SIZE: Final = (
    "its size follows from what the rows hold. Where each row's own part of it is the same beside others, a function of your own "
    "that gives a list of these parts can be split, under @oomguard.guard(batch=...)"
)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``start`` to ``stop`` of ``total``."""

    start: int
    stop: int
    total: int

    @property
    def rows(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def beside_others(self) -> list[list[int]]:
        """Return the same rows, with another in each second place: several times where they are few, which may have little in common."""
        return [
            [
                row if number % 2 else (row + self.rows * times) % self.total
                for number, row in enumerate(range(self.start, self.stop))
            ]
            for times in range(1, 1 + max(1, _OTHERS // self.rows))
            if (self.rows * times) % self.total
        ]

    def last(self, more: int = 0) -> list[int]:
        """Return the last of them: a third, and ``more``."""
        return list(range(self.stop - max(1, self.rows // 3) - more, self.stop))

    def alone(self) -> dict[str, list[int]]:
        """Return the last of them, an even number and an odd one: a program may go another way for each."""
        found = {"alone": self.last()}
        return found if len(found["alone"]) + 1 >= self.rows else {**found, "alone, one more": self.last(1)}


class SideBySide:
    """Compares rows of a call once, where that has to be done: after the first part of several rows.

    Args:
        call: the call, whose rows have been followed where they can be.
    """

    def __init__(self, call: WatchedCall) -> None:
        self._call = call
        self._comparison: Comparison | None = None
        self._is_asked, self._most = False, 0

    @property
    def unsettled(self) -> str | None:
        """Why rows that ran may not be those of the whole call: they are still to be compared. None where they need not be."""
        if self._comparison is None or self._most:
            return None
        return f"whether they look at others is not known: {self._comparison.why}"

    def why_not_apart(self, given: Any, start: int, stop: int) -> str | None:
        """Return why a part's rows cannot stand for those of the whole call; None where they can, or several are still to come.

        Args:
            given: what the part gave.
            start: its first row.
            stop: the row behind its last.

        Raises what a run of these rows raises for memory.
        """
        if not self._is_asked:
            self._comparison, self._is_asked = self._call.comparison(), True
        comparison = self._comparison
        if comparison is None:
            return None
        part = Part(start, stop, self._call.rows)
        if part.rows >= max(2, _AGAIN * self._most):
            self._most = part.rows
            why = _with_room(comparison, given if comparison.gives_result else None, part)
            if why is None:
                comparison.passed()
            return why and f"{why}; {comparison.why}"
        if stop == part.total and not self._most:
            return (
                f"whether its rows look at each other cannot be told: {comparison.why}, and no two of them fit together"
            )
        return None


def _with_room(comparison: Comparison, given: Any, part: Part) -> str | None:
    """Compare a part's rows; half as many of them where there is no room for all beside what the part gave."""
    while True:
        try:
            return _why_not_apart(comparison, given, part)
        except Exception as error:
            if not may_be_oom(error) or part.rows < _FEWEST:
                raise
        given, part = None, Part(part.start, part.start + part.rows // 2, part.total)


def _why_not_apart(comparison: Comparison, given: Any, part: Part) -> str | None:
    generators = Generators.now()
    rows = list(range(part.start, part.stop))
    others = [(f"beside others {number}", order) for number, order in enumerate(part.beside_others())]
    runs = [("again", rows), *others, *part.alone().items()]
    found = {} if given is None else {"part": _on_host(given)}
    held: list[Mapping[str, Any]] = []
    for name, order in runs:
        generators.put_back()
        result, error = run_guarded(comparison.seen, (order,), {})
        generators.put_back()
        if error is not None and may_be_oom(error):
            try:
                raise error
            finally:
                del error  # with this frame it would be a cycle that keeps its tensors until a collection
        if error is not None:
            return f"{_rows(name)} raised {type(error).__name__}: {error}"
        found[name] = _on_host(result)
        del result
        held.append(comparison.held())
    for other in held[1:]:
        if (place := _first_difference(held[0], other)) is not None:
            return f"each call leaves something else in {place}"
    return _compared(found, part)


def _on_host(result: Any) -> dict[str, Any]:
    """Return the tensors of a result by name, on the host."""
    with torch_memory.on_host():
        return {name: leaf.detach().to("cpu", copy=True) for name, leaf in named(result, "its result") if leaf.dim()}


def _compared(found: Mapping[str, Mapping[str, Any]], part: Part) -> str | None:
    """Compare the rows of several runs with those of the first."""
    few, first = len(part.last()), found.get("part", found["again"])
    if not first:
        return "nothing of what it gives can be compared"
    for name, leaf in first.items():
        again, alone = found["again"].get(name), found["alone"].get(name)
        others = [run.get(name) for how, run in found.items() if how.startswith("beside others")]
        is_there = again is not None and alone is not None and all(other is not None for other in others)
        axis = _axis(leaf, alone, part.rows, few) if is_there else None
        if axis is None and alone is not None:
            shapes = f"{tuple(leaf.shape)} for {part.rows} rows and {tuple(alone.shape)} for {few} of them"
            return f"{name} is {shapes}: {_ITS_SIZE}"
        if axis is None:
            return f"{name} is not there for {few} of {part.rows} rows"
        if axis < 0:
            continue
        of_rows = _by_row(leaf, axis, part.rows)
        for how, one, other, ratio in (
            ("again", of_rows, _by_row(again, axis, part.rows), _same_ratio(leaf)),
            *(
                ("beside others", of_rows[1::2], _by_row(beside, axis, part.rows)[1::2], _same_ratio(leaf))
                for beside in others
            ),
            *(
                (
                    how,
                    of_rows[part.rows - len(order) :],
                    _by_row(found[how][name], axis, len(order)),
                    _alone_ratio(leaf),
                )
                for how, order in part.alone().items()
                if name in found[how]
            ),
        ):
            off, scale = _farthest(one, other)
            if off > ratio * scale:
                return f"{_rows(how)} come out otherwise: {name} differs by {off:.2g} of {scale:.2g}"
    return None


def _rows(how: str) -> str:
    told = {"again": "the same rows, run again,", "alone": "rows by themselves"}
    return told.get(how.partition(",")[0], "rows beside other rows")


def _axis(leaf: Any, few: Any, rows: int, fewer: int) -> int | None:
    """Return the axis of the rows; -1 where the shape does not count them, None where it differs otherwise."""
    if leaf.dim() != few.dim():
        return None
    other = [axis for axis in range(leaf.dim()) if leaf.shape[axis] != few.shape[axis]]
    if not other:
        return -1
    if len(other) > 1 or leaf.shape[other[0]] * fewer != few.shape[other[0]] * rows:
        return None
    return other[0]


def _by_row(tensor: Any, axis: int, rows: int) -> Any:
    """Return a tensor with the rows first, each with all its entries; as it is where it has another number of rows."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(rows, -1) if moved.shape[0] % rows == 0 else moved


def _farthest(one: Any, other: Any) -> tuple[float, float]:
    """Return how far two tensors are apart, and the largest number in them."""
    import torch

    if one.shape != other.shape:
        return float("inf"), 1.0
    if not one.numel():
        return 0.0, 1.0
    if not one.dtype.is_floating_point:
        return (0.0 if torch.equal(one, other) else float("inf")), 1.0
    one, other = one.double(), other.double()
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return float("inf"), 1.0
    if not finite.any():
        return 0.0, 1.0
    return float((one - other)[finite].abs().max()), max(_LEAST, float(one[finite].abs().max()))


def _same_ratio(tensor: Any) -> float:
    import torch

    if not tensor.dtype.is_floating_point:
        return 0.0
    return float(torch.finfo(tensor.dtype).eps * _SAME_EPS.get(str(tensor.dtype), 1.0))


def _alone_ratio(tensor: Any) -> float:
    import torch

    ratio = _ALONE_RATIO.get(str(tensor.dtype), 0.0)
    is_rounded = torch.cuda.is_initialized() and torch.get_float32_matmul_precision() != "highest"
    return max(ratio, _TF32_RATIO) if ratio and is_rounded else ratio


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    names = (*one, *other)
    return next((name for name in names if name not in one or name not in other or one[name] != other[name]), None)
