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
ANY: Final = "*"
EVERYWHERE: Final = "::"
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
    address = parse_address(text, LOCAL)
    if address is None:
        raise UsageError(
            f"--metrics {text}: neither a port, nor an address, nor a file whose name ends in {SUFFIX}",
            hint=f"--metrics 9400, --metrics 0.0.0.0:9400, --metrics /var/lib/node_exporter/oomguard{SUFFIX}",
        )
    return address


def parse_address(text: str, default_host: str) -> Address | None:
    """Return the address that ``[HOST:]PORT`` names, None where it names none; the host ``*`` is every address of this machine."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > _LARGEST_PORT:
        return None
    host = found["v6"] or found["host"] or default_host
    # getaddrinfo(3) takes "*" for this machine alone, where its writer means every address of it.
    everywhere = EVERYWHERE if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104
    return Address(everywhere if host == ANY else host, int(found["port"]))


def listening_at(address: Address) -> socket.socket:
    """Return a socket that listens; what comes before it is served waits in its queue.

    Raises:
        OSError: it cannot listen there.
    """
    family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    # "::" is all addresses of both families, as servers commonly have it, whatever the system's own default.
    both = address.host == EVERYWHERE and socket.has_dualstack_ipv6()
    return socket.create_server(place[:2], family=family, dualstack_ipv6=both)
