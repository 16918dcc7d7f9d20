"""What a followed call leaves beside its result: on its model, and in the tensors that it was
given.

As fake_generate.py this imports torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from support.row_tracer.origin import Origin

if TYPE_CHECKING:
    from support.row_tracer.rows_together import RowsTogether

# A module's own book-keeping, and its weights, which no call sets anew.
_PASSED_OVER: Final = frozenset({"_parameters", "_buffers", "_modules"})
_DEEPEST: Final = 4
_MOST_ENTRIES: Final = 4096
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_MISSING: Final = object()

Place = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """What a call leaves.

    Attributes:
        of_rows: by module and attribute, tensors with one entry a row along their first axis.
        why_not: why the next call, or the user, would find something else after parts; None where
            nothing tells.
    """

    of_rows: tuple[tuple[str, str], ...] = ()
    why_not: str | None = None


def held_by(model: Any, looks_at: Callable[[Any], bool]) -> dict[Place, Any]:
    """Return what the modules of a model hold beside their weights, by where it is: tensors, plain
    values and numbers of entries.
    """
    found: dict[Place, Any] = {}
    seen = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        if not looks_at(module):
            continue
        for attribute, value in (*vars(module).items(), *module._buffers.items()):
            if attribute not in _PASSED_OVER and not attribute.endswith(
                ("_hooks", "_hooks_with_kwargs")
            ):
                found.update(_leaves((name, attribute), value, seen))
    return found


def _leaves(place: Place, value: Any, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, (torch.Tensor, *_PLAIN)) or _is_array(value):
        yield place, value
        if _is_array(value):
            yield (
                (*place, "numbers"),
                zlib.crc32(repr(value).encode() if value.dtype.hasobject else value.tobytes()),
            )
        return
    if len(place) > _DEEPEST or id(value) in seen:
        return
    if isinstance(value, (list, tuple, dict, set, frozenset)) or hasattr(value, "maxlen"):
        yield (*place, "len"), len(value)
    elif not hasattr(value, "__dict__") or isinstance(value, type) or callable(value):
        return
    seen = {*seen, id(value)}
    if isinstance(value, Mapping):
        entries: Any = list(value.items())
    elif isinstance(value, (set, frozenset)):
        return
    elif (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not hasattr(value, "__dict__")
    ):
        entries = list(enumerate(value))
    else:
        entries = list(vars(value).items())
    for key, entry in entries[:_MOST_ENTRIES]:
        yield from _leaves((*place, str(key)), entry, seen)


def changed(before: Mapping[Place, Any], after: Mapping[Place, Any]) -> dict[Place, Any]:
    """Return what is at other places, or another value, after a call; a value that is
    gone is None.
    """
    found = {
        place: value
        for place, value in after.items()
        if not _is_same(before.get(place, _MISSING), value)
    }
    return found | {place: None for place in before if place not in after}


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "setflags")


def _is_same(one: Any, other: Any) -> bool:
    if (
        isinstance(one, torch.Tensor)
        or isinstance(other, torch.Tensor)
        or _is_array(one)
        or _is_array(other)
    ):
        return one is other
    # no number is not itself
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124


def told(place: Place) -> str:
    """Return a place as a reason names it."""
    module, attribute, *inside = place
    inside = [each for each in inside if each not in ("len", "numbers")]
    if module:
        name = f"{module}.{attribute}"
    else:
        name = attribute
    return name + "".join(f"[{each}]" for each in inside)


def is_to_be_asked_again(
    new: Mapping[Place, Any], writes: Mapping[str, tuple[Origin, bool]]
) -> bool:
    """Return whether only another call tells if what one leaves is the same after each."""
    return bool(writes) or any(not isinstance(value, torch.Tensor) for value in new.values())


def left_by(
    mode: RowsTogether, new: Mapping[Place, Any], rows: int, again: Mapping[Place, Any]
) -> Left:
    """Return what a call of ``rows`` rows leaves.

    Args:
        mode: what followed it.
        new: what is other on its model than before.
        rows: the prime number of its rows.
        again: what is other once more after another call.
    """
    for name, (origin, depends) in mode.writes.items():
        if name.startswith("its argument"):
            return Left(
                why_not=(
                    f"the model writes to {name}: {origin.place}. The call that failed has done so "
                    "already"
                )
            )
        if depends:
            return Left(why_not=f"the call changes {name} of the model by its rows: {origin.place}")
    of_rows: list[tuple[str, str]] = []
    for place, value in new.items():
        if isinstance(value, torch.Tensor):
            if not mode.of_rows(value) and all(size % rows for size in value.shape):
                continue
            is_row_by_row = [size % rows == 0 for size in value.shape].count(
                True
            ) == 1 and value.shape[0] == rows
            if (
                len(place) > 2
                or not is_row_by_row
                or getattr(value, "_oomguard_of_other_order", False)
            ):
                return Left(
                    why_not=(
                        f"the call leaves {told(place)} on the model, which depends on all its rows"
                    )
                )
            of_rows.append((place[0], place[1]))
        elif (why := _why_whole(value, rows)) is not None:
            return Left(why_not=f"the call leaves {told(place)} on the model, {why}")
        elif place in again and not isinstance(again[place], torch.Tensor):
            return Left(why_not=f"each call changes {told(place)} of the model")
    return Left(tuple(of_rows))


def _why_whole(value: Any, rows: int) -> str | None:
    """Return why parts leave another value than the whole call; None where nothing tells."""
    if _is_array(value):
        return "an array of numpy"
    counts = not isinstance(value, bool) and isinstance(value, int) and value and value % rows == 0
    if counts:
        return "which counts its rows"
    return None
