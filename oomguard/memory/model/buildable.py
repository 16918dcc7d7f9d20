"""Whether a configuration may be built: transformers makes a module, a name or a row for all that a stranger's file counts.

It has no limit of its own, and ten billion layers are a list of ten billion names before anything says that they are absurd.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

# What is made one by one, by the names of fields; widths and lengths in tokens are not.
_MADE: Final = re.compile(r"layer|depth|block|stage|expert|head|level|branch|codebook|stack|^n_|^num_")
_WIDTH: Final = re.compile(
    r"size|dim|width|token|length|positions|ctx|embd|embed|inner|vocab|channels|patch|_ids?$|params|parameters"
)
_MOST_MADE: Final = 2048
# The layers of a mixture by its experts: the largest that are published have some 25 thousand.
_MOST_EXPERTS: Final = 100_000
_LAYERS: Final = re.compile(r"layers?$|^depth$")
_EXPERTS: Final = re.compile(r"experts$")
# No width, vocabulary or length in tokens comes near; bases of rotary positions do.
_MOST: Final = 1 << 28
_BASE: Final = re.compile(r"theta|base")


def is_buildable(config: Mapping[str, Any]) -> bool:
    """Whether nothing in a configuration makes building it endless."""
    layers = experts = 1
    for name, value in _numbers(config):
        if not abs(value) < _MOST and not _BASE.search(name):
            return False
        if _MADE.search(name) and not _WIDTH.search(name) and value > _MOST_MADE:
            return False
        if _LAYERS.search(name):
            layers = max(layers, round(value))
        if _EXPERTS.search(name):
            experts = max(experts, round(value))
    return layers * experts <= _MOST_EXPERTS


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield each finite number at any depth with the name of the field that it stands in, or in a list of."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, list):
            left += ((name, inner) for inner in value)
        elif isinstance(value, int) or (isinstance(value, float) and abs(value) < float("inf")):
            yield str(name), value
