"""Where a run's metrics go: ``PORT``, ``HOST:PORT`` or a file whose name ends in .prom."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.errors import UsageError

LOCAL: Final = "127.0.0.1"
SUFFIX: Final = ".prom"  # node_exporter's textfile collector reads no other
_LARGEST_PORT: Final = 65535
_ADDRESS: Final = re.compile(r"(?:(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:/]+)):)?(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where metrics are served; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_target(text: str) -> Address | Path:
    """Return the address or the file that ``--metrics`` names.

    Raises:
        UsageError: it is neither, or the file's folder cannot be written.
    """
    if text.endswith(SUFFIX):
        path = Path(os.path.realpath(text))  # of a link, its target is written anew: the link stays
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"--metrics {text}: the folder cannot be written", hint="name a folder that exists")
        if path.is_dir():
            raise UsageError(f"--metrics {text}: it is a folder", hint=f"name a file in it: {text}/oomguard{SUFFIX}")
        if path.is_symlink() or (
            path.exists() and not path.is_file()
        ):  # a loop of links; a device, which a file would replace
            raise UsageError(f"--metrics {text}: it is no regular file", hint="name another file")
        return path
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found else _LARGEST_PORT + 1
    if found is None or port > _LARGEST_PORT:
        raise UsageError(
            f"--metrics {text}: neither a port, nor an address, nor a file whose name ends in {SUFFIX}",
            hint=f"--metrics 9400, --metrics 0.0.0.0:9400, --metrics /var/lib/node_exporter/oomguard{SUFFIX}",
        )
    host = found["v6"] or found["host"] or LOCAL
    # getaddrinfo(3) takes "*" for this machine alone, where its writer means every address of it.
    return Address(("::" if socket.has_dualstack_ipv6() else "0.0.0.0") if host == "*" else host, port)  # noqa: S104
