"""What Trainer keeps of the batches that it has evaluated: on the device until the last one, unless ``eval_accumulation_steps`` is set.

It hands them out as arrays on the host, so that they may wait there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.engines.protocol import Handler
from oomguard.facts import FactValue
from oomguard.observe import torch_memory

# Module, and the method that adds a batch's results to those before it.
KEEPS: Final = ("transformers.trainer_pt_utils", "EvalLoopContainer.add")
_MOVES: Final = "to_cpu_and_numpy"
# What holds results, and the thread that adds to it: another one's may be in the middle of that.
_kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class AddedResults:
    """Results of one batch, added to those before them: no call of a model, and run whole."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    model: None = None
    rows: int = 1
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    not_splittable: str = "the results of all batches are kept together: set eval_accumulation_steps"
    estimated_row_bytes: int | None = None
    waits_on_host: bool = False
    may_train: bool = False
    pad_value: int | None = None
    puts_back: Collection[str] = ()
    phase: str | None = None
    weigh: Callable[[Any, int, int], float | None] | None = None
    several: Collection[int] = ()
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, container: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AddedResults:
        """Read a call."""
        del container
        return cls(args, kwargs)

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments: there is one row."""
        del start, stop
        return self.args, dict(self.kwargs)

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return nothing to enter."""
        del start, stop
        return nullcontext()

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why nothing of it is done another way."""
        del changes, failed_in
        return "there is no prompt"

    def problem(self, part: Any, rows: int) -> None:
        """Return nothing: it is run whole."""
        del part, rows

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a result as it is: nothing was left out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result as it is put together."""
        del place
        return result


def added(
    often: Handler, wrapped: Callable[..., Any], container: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Have results added, and note what holds them."""
    _kept[container] = threading.get_ident()
    return often(AddedResults.of, wrapped, container, args, kwargs)


def held_bytes() -> int:
    """Return the bytes on the device of the results that this thread's evaluations keep."""
    import torch
    from torch.utils._pytree import tree_leaves

    kept = (leaf for container in _own() for leaf in tree_leaves(container.tensors) if isinstance(leaf, torch.Tensor))
    return sum(tensor.nbytes for tensor in kept if torch_memory.counts(tensor))


def move_to_host() -> None:
    """Move these results to the host, as ``eval_accumulation_steps`` does; raise MemoryError where that has no room."""
    import torch
    from torch.utils._pytree import tree_map_only

    for container in _own():
        with torch_memory.on_host():
            container.tensors = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to("cpu", copy=True), container.tensors
            )
            getattr(container, _MOVES)()


def _own() -> list[Any]:
    thread = threading.get_ident()
    return [container for container, of in list(_kept.items()) if of == thread and hasattr(container, _MOVES)]
