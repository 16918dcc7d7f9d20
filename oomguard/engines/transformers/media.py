"""Images and videos of a batch that stand one after the other, whichever rows they belong to: cut with the rows of their tokens."""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_DATA: Final = Path(__file__).with_name("media.toml")
_PIXEL_AXES: Final = 4
_TOWERS: Final = "no token stands for it, and a model of two towers holds every image against every text"


@functools.cache
def _kinds() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads(_DATA.read_text())["kind"])


@dataclass(frozen=True, slots=True)
class Media:
    """Whose each entry of some arguments is: ``starts`` has, by argument, where the entries of each row begin, and their end."""

    starts: Mapping[str, tuple[int, ...]]

    def part(self, arguments: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the arguments that rows ``start`` to ``stop`` have; what none of them has is None, as where it is not given."""
        cut = {}
        for name, starts in self.starts.items():
            first, last = starts[start], starts[stop]
            cut[name] = arguments[name][first:last] if last > first else None
        return cut


def media_of(model: Any, arguments: Mapping[str, Any], ids: Any) -> Media | str:
    """Return whose the media of a call are, none where it has none; a text says why that cannot be told."""
    starts: dict[str, tuple[int, ...]] = {}
    for kind in _kinds():
        name = kind["values"]
        if arguments.get(name) is None:
            continue
        found = _starts(kind, getattr(model, "config", None), arguments, ids)
        if isinstance(found, str):
            return f"the argument {name} is not known to belong to the text row by row: {found}"
        starts.update(found)
    return Media(starts)


def _starts(
    kind: Mapping[str, Any], config: Any, arguments: Mapping[str, Any], ids: Any
) -> dict[str, tuple[int, ...]] | str:
    values, grid = arguments[kind["values"]], arguments.get(kind["grid"])
    if not all(hasattr(value, "untyped_storage") for value in (values, grid) if value is not None):
        return "it is no tensor"
    token = next((t for name in kind["token"] if isinstance(t := getattr(config, name, None), int)), None)
    if token is None or getattr(ids, "ndim", 0) != 2 or ids.dtype.is_floating_point:
        return _why_no_token(config, values, ids)
    own = [int(count) for count in (ids == token).sum(1).tolist()]
    if grid is None:
        each = _tokens_of_each(values, sum(own))
        patches = None
    else:
        merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        patches = [t * height * width for t, height, width in grid.tolist()]
        if not merged or sum(patches) != values.shape[0]:
            return f"{kind['grid']} does not count it"
        each = [count // merged**2 for count in patches]
    numbers = None if each is None else _numbers_by_row(own, each)
    if numbers is None:
        return "its tokens do not count it"
    if patches is None:
        return {kind["values"]: numbers}
    ends = (0, *itertools.accumulate(patches))
    return {kind["values"]: tuple(ends[number] for number in numbers), kind["grid"]: numbers}


def _why_no_token(config: Any, values: Any, ids: Any) -> str:
    texts = ids.shape[0] if getattr(ids, "ndim", 0) else None
    if texts is not None and values.ndim and texts != values.shape[0]:
        return f"no token stands for it, and {texts} texts stand beside {values.shape[0]} images"
    has_towers = all(getattr(config, name, None) is not None for name in ("text_config", "vision_config"))
    return _TOWERS if has_towers else "no token stands for it"


def _tokens_of_each(values: Any, tokens: int) -> list[int] | None:
    """Return the tokens of each image where all have as many; None where they have not."""
    if values.ndim != _PIXEL_AXES or not tokens or tokens % values.shape[0]:
        return None
    return [tokens // values.shape[0]] * values.shape[0]


def _numbers_by_row(own: list[int], each: list[int]) -> tuple[int, ...] | None:
    """Return the number of the first image of each row, and of all; None where a row has no whole number of them."""
    numbers, number = [0], 0
    for tokens in own:
        left = tokens
        while left > 0 and number < len(each):
            left -= each[number]
            number += 1
        if left:
            return None
        numbers.append(number)
    return tuple(numbers) if number == len(each) else None
