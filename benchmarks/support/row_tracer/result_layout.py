"""Where the rows are in what a call gives: told by a trace whose number of rows is a prime.

Knows no torch: whatever has an ``untyped_storage`` is a tensor here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a result by their names, ``its result['logits']``.

    Attributes:
        axes: the axis that holds the rows, and how many entries each row has there.
        without: names of those in which no axis does, or several, with their shapes.
        numbers: names of those that are one number.
    """

    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    without: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()


def layout_of(result: Any, rows: int) -> Layout:
    """Return where the rows are in the result of a call of ``rows`` rows, which divides no other
    size in it.
    """
    axes: dict[str, tuple[int, int]] = {}
    without: dict[str, tuple[int, ...]] = {}
    numbers: list[str] = []
    for name, tensor in named(result, "its result"):
        shape = tuple(tensor.shape)
        found = [axis for axis, size in enumerate(shape) if size and size % rows == 0]
        if not shape:
            numbers.append(name)
        elif len(found) == 1 and not getattr(tensor, "_oomguard_of_other_order", False):
            axes[name] = found[0], shape[found[0]] // rows
        elif shape != (0,):
            without[name] = shape
    return Layout(axes, without, tuple(numbers))


def named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a result, with names as guarding/fields.py gives them; what else it
    holds is passed over.
    """
    if hasattr(value, "untyped_storage"):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from named(entry, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from named(entry, f"{name}[{number}]")
