"""Calls whose rows are compared with each other: what runs some of them, and what of a run is compared."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.transformers.call_kind import kind_compared
from oomguard.engines.transformers.followed import why_not_followed
from oomguard.engines.transformers.kept_outside import KeptOutside
from oomguard.engines.transformers.own_code import own_code
from oomguard.observe import torch_memory

# Of a generation: the prefill, and one step on the cache.
_STEPS: Final = 2
# Larger tensors on a model are told by their sums.
_MOST_BYTES: Final = 1 << 20
# What was compared, by the model and the kind of call.
_passed: Final[weakref.WeakKeyDictionary[Any, set[Any]]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


@dataclass(slots=True)
class RowsCompared:
    """A call whose rows are compared.

    Attributes:
        model: its model.
        why: why nothing else tells that they do not look at each other.
        gives_result: whether ``run`` gives what a part gives.
        run: runs rows by their numbers, and returns what is compared of them.
        key: what makes another call one of the same kind.
        outside: what the code keeps outside of the model; None where following the call has told of that.
    """

    model: Any
    why: str
    gives_result: bool
    run: Callable[[Sequence[int]], Any]
    key: Any
    outside: KeptOutside | None
    asked: int = 0

    def seen(self, order: Sequence[int]) -> Any:
        """Run the rows of these numbers, and return what is compared of them."""
        return self.run(order)

    def held(self) -> Mapping[str, Any]:
        """Return what a call has left beside its result, by where."""
        if self.outside is None:
            return {}
        self.asked += 1
        changed = self.outside.changed()
        with torch_memory.on_host():
            found = dict(_held(self.model))
        return found if changed is None else {**found, changed: self.asked}

    def passed(self) -> None:
        """Note that the rows do not look at each other."""
        with _lock:
            _passed.setdefault(self.model, set()).add(self.key)


def compared(
    model: Any,
    arguments: Mapping[str, Any],
    run: Callable[[Sequence[int]], Any],
    *,
    gives_result: bool,
    unlisted: str | None = None,
) -> RowsCompared | None:
    """Return a call to be compared; None where its code is a library's and was followed, or a call of its kind was compared.

    Args:
        model: its model.
        arguments: its arguments by name.
        run: runs rows by their numbers.
        gives_result: whether that gives what a part gives.
        unlisted: what their names do not tell of the arguments, so that it is compared in any case; None: they tell all.
    """
    failed = why_not_followed(model)
    own = own_code(model)
    if failed is None and own is None and unlisted is None:
        return None
    key = kind_compared(model, arguments)
    with _lock:
        if key in _passed.get(model, ()):
            return None
    why = unlisted or f"{own} is no library's code"
    if failed is not None:
        why = f"its code cannot be followed ({failed[:120]})"
    return RowsCompared(model, why, gives_result, run, key, None if failed is None else KeptOutside(model, arguments))


def generation_compared(
    model: Any, arguments: Mapping[str, Any], of_rows: Collection[str], *, draws: bool, unlisted: str | None = None
) -> RowsCompared | None:
    """Return a generation to be compared, by the scores of its first steps; None as ``compared`` does.

    Args:
        model: its model.
        arguments: its arguments by name, without functions of the user's own.
        of_rows: the names of those with one entry a row.
        draws: whether tokens are drawn: those of fewer rows are others, so that only the first step is compared.
        unlisted: as of ``compared``.
    """

    def run(order: Sequence[int]) -> Any:
        cut = {name: _at(value, order) if name in of_rows else value for name, value in arguments.items()}
        return _first_scores(model, cut, 1 if draws else _STEPS)

    return compared(model, arguments, run, gives_result=False, unlisted=unlisted)


def _at(value: Any, order: Sequence[int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [value[row] for row in order]
    return value if value is None or isinstance(value, str) else value[list(order)]  # one text for all rows


def _first_scores(model: Any, arguments: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the scores of the last token at the first steps of a generation."""
    from oomguard.memory.generate.follow_rows import first_steps

    found: dict[str, Any] = {}

    def note(_module: Any, _given: Any, output: Any) -> None:
        logits: Any = getattr(output, "logits", None)
        if getattr(logits, "ndim", 0) == 3:
            found[f"scores {len(found)}"] = logits[:, -1].clone()

    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "generate") and hasattr(module, "config"):
                stack.callback(module.register_forward_hook(note).remove)
        first_steps(model, arguments, steps)
    return found


def _held(model: Any) -> Iterator[tuple[str, Any]]:
    from oomguard.memory.generate.left_behind import held_by, told

    for place, value in held_by(model, lambda module: True).items():
        if hasattr(value, "setflags"):
            yield told(place), (value.shape, repr(value) if value.dtype.hasobject else value.tobytes())
        elif not hasattr(value, "untyped_storage"):
            yield told(place) + (" (entries)" if place[-1] == "len" else ""), value
        elif value.nbytes <= _MOST_BYTES and not value.is_meta:
            yield told(place), (tuple(value.shape), value.detach().cpu().float().numpy().tobytes())
        else:
            yield told(place), (tuple(value.shape), str(value.detach().sum()))
