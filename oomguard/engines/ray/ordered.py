"""Batches over a cluster: results in the order of the batches, a few ahead of the one that is waited for, no batch lost with its worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")
# So many batches a CPU are handed out at once: while one is worked on, the next is there already.
_AHEAD: Final = 2
# Finished results wait for an earlier one: for so many batches a CPU at most.
_KEPT: Final = 6


def in_order(
    ray: Any, function: Callable[..., list[R]], common: object, batches: Sequence[Sequence[T]], at_once: int
) -> Generator[list[R | str]]:
    """Yield what ``function(common, batch)`` returns for each batch, in their order: a result for each entry of a batch.

    A batch whose worker dies is worked on again entry by entry, so that one entry costs no other; of an entry that ends its worker by
    itself the result is the reason, as text. What the function raises is raised.

    Args:
        ray: the connected ``ray`` module.
        function: a function of a module that the workers have too.
        common: its first argument, sent to each node once.
        batches: the second arguments.
        at_once: how many batches are worked on at the same time.
    """
    task = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(function)
    shared = ray.put(common)
    waiting = deque(range(len(batches)))
    running: dict[Any, int] = {}
    done: dict[int, list[R | str]] = {}
    turn = 0
    try:
        while turn < len(batches):
            while waiting and len(running) < _AHEAD * at_once and waiting[0] < turn + _KEPT * at_once:
                index = waiting.popleft()
                running[task.remote(shared, batches[index])] = index
            if turn in done:
                yield done.pop(turn)
                turn += 1
                continue
            ready, _ = ray.wait(list(running), num_returns=1)
            index = running.pop(ready[0])
            done[index] = _result(ray, task, shared, batches[index], ready[0])
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _result(ray: Any, task: Any, shared: Any, batch: Sequence[Any], reference: Any) -> list[Any]:
    try:
        return list(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        if len(batch) == 1:
            return [_how(error)]
    # One after the other: the entry that ended a worker of many may take a whole node's memory.
    found: list[Any] = []
    for entry in batch:
        found += _result(ray, task, shared, [entry], task.remote(shared, [entry]))
    return found


def _how(error: BaseException) -> str:
    kinds = {"OutOfMemoryError": "was killed by Ray's memory monitor", "NodeDiedError": "was lost with its node"}
    return f"the Ray worker that read it {kinds.get(type(error).__name__, 'died')}"
