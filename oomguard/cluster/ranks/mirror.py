"""Start the helper process that mirrors a host's messages to other hosts.

It runs on a Python that has the library of the store.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Final

from oomguard.cluster.ranks.messages import MessageFolder
from oomguard.cluster.ranks.rendezvous import Rendezvous
from oomguard.core.log import get_logger
from oomguard.supervisor.process import inherited

_CHILD: Final = Path(__file__).with_name("mirror_process.py")
# After its standard input ends, it gets this time to store the last messages.
_END_S: Final = 5.0
_ANSWER_S: Final = 1.0
# The error of torch's TCPStore if it cannot listen: DistNetworkError with an errno's name or text.
_IN_USE: Final = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_TAKEN: Final = (
    "another program uses the port; choose a free one, the same for all ranks: --rendezvous "
    "tcp://HOST:PORT"
)


class StoreMirror:
    """Control the helper of one host.

    Args:
        rendezvous: the place where the ranks meet, with the store to mirror.
        folder: the messages of this host.
        argv: the command. If oomguard's Python lacks the library, the command's Python is used.
    """

    def __init__(self, rendezvous: Rendezvous, folder: MessageFolder, argv: Sequence[str]) -> None:
        store = rendezvous.store
        assert store is not None  # noqa: S101 - only such a rendezvous is mirrored
        asked = asdict(store) | {
            "keeps": rendezvous.keeps_store,
            "here": str(folder.here),
            "there": str(folder.there),
            "size": rendezvous.launched.size,
            "puts": None if rendezvous.is_only_mirror else [str(rendezvous.launched.rank)],
        }
        self._ready = folder.there / f"ready-{rendezvous.launched.rank}"
        asked["ready"] = str(self._ready)
        self._why_ended: str | None = None
        if store.is_kept_by_rank_0 or store.address is None:
            self._place = None
        else:
            self._place = (store.address, store.port)
        if store.address is None:
            place = ""
        else:
            place = f" at {store.address}:{store.port}"
        self._named = f"the {store.kind} store{place}"
        self._process = subprocess.Popen(
            [_python(store.kind, argv), str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=inherited(),
            text=True,
            start_new_session=True,  # Ctrl-C is for the command
        )
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None  # noqa: S101
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()

    def problem(self) -> str | None:
        """Return why mirroring stopped, or None while it works."""
        if self._process.poll() is None:
            if self._ready.exists():
                return None
            return f"{self._named} was not reached"
        return self.why_ended()

    def why_apart(self) -> str | None:
        """Return why no rank of another host can be reached, or None while one may come."""
        if (ended := self.why_ended()) is not None or self._place is None or self._ready.exists():
            return ended
        try:
            socket.create_connection(self._place, timeout=_ANSWER_S).close()
        except OSError as error:
            return f"{self._named} was not reached: {error.strerror or error}"
        return None

    def why_ended(self) -> str | None:
        """Return why the helper ended on its own, or None while it runs."""
        if self._process.poll() is None:
            return None
        if self._why_ended is None:
            if self._process.stderr is not None:
                errors = self._process.stderr.read()
            else:
                errors = ""
            last = next(
                (line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it ended"
            )
            if _IN_USE.search(last):
                self._why_ended = f"{self._named}: {_TAKEN}"
            else:
                self._why_ended = last
        return self._why_ended

    def close(self) -> None:
        """Stop the helper after the last messages are stored."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            get_logger().debug("killed the mirror of the ranks, which did not end")
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _python(kind: str, argv: Sequence[str]) -> str:
    """Return oomguard's Python if it has the store's library, otherwise the command's."""
    if importlib.util.find_spec(kind) is not None:
        return sys.executable
    if PurePath(argv[0]).name.startswith("python"):
        named = argv[0]
    else:
        named = "python3"
    return shutil.which(named) or sys.executable
