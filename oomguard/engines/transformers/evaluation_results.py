"""Find and move the results that Trainer keeps on the device during an evaluation.

Trainer keeps them until the last batch, unless ``eval_accumulation_steps`` is set. It returns them
as arrays on the host, so they may move there earlier.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.protocol import Handler
from oomguard.probe import torch_memory

_MOVES: Final = "to_cpu_and_numpy"
# Containers of results, each with the thread that fills it; only that thread may move them.
_kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class AddedResults:
    """The call that adds one batch's results to the earlier ones; it is never split."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    model: None = None
    rows: int = 1
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    not_splittable: str = (
        "Trainer collects the results of all batches on the device: set eval_accumulation_steps"
    )
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
        """Return all arguments: there is only one row."""
        del start, stop
        return self.args, dict(self.kwargs)

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return an empty context."""
        del start, stop
        return nullcontext()

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why the call has no variants."""
        del changes, failed_in
        return "the call has no prompt"

    def problem(self, part: Any, rows: int) -> None:
        """Return None: the call is not split."""
        del part, rows

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the result: no variant left anything out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the joined result."""
        del place
        return result


def add_results(
    often: Handler,
    wrapped: Callable[..., Any],
    container: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Add a batch's results, and remember their container."""
    _kept[container] = threading.get_ident()
    return often(AddedResults.of, wrapped, container, args, kwargs)


def held_bytes() -> int:
    """Return the device bytes of results that this thread's evaluations keep."""
    import torch
    from torch.utils._pytree import tree_leaves

    kept = (
        leaf
        for container in _own()
        for leaf in tree_leaves(container.tensors)
        if isinstance(leaf, torch.Tensor)
    )
    return sum(tensor.nbytes for tensor in kept if torch_memory.counts(tensor))


def move_to_host() -> None:
    """Move these results to the host, as ``eval_accumulation_steps`` does.

    Raises:
        MemoryError: they do not fit there.
    """
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
    return [
        container
        for container, of in list(_kept.items())
        if of == thread and hasattr(container, _MOVES)
    ]
