"""A Ray cluster for work of our own: joined or started, and left as it was."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from oomguard.errors import UsageError
from oomguard.installation import install_hint

# The folder that this package lies in: workers on this machine, and on those that share it, load the very same files.
_OWN_FOLDER: Final = Path(__file__).absolute().parents[3]
_ADDRESS: Final = re.compile(r"(?:ray://)?(?P<host>\[[^\]]+\]|[^:/]+):(?P<port>\d{1,5})/?")
_ANSWER_S: Final = 10.0
_SIDE: Final = r"started with:\s*Ray: (?P<{0}>\S+)\s*Python: (?P<{0}_python>\S+)"
_VERSIONS: Final = re.compile(f"{_SIDE.format('theirs')}.*?{_SIDE.format('ours')}", re.DOTALL)


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """Yield the ``ray`` module, connected: to the cluster that ``RAY_ADDRESS`` names or that runs here, else to one of its own.

    A cluster that is of this process already stays connected; any other is left, and one of its own ended. Set no credentials and no
    code of the working directory on its workers: they get this package's folder in its place.

    Raises:
        UsageError: Ray is not installed, the cluster is of another version, or does not answer; the message has both versions.
    """
    try:
        import ray
    except ImportError:
        raise UsageError(
            "--engine ray takes Ray, which is not installed", hint=f"{install_hint('ray')}, or leave --engine out"
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
    """Raise UsageError where nothing listens at an address: Ray itself waits for a minute there, and then ends the process."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return
    try:
        socket.create_connection((found["host"].strip("[]"), int(found["port"])), timeout=_ANSWER_S).close()
    except OSError as error:
        raise _not_joined(OSError(f"{address}: {error.strerror or error}")) from None


def cpus(ray: Any) -> int:
    """Return how many CPUs the cluster has, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _not_joined(error: BaseException) -> UsageError:
    text = str(error)
    if told := _VERSIONS.search(text):
        return UsageError(
            f"the Ray cluster runs Ray {told['theirs']} on Python {told['theirs_python']}, "
            f"this process has Ray {told['ours']} on Python {told['ours_python']}",
            hint=f"pip install 'ray=={told['theirs']}' under Python {told['theirs_python']}, or leave --engine out",
        )
    first = " ".join(text.split())[:300] or type(error).__name__
    return UsageError(
        f"the Ray cluster cannot be joined: {first}", hint="ray status shows it; RAY_ADDRESS names another one"
    )
