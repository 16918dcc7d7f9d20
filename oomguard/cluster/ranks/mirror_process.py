"""Mirror the messages of one host to the others through torch's store or Ray's.

mirror.py runs this file as a program. It imports no part of oomguard, so any Python with torch or
Ray can run it. It stores the messages of this host's ranks, and writes the other hosts' messages
next to them. It ends when its standard input ends.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

# The ranks wait for each other's messages, so this delays every restart.
PAUSE_S = 0.25
# The host of the store may start a minute later.
CONNECT_S = 60.0
# The same limit as in messages.py, which this process cannot import.
MOST_BYTES = 4 << 20


class KeyValueStore(Protocol):
    """Define a key-value store that all hosts reach."""

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if the key is missing."""


class TorchStore:
    """Use torch.distributed's TCPStore, which the launcher or rank 0 keeps."""

    def __init__(self, asked: dict[str, Any]) -> None:
        from torch.distributed import PrefixStore, TCPStore

        own = TCPStore(
            asked["address"],
            asked["port"],
            is_master=asked["keeps"],
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=CONNECT_S),
        )
        self._store = PrefixStore(f"oomguard/{asked['prefix']}", own)

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None; check first, because ``get`` would block."""
        if self._store.check([key]):
            return bytes(self._store.get(key))
        return None


class RayStore:
    """Use Ray's key-value store in its GCS, which needs no worker."""

    NAMESPACE = b"oomguard"

    def __init__(self, asked: dict[str, Any]) -> None:
        from ray._private.services import canonicalize_bootstrap_address_or_die
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        if asked["address"] is None:
            named = None
        else:
            named = f"{asked['address']}:{asked['port']}"
        self._client = GcsClient(address=canonicalize_bootstrap_address_or_die(named or "auto"))
        self._prefix = asked["prefix"]

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._client.internal_kv_put(self._name(key), value, True, self.NAMESPACE)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if the key is missing."""
        value: bytes | None = self._client.internal_kv_get(self._name(key), self.NAMESPACE)
        return value

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}/{key}".encode()


STORES: dict[str, Callable[[dict[str, Any]], KeyValueStore]] = {
    "torch": TorchStore,
    "ray": RayStore,
}


def main() -> None:
    """Mirror until standard input ends."""
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    os.nice(5)
    store = STORES[asked["kind"]](asked)
    here = Path(asked["here"])
    there = Path(asked["there"])
    Path(asked["ready"]).touch()
    put: dict[str, tuple[int, int]] = {}
    got: dict[str, bytes] = {}
    while True:
        # Store messages that were written before the end.
        is_last = over.is_set()
        for path in sorted(here.glob("*.json")):
            if asked["puts"] is None or path.stem in asked["puts"]:
                if (
                    asked["is_kept_by_rank_0"]
                    and path.stem not in put
                    and store.get(path.stem) is not None
                ):
                    sys.exit(
                        f"another process is already rank {path.stem} there: give each job its own "
                        "address"
                    )
                _put(path, store, put)
        if is_last:
            break
        own = {path.stem for path in here.glob("*.json")}
        for rank in {str(rank) for rank in range(asked["size"])} - own:
            value = store.get(rank)
            if value is not None and value != got.get(rank):
                got[rank] = value
                partial = there / f"{rank}.{os.getpid()}"
                partial.write_bytes(value)
                partial.replace(there / f"{rank}.json")
        over.wait(PAUSE_S)
    # The other hosts read the last messages from this process.
    if asked["keeps"]:
        time.sleep(2 * PAUSE_S)


def _put(path: Path, store: KeyValueStore, put: dict[str, tuple[int, int]]) -> None:
    try:
        status = path.stat()
        if (
            put.get(path.stem) != (status.st_ino, status.st_mtime_ns)
            and status.st_size <= MOST_BYTES
        ):
            store.put(path.stem, path.read_bytes())
            put[path.stem] = status.st_ino, status.st_mtime_ns
    except FileNotFoundError:  # the last rank has removed the folder
        return


def _wait_for_end(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


if __name__ == "__main__":
    main()
