"""Join or start a Ray cluster for oomguard's own work, and process batches on it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from oomguard.core.errors import UsageError
from oomguard.core.installation import install_hint

T = TypeVar("T")
R = TypeVar("R")
# So many batches per CPU are submitted at once: the next one waits while one is processed.
_AHEAD: Final = 2
# At most so many finished batches per CPU wait for an earlier one.
_KEPT: Final = 6


def in_order(
    ray: Any,
    function: Callable[..., list[R]],
    common: object,
    batches: Sequence[Sequence[T]],
    at_once: int,
) -> Generator[list[R | str]]:
    """Yield the results of ``function(common, batch)`` in the order of the batches.

    Each result is a list with one entry per entry of the batch. If a worker dies, its batch is
    processed again entry by entry, so that one entry costs no other. If a single entry kills its
    worker, its result is the reason, as text. Exceptions of the function are raised.

    Args:
        ray: the connected ``ray`` module.
        function: a function in a module that the workers have too.
        common: its first argument, sent to each node once.
        batches: its second arguments.
        at_once: how many batches are processed at the same time.
    """
    task = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(function)
    shared = ray.put(common)
    waiting = deque(range(len(batches)))
    running: dict[Any, int] = {}
    done: dict[int, list[R | str]] = {}
    turn = 0
    try:
        while turn < len(batches):
            while (
                waiting and len(running) < _AHEAD * at_once and waiting[0] < turn + _KEPT * at_once
            ):
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
    # One after another: the entry that killed the worker may need a whole node's memory.
    found: list[Any] = []
    for entry in batch:
        found += _result(ray, task, shared, [entry], task.remote(shared, [entry]))
    return found


def _how(error: BaseException) -> str:
    kinds = {
        "OutOfMemoryError": "was killed by Ray's memory monitor",
        "NodeDiedError": "was lost with its node",
    }
    return f"the Ray worker that read it {kinds.get(type(error).__name__, 'died')}"


# The folder of this package: workers on this machine, or with the same disk, load the same files.
_OWN_FOLDER: Final = Path(__file__).absolute().parents[3]
_ADDRESS: Final = re.compile(r"(?:ray://)?(?P<host>\[[^\]]+\]|[^:/]+):(?P<port>\d{1,5})/?")
_ANSWER_S: Final = 10.0
_SIDE: Final = r"started with:\s*Ray: (?P<{0}>\S+)\s*Python: (?P<{0}_python>\S+)"
_VERSIONS: Final = re.compile(f"{_SIDE.format('theirs')}.*?{_SIDE.format('ours')}", re.DOTALL)


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """Yield the ``ray`` module, connected to a cluster.

    It is the cluster that ``RAY_ADDRESS`` names or that runs here; otherwise a new one. A
    connection that this process already has stays open. Any other one is closed, and a new cluster
    is stopped. Workers get this package's folder instead of the working directory, and no
    credentials.

    Raises:
        UsageError: Ray is not installed, or the cluster has another version or does not answer. The
            message names both versions.
    """
    try:
        import ray
    except ImportError:
        raise UsageError(
            "--on ray needs Ray, which is not installed",
            hint=f"{install_hint('ray')}, or omit --on",
        ) from None
    if ray.is_initialized():
        yield ray
        return
    _require_answer(os.environ.get("RAY_ADDRESS", ""))
    try:
        with contextlib.chdir(_OWN_FOLDER):
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        raise _not_joined(error) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise UsageError if nothing listens at an address.

    Ray itself would wait for a minute, and then end the process.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return
    try:
        socket.create_connection(
            (found["host"].strip("[]"), int(found["port"])), timeout=_ANSWER_S
        ).close()
    except OSError as error:
        raise _not_joined(OSError(f"{address}: {error.strerror or error}")) from None


def cpus(ray: Any) -> int:
    """Return the number of CPUs in the cluster, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _not_joined(error: BaseException) -> UsageError:
    text = str(error)
    if versions := _VERSIONS.search(text):
        return UsageError(
            f"the Ray cluster runs Ray {versions['theirs']} on Python {versions['theirs_python']}, "
            f"but this process has Ray {versions['ours']} on Python {versions['ours_python']}",
            hint=(
                f"pip install 'ray=={versions['theirs']}' under Python "
                f"{versions['theirs_python']}, or omit --on"
            ),
        )
    first = " ".join(text.split())[:300] or type(error).__name__
    return UsageError(
        f"oomguard cannot join the Ray cluster: {first}",
        hint="ray status shows the cluster; RAY_ADDRESS chooses another one",
    )
