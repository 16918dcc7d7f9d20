"""What the seed programs share: the real engine in a folder, with or without a limit, and the
tables they print.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "examples" / "jobs"
GIB = 2**30
MIB = 2**20
VERSION = "0.32.0"  # of the engine in .venv-vllm
_LONGEST_S = 500  # two cores that others use too


@dataclass(frozen=True)
class Ran:
    """A run of a command: how it ended, what it printed, and what `oomguard run --report` wrote of
    it.
    """

    status: int
    out: str
    errors: str
    report: dict

    @property
    def result(self) -> dict | None:
        """What the job itself says of its work; None where it did not get there."""
        lines = [line for line in self.out.splitlines() if line.startswith("RESULT ")]
        if lines:
            return json.loads(lines[-1].removeprefix("RESULT "))
        return None

    @property
    def incident(self) -> dict:
        """The failure that was diagnosed, empty without one."""
        return next(iter(self.report.get("incidents", ())), {})

    @property
    def panel(self) -> str:
        """What `oomguard run` showed of its failures, as one line."""
        return " ".join(
            line.strip("│ ") for line in self.errors.splitlines() if line.startswith("│")
        )

    @property
    def attempts(self) -> list[dict]:
        """The attempts of `oomguard run`."""
        return self.report.get("attempts", [])


def make_model(kind: str, folder: Path) -> None:
    """Make the models of one program in a folder."""
    command = ["python", str(ROOT / "examples" / "make_seed_models.py"), kind, "."]
    subprocess.run(command, cwd=folder, env=_environment(folder), check=True, capture_output=True)


def run(
    command: Sequence[str],
    folder: Path,
    *,
    limit_bytes: int | None = None,
    oomguard: Sequence[str] | None = None,
    until: Callable[[], object] | None = None,
) -> Ran:
    """Run a command in a folder and show its line.

    Args:
        command: the user's own command.
        folder: where its model lies.
        limit_bytes: what each of its processes may map: the device of a machine that has none.
        oomguard: the options of `oomguard run` before it; None runs it alone.
        until: for a server: asks it, and returns when it has answered; the server is stopped then.
    """
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    if oomguard is None:
        guard = []
    else:
        guard = ["oomguard", "run", *oomguard, "--"]
    print(
        "$",
        " ".join([*guard, *command])
        + ("" if limit_bytes is None else f"   (ulimit -v {limit_bytes // 1024})"),
        flush=True,
    )
    if oomguard is not None:
        guard = [
            *guard[:-1],
            "--report",
            str(report),
            "--journal",
            str(folder / "journal.sqlite3"),
            "--",
        ]
    line = [*guard, *command]
    if limit_bytes is not None:
        line = ["bash", "-c", f'ulimit -v {limit_bytes // 1024}; exec "$@"', "bash", *line]
    out = folder / "out.log"
    errors = folder / "errors.log"
    with out.open("wb") as out_file, errors.open("wb") as error_file:
        process = subprocess.Popen(
            line, cwd=folder, env=_environment(folder), stdout=out_file, stderr=error_file
        )
        try:
            if until is not None:
                _ask(until, process)
            else:
                process.wait(timeout=_LONGEST_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=90)
    if report.exists():
        told = json.loads(report.read_text())
    else:
        told = {}
    return Ran(
        process.returncode,
        out.read_text(errors="replace"),
        errors.read_text(errors="replace"),
        told,
    )


def show(ran: Ran) -> None:
    """Print what oomguard said beside the job's own output."""
    told = []
    tail = False
    for line in ran.errors.splitlines():
        tail = tail or line.startswith("What oomguard did")
        if tail or line.startswith(("oomguard:", "╭", "│", "╰")):
            told.append(line)
    print("\n".join(told))


def _ask(until: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            until()
        except OSError:
            time.sleep(0.5)
        else:
            return


def _environment(folder: Path) -> dict[str, str]:
    """The engine's own environment first in the path, nothing fetched, its caches in the folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OOMGUARD_", "VLLM_"))
    }
    (folder / "sockets").mkdir(exist_ok=True)
    return {
        **kept,
        "PATH": f"{ROOT / '.venv-vllm' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "VLLM_RPC_BASE_PATH": str(folder / "sockets"),
    }


def size(size_bytes: float) -> str:
    """A size as a person reads it."""
    if abs(size_bytes) >= GIB / 10:
        return f"{size_bytes / GIB:.2f} GiB"
    return f"{size_bytes / MIB:.1f} MiB"


def table(title: str, rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their headings, each column as wide as its longest text."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    print(f"\n{title}")
    for number, row in enumerate(texts):
        print(
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def conclude(checks: dict[str, bool]) -> None:
    """Say what held; end with 1 where something did not."""
    print()
    for claim, held in checks.items():
        print(f"{'held' if held else 'DID NOT HOLD'}: {claim}")
    if not all(checks.values()):
        raise SystemExit(1)


def node_bytes() -> int:
    """What the engine takes for the device on a CPU: the memory of its node, or the container's
    limit below it.
    """
    lines = Path("/sys/devices/system/node/node0/meminfo").read_text().splitlines()
    total = next(int(line.split()[3]) * 1024 for line in lines if "MemTotal" in line)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup") / limit
        if file.exists():
            text = file.read_text().strip()
        else:
            text = "max"
        if text.isdigit():
            return min(total, int(text))
    return total
