"""Start a temporary PostgreSQL server, run a command against it, and remove the server.

    python examples/throwaway_postgresql.py -- COMMAND …

The command finds the URL of an empty database in OOMGUARD_JOURNAL. PostgreSQL must be installed
(Debian: apt-get install postgresql). The script needs no privileges; root starts the server as the
user postgres.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_BIN_FOLDERS = "/usr/lib/postgresql/*/bin"  # Debian may have several versions
LIMIT_S = 60


def programs() -> Path | None:
    """Return the folder of the newest initdb and pg_ctl; None if PostgreSQL is not installed."""
    found = [path.parent for path in Path("/").glob(_BIN_FOLDERS[1:] + "/initdb")]
    if found:
        return max(found, key=lambda folder: float(folder.parent.name))
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    return None


class Server:
    """Control a server with a socket in its folder and a port on 127.0.0.1.

    ``kill`` and ``start`` simulate a crash and a recovery.
    """

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self.folder = folder
        self._bin = bin_folder
        if os.getuid() == 0:
            self._user = pwd.getpwnam("postgres")
        else:
            self._user = None
        self.port = _free_port()
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        self._do(
            "initdb",
            "-D",
            "data",
            "-A",
            "trust",
            "-U",
            "team",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        )
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.write(
                f"unix_socket_directories = '{folder}'\nlisten_addresses = '127.0.0.1'\nport = "
                f"{self.port}\n"
            )
            file.write("shared_buffers = 32MB\nmax_connections = 120\n")

    def url(self, database: str, user: str = "team") -> str:
        """Return the URL of a database."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server and wait until it answers; after a kill it recovers first."""
        self._do("pg_ctl", "-D", "data", "-l", "log", "-w", "-t", str(LIMIT_S), "start")

    def stop(self) -> None:
        """Stop the server and end its connections."""
        self._do("pg_ctl", "-D", "data", "-m", "immediate", "-w", "-t", str(LIMIT_S), "stop")

    def kill(self) -> None:
        """Kill the server and its child processes with SIGKILL."""
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, own)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        until = time.monotonic() + LIMIT_S
        while (
            any(Path(f"/proc/{each}/stat").exists() for each in (pid, *own))
            and time.monotonic() < until
        ):
            time.sleep(0.01)

    def create(self, database: str) -> str:
        """Create an empty database, and return its URL."""
        self.sql("postgres", f'CREATE DATABASE "{database}"')
        return self.url(database)

    def sql(self, database: str, statement: str) -> str:
        """Run a statement and return the output of psql."""
        return self._do(
            "psql",
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            self.url(database),
            "-c",
            statement,
        )

    def _do(self, program: str, *arguments: str) -> str:
        command = [str(self._bin / program), *arguments]
        user = self._user
        if user is not None:
            as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        else:
            as_user = {}
        # pg_ctl leaves the server running. With a pipe, we would wait until the server closes it.
        with tempfile.TemporaryFile("w+") as out:
            ran = subprocess.run(
                command, cwd=self.folder, env=_environment(self.folder), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, timeout=2 * LIMIT_S, check=False, start_new_session=True, **as_user,
            )  # fmt: skip
            out.seek(0)
            said = out.read()
        if ran.returncode != 0:
            raise RuntimeError(f"{program} ended with {ran.returncode}: {said}")
        return said.strip()


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Run a server during the block.

    Raises:
        FileNotFoundError: if PostgreSQL is not installed.
    """
    bin_folder = programs()
    if bin_folder is None:
        raise FileNotFoundError("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(
        prefix="pg-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o700)
        one = Server(Path(folder), bin_folder)
        one.start()
        try:
            yield one
        finally:
            with contextlib.suppress(RuntimeError):
                one.stop()


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "LC_ALL": "C", "TZ": "UTC"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    if "--" in sys.argv:
        command = sys.argv[sys.argv.index("--") + 1 :]
    else:
        command = []
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    with server() as one:
        env = {**os.environ, "OOMGUARD_JOURNAL": one.create("team")}
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
