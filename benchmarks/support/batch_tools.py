"""The guard and its peers on one case: a call of rows on a device on which they do not all fit at
once.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any, Protocol


class Trial(Protocol):
    """One case on its device: ``call`` makes the call for some of its rows; its model's weights are
    on the device.
    """

    capacity: int
    rows: int

    def call(self, start: int = 0, stop: int | None = None) -> Any:
        """Make the call for rows ``start`` to ``stop``."""

    def device(self, capacity: int) -> contextlib.AbstractContextManager[Any]:
        """Return a device of that many bytes."""


@contextlib.contextmanager
def device_with(model: Any, capacity: int) -> Iterator[Any]:
    """A device with a model's weights on it."""
    from oomguard.testing import limit_memory

    with limit_memory(capacity) as device:
        device.adopt([*model.parameters(), *model.buffers()])
        yield device


def weights_bytes(model: Any) -> int:
    """Return the bytes of a model's weights, those that are shared once."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def largest(fits: Any, rows: int) -> int:
    """Return the largest number up to ``rows`` that ``fits``, 0 where not one does."""
    low = 0
    high = rows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def with_oomguard(trial: Trial) -> tuple[int, int]:
    """Make the whole call under a guard; return its failed attempts, and the rows of
    the last one.
    """
    import oomguard

    with trial.device(trial.capacity), oomguard.guard() as g:
        trial.call()
    return len(g.attempts) - 1, g.attempts[-1].settings["batch_size"]


def with_accelerate(trial: Trial) -> tuple[int, int]:
    """The same with ``find_executable_batch_size``."""
    from accelerate.utils import find_executable_batch_size

    sizes: list[int] = []
    with trial.device(trial.capacity):
        find_executable_batch_size(
            lambda batch_size: _in_chunks(trial, batch_size, sizes), starting_batch_size=trial.rows
        )()
    return len(sizes) - 1, sizes[-1]


def with_torch_max_mem(trial: Trial) -> tuple[int, int]:
    """The same with ``MemoryUtilizationMaximizer``."""
    from torch_max_mem import MemoryUtilizationMaximizer

    sizes: list[int] = []

    def run(batch_size: int) -> list[Any]:
        return _in_chunks(trial, batch_size, sizes)

    # q=1: without it sizes are whole multiples of 32, and most cases have fewer rows.
    with trial.device(trial.capacity):
        MemoryUtilizationMaximizer(parameter_name="batch_size", q=1, safe_devices={"cpu", "cuda"})(
            run
        )(batch_size=trial.rows)
    return len(sizes) - 1, sizes[-1]


def _in_chunks(trial: Trial, batch_size: int, sizes: list[int]) -> list[Any]:
    """What a user of the others writes: all rows, ``batch_size`` at a time."""
    sizes.append(batch_size)
    return [
        trial.call(start, min(trial.rows, start + batch_size))
        for start in range(0, trial.rows, batch_size)
    ]


Tool = Callable[[Any], tuple[int, int]]
TOOLS: Mapping[str, Tool] = {
    "oomguard": with_oomguard,
    "accelerate": with_accelerate,
    "torch-max-mem": with_torch_max_mem,
}


def tried(trial: Trial, feasible: int, tools: Mapping[str, Tool] = TOOLS) -> dict[str, Any]:
    """Return what each tool made of a case: failed attempts and rows, None where it gave up; empty
    where it is no case.
    """
    found: dict[str, Any] = {}
    if 1 <= feasible < trial.rows:
        for name, tool in tools.items():
            try:
                found[name] = tool(trial)
            except Exception as error:  # noqa: BLE001 - the tool gave up: counted as such
                found[name] = None
                where = [
                    f"{Path(frame.filename).name}:{frame.lineno}"
                    for frame in extract_tb(error.__traceback__)[-6:]
                ]
                found[f"{name}_error"] = (
                    f"{type(error).__name__}: {str(error)[:200]} ({', '.join(where)})"
                )
    return found


def figures(name: str, results: list[dict[str, Any]]) -> tuple[str, float, float]:
    """A tool's line, percent of the cases with at most one failed attempt, and percent kept of the
    largest feasible batch.
    """
    ended = [(r[name], r["feasible"]) for r in results if r.get(name)]
    gave_up = sum(name in r and not r[name] for r in results)
    failed = [attempts for (attempts, _), _ in ended]
    if not ended:
        return f"{name}: gave up {gave_up} of {gave_up}", 0.0, 0.0
    at_once = 100 * sum(n <= 1 for n in failed) / (len(failed) + gave_up)
    kept = 100 * sum(min(1, rows / feasible) for (_, rows), feasible in ended) / len(ended)
    line = (
        f"{name}: {sum(failed) / len(failed):.2f} failed attempts a case, at most one in "
        f"{at_once:.1f} %, "
        f"{kept:.1f} % of the largest feasible batch kept, gave up {gave_up} of "
        f"{len(failed) + gave_up}"
    )
    return line, at_once, kept
