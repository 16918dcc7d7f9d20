"""A failed allocation as a product of known numbers: which of vLLM's tensors has just that many bytes.

An exact count of bytes that is a product of the settings in force and the model's numbers is hardly ever one by chance; a
rounded figure may be. How sure a name is follows from how many other products would have matched as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from oomguard.facts import GIB, MIB
from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("allocations.toml")
_DTYPE: Final = "dtype"
# vLLM pads the vocabulary to whole multiples of this.
_VOCABULARY_MULTIPLE: Final = 64
# torch's caching allocator asks the device for whole multiples of this, and prints what it asks for.
_GRANULE_BYTES: Final = 2 * MIB
# More matches than this by chance, and a match says nothing.
_MOST_BY_CHANCE: Final = 0.5
# A size whose odd part is not well above this is too round to tell anything, unless it is larger than tensors mostly are.
_ROUND_BELOW: Final = 4
# What the engine was doing agrees by chance no more often than this.
_PHASE_AGREES: Final = 0.25
MOST_SURE: Final = 0.99
_FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Allocation:
    """One row of the data file: what vLLM allocates in one piece; its keys are explained there."""

    name: str
    what: str
    factors: tuple[tuple[str, ...], ...]
    up_to: tuple[str, ...]
    follows: Mapping[str, list[str]]
    element: tuple[Any, ...]
    together: int | None
    times: int
    phases: frozenset[str]
    only_on_host: bool
    told_by: frozenset[str]
    levers: Mapping[str, Mapping[str, Any]]
    needs: str | None
    of_request: bool
    only_there: bool
    source: str


@dataclass(frozen=True, slots=True)
class Product:
    """A product that has the bytes asked for.

    Attributes:
        allocation: the row it is of.
        numbers: its factors by name, the free one as ``tokens``.
        element_bytes: bytes of an element.
    """

    allocation: Allocation
    numbers: Mapping[str, int]
    element_bytes: int

    @property
    def bytes(self) -> int:
        """The bytes of the tensor."""
        return self.allocation.times * math.prod(self.numbers.values()) * self.element_bytes

    def __str__(self) -> str:
        named = " x ".join(f"{value} {name}" for name, value in self.numbers.items())
        times = f"{self.allocation.times} x " if self.allocation.times > 1 else ""
        return f"{times}{named} x {self.element_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Named:
    """The allocation that the bytes tell, and how sure that is: 0 to 0.99."""

    product: Product
    sure: float


@dataclass(slots=True)
class _Search:
    """What is looked for, and what was found: ``chance`` is how many products match a random size of this magnitude.

    A round size is matched by chance whatever else is: settings and widths are mostly powers of two.
    """

    tried_bytes: int
    slack_bytes: float
    numbers: Mapping[str, int]
    phase: str = "unknown"
    found: list[Product] = field(default_factory=list)
    chance: float = 0.0

    @property
    def window_bytes(self) -> float:
        """How many sizes would be printed as this one."""
        return 1.0 if not self.slack_bytes else 2 * self.slack_bytes + _GRANULE_BYTES

    def by_chance(self, product: Product) -> float:
        """Return how many products match this one's size by chance, fewer where the engine was doing what it is made for."""
        size = product.bytes
        odd = size // (size & -size)
        agrees = _PHASE_AGREES if self.phase in product.allocation.phases else 1.0
        return max(self.chance, min(1.0, _ROUND_BELOW / odd) * min(1.0, GIB / size) * agrees)

    def is_it(self, size: float) -> bool:
        """Whether a tensor of this size is printed as what was asked for."""
        if not self.slack_bytes:
            return size == self.tried_bytes
        return self.tried_bytes - self.slack_bytes - _GRANULE_BYTES <= size <= self.tried_bytes + self.slack_bytes


@cache
def allocations() -> tuple[Allocation, ...]:
    """Return the rows of the data file."""
    rows = next(iter(read_tables("allocations", [_FILE]).values()))["allocation"]
    return tuple(
        Allocation(
            row["name"],
            row["what"],
            tuple((one,) if isinstance(one, str) else tuple(one) for one in row["factors"]),
            tuple(row.get("up_to", ())),
            row.get("follows", {}),
            tuple(row["element"]),
            row.get("together"),
            row.get("times", 1),
            frozenset(row["phases"]),
            row.get("on") == "host",
            frozenset(row.get("told_by", ())),
            row.get("levers", {}),
            row.get("needs"),
            row.get("of_request", False),
            row.get("only_there", False),
            row["source"],
        )
        for row in rows
    )


def name_allocation(
    tried_bytes: int,
    slack_bytes: float,
    numbers: Mapping[str, int],
    phase: str = "unknown",
    *,
    on_host: bool = True,
) -> Named | None:
    """Return the one allocation that has the bytes asked for, None where none or too many may have them.

    Args:
        tried_bytes: what the failed allocation asked for.
        slack_bytes: half of its last printed digit; 0 where the bytes are exact.
        numbers: the settings in force and the model's numbers by name; ``ranks`` for those that share a matrix.
        phase: what the engine was doing; it decides where several rows have the same bytes.
        on_host: whether the host's memory ran out; what is only there is never named for a device.
    """
    search = _Search(tried_bytes, slack_bytes, numbers, phase)
    for row in allocations():
        is_there = not row.only_there or phase in row.phases
        if is_there and (row.needs is None or row.needs in numbers) and (on_host or not row.only_on_host):
            _try(row, search)
    there = [product for product in search.found if phase in product.allocation.phases] or search.found
    chance = max((search.by_chance(product) for product in there), default=1.0)
    if not there or chance > _MOST_BY_CHANCE:
        return None
    # The first row of the file that matches; each other name that matches as well makes it as unsure again.
    names = {product.allocation.name for product in there}
    return Named(there[0], min(MOST_SURE, 1 / len(names) / (1 + chance)))


def allocation_told_by(tried_bytes: float, numbers: Mapping[str, int], told: Collection[str]) -> Product | None:
    """Return what was made where the kind of failure or the traceback's place tells it; None where neither does.

    A free factor is what the bytes come nearest to, in float32.
    """
    row = next((one for one in allocations() if one.told_by & set(told)), None)
    if row is None or not all(names[0] in numbers for names in row.factors):
        return None
    known = {names[0]: numbers[names[0]] for names in row.factors}
    if not row.up_to:
        return Product(row, known, _FLOAT32_BYTES)
    most = _most(row, numbers)
    if most is None:
        return None
    nearest = round(tried_bytes / (math.prod(known.values()) * _FLOAT32_BYTES))
    return Product(row, {"tokens": max(1, min(nearest, most)), **known}, _FLOAT32_BYTES)


def _most(row: Allocation, numbers: Mapping[str, int]) -> int | None:
    """Return the largest number that a row's free factor may be; None where the setting that decides it is not known."""
    return min(numbers[name] for name in row.up_to if name in numbers) if row.up_to[0] in numbers else None


def _try(row: Allocation, search: _Search) -> None:
    dtype = search.numbers.get(_DTYPE)
    elements = dict.fromkeys(dtype if each == _DTYPE else each for each in row.element)
    for names in itertools.product(*row.factors):
        if not set(names) <= search.numbers.keys():
            continue
        for values in itertools.product(*(_values(name, search.numbers) for name in names)):
            unit = row.times * math.prod(values)
            for element in (each for each in elements if each):
                known = dict(zip(names, values, strict=True))
                _match(row, known, unit * element, element, search)


def _match(row: Allocation, known: dict[str, int], unit_bytes: int, element: int, search: _Search) -> None:
    """Add the product if it has the bytes; with a free factor also where a whole number of units has them."""
    if not row.up_to:
        search.chance += search.window_bytes / search.tried_bytes
        if search.is_it(unit_bytes):
            search.found.append(Product(row, known, element))
        return
    most = _most(row, search.numbers)
    if most is None:
        return
    if search.slack_bytes:  # of a rounded figure only the full step can be told
        search.chance += search.window_bytes / search.tried_bytes
        if search.is_it(unit_bytes * most):
            search.found.append(Product(row, {"tokens": most, **known}, element))
        return
    search.chance += 1 / unit_bytes
    tokens, rest = divmod(search.tried_bytes, unit_bytes)
    if rest == 0 and 0 < tokens <= most:
        search.found.append(Product(row, {"tokens": tokens, **known}, element))


def _values(name: str, numbers: Mapping[str, int]) -> Iterator[int]:
    """Yield what a number may be in a tensor: itself, padded, and one rank's share of it."""
    value, ranks = numbers[name], numbers.get("ranks", 1)
    whole = [value]
    if name == "vocabulary" and value % _VOCABULARY_MULTIPLE:
        whole.append(-(-value // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE)
    yield from whole
    if ranks > 1 and name in _OF_THE_MODEL:
        yield from (one // ranks for one in whole if one % ranks == 0)


# The numbers of a matrix that ranks may share.
_OF_THE_MODEL: Final = frozenset(
    {
        "vocabulary",
        "queries",
        "keys",
        "mlp",
        "plain_mlp",
        "double_mlp",
        "fused_queries",
        "experts",
        "expert_mlp",
        "double_expert_mlp",
        "encoder_width",
        "encoder_mlp",
        "matrix",
    }
)
