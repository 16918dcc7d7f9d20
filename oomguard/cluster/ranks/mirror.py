"""The helper that mirrors a host's documents: a process of a Python that has what the store takes,
started beside the command.
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

from oomguard.cluster.ranks.messages import Folder
from oomguard.cluster.ranks.rendezvous import Rendezvous
from oomguard.core.log import get_logger
from oomguard.supervisor.process import inherited

_CHILD: Final = Path(__file__).with_name("mirror_process.py")
# Its last documents are put into the store.
_END_S: Final = 5.0
_ANSWER_S: Final = 1.0
# torch's TCPStore where it cannot listen: DistNetworkError with the name or the text of the errno.
_IN_USE: Final = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_TAKEN: Final = (
    "another program has the port; --rendezvous tcp://HOST:PORT with one that is free, the same "
    "for all ranks"
)


class Mirror:
    """The helper of one host.

    Args:
        rendezvous: where the ranks meet; its store is mirrored.
        folder: the documents of this host.
        argv: the command: its Python is asked where ours has no store.
    """

    def __init__(self, rendezvous: Rendezvous, folder: Folder, argv: Sequence[str]) -> None:
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
        """Return why it mirrors nothing any more; None while it does."""
        if self._process.poll() is None:
            if self._ready.exists():
                return None
            return f"{self._named} was not reached"
        return self.why_ended()

    def why_apart(self) -> str | None:
        """Return why the store brings nobody here: its mirror has ended, or nothing answers there;
        None while it may yet.
        """
        if (ended := self.why_ended()) is not None or self._place is None or self._ready.exists():
            return ended
        try:
            socket.create_connection(self._place, timeout=_ANSWER_S).close()
        except OSError as error:
            return f"{self._named} was not reached: {error.strerror or error}"
        return None

    def why_ended(self) -> str | None:
        """Return why it has ended by itself; None while it runs."""
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
        """End it, when what was written last is in the store."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            get_logger().debug("the mirror of the ranks is killed")
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _python(kind: str, argv: Sequence[str]) -> str:
    """Return our Python where it has the store's library, else the command's."""
    if importlib.util.find_spec(kind) is not None:
        return sys.executable
    if PurePath(argv[0]).name.startswith("python"):
        named = argv[0]
    else:
        named = "python3"
    return shutil.which(named) or sys.executable
