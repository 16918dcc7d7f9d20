"""Processes that run cases, each one after another; one that dies, fails or does not end is
replaced, and its case counts as given up.
"""

import collections
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Case = tuple[int, int]  # its number and the seed
Found = dict[str, Any]
_LOOK_S = 1.0  # how often limits of time are looked at
_END_S = 10.0  # what a process has to end in


def run_cases(
    run_case: Callable[[Case], Found],
    cases: Sequence[Case],
    *,
    workers: int,
    load: Callable[[], object] | None = None,
    per_worker: int = 20,
    case_limit_s: float | None = None,
    minutes: float | None = None,
) -> Iterator[Found]:
    """Yield what each case came to, as they end.

    Args:
        run_case: runs one; what it raises is the case's end, and its process's: an error of a
            device may stay with it.
        cases: those to run.
        workers: how many run at once.
        load: run by each process before its first case, outside the limit.
        per_worker: cases after which a process is replaced.
        case_limit_s: seconds after which a case is given up.
        minutes: no case begins after so many; those not begun are left.

    Raises:
        RuntimeError: a process ended before its first case.
    """
    waiting = collections.deque(cases)
    if minutes is None:
        ends_at_s = None
    else:
        ends_at_s = time.monotonic() + 60 * minutes
    pool = [_Worker(run_case, load) for _ in range(min(workers, len(waiting)))]
    try:
        while pool:
            ready = wait([worker.connection for worker in pool], timeout=_LOOK_S)
            for worker in list(pool):
                if worker.connection in ready:
                    found = worker.answer()
                elif worker.is_late(case_limit_s):
                    found = worker.kill(f"no result after {case_limit_s:g} s")
                else:
                    continue
                if found is not None:
                    yield found
                if not waiting or (ends_at_s is not None and time.monotonic() >= ends_at_s):
                    pool.remove(worker)
                    worker.end()
                elif worker.is_over or worker.ran >= per_worker:
                    worker.end()
                    pool[pool.index(worker)] = _Worker(run_case, load)
                else:
                    worker.give(waiting.popleft())
    finally:
        for worker in pool:
            worker.kill("")


class _Worker:
    """One process, and the case that it runs."""

    def __init__(
        self, run_case: Callable[[Case], Found], load: Callable[[], object] | None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, run_case, load), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the process would not be seen
        self._case: Case | None = None
        self._began_s = 0.0
        self._is_loaded = False
        self.is_over = False
        self.ran = 0

    def give(self, case: Case) -> None:
        """Have it run a case."""
        self._case = case
        self._began_s = time.monotonic()
        with contextlib.suppress(OSError):  # it died meanwhile: its next answer says so
            self.connection.send(case)

    def is_late(self, limit_s: float | None) -> bool:
        """Return whether its case has taken longer than it may."""
        return (
            limit_s is not None
            and self._case is not None
            and time.monotonic() - self._began_s > limit_s
        )

    def answer(self) -> Found | None:
        """Return what its case came to; None where it says that it is ready for its first."""
        try:
            found, self.is_over = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            if not self._is_loaded:
                raise RuntimeError("a process ended before its first case") from None
            return self.kill(f"its process ended with status {self._process.exitcode}")
        self._is_loaded = True
        self.ran += self._case is not None
        self._case = None
        return found  # type: ignore[no-any-return]

    def kill(self, why: str) -> Found | None:
        """End it at once; return its case as given up, None where it has none."""
        self._process.kill()
        self.end()
        case = self._case
        self._case = None
        if case is None:
            return None
        return given_up(case, why)

    def end(self) -> None:
        """Let it end, and see to it that it does."""
        self.connection.close()
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        self.is_over = True


def given_up(case: Case, why: str) -> Found:
    """Return what a case came to that has no result."""
    return {"number": case[0], "oomguard": None, "oomguard_error": why}


def _work(
    connection: Connection, run_case: Callable[[Case], Found], load: Callable[[], object] | None
) -> None:
    """Run cases until there are no more."""
    if load is not None:
        load()
    with contextlib.suppress(EOFError, OSError):  # whoever gave the cases has gone
        connection.send((None, False))
        while True:
            case = connection.recv()
            try:
                found = run_case(case), False
            except Exception as error:  # noqa: BLE001 - told as the case's end
                found = given_up(case, f"{type(error).__name__}: {str(error)[:300]}"), True
            connection.send(found)
