"""GPUs that are not there: run a command on a machine whose NVML tells of simulated ones.

    python simulated_gpus.py [--gpus N] [--size GIB] -- COMMAND …

NVML is a C library, compiled here from simulated_gpus.c and put before the driver's own; nvidia-ml-py asks it as it asks any. Which GPUs
there are stands in a file, and what a process holds in another, which counts for as long as the process lives: both may change while
programs run. Tests, benchmarks and the pages of the documentation use it, so that what they show is what oomguard does with real GPUs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
VARIABLE = "SIMULATED_GPUS"
SOURCE = Path(__file__).with_suffix(".c")


def compiler() -> str | None:
    """Return the C compiler of this machine."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """Compile the library into a folder, and return that."""
    command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", folder / "libnvidia-ml.so.1", SOURCE]
    subprocess.run(command, check=True)
    return folder


def uuid(index: int) -> str:
    """Return the UUID of a simulated GPU."""
    return f"GPU-{index:08x}-5eed-4a11-9a00-00000000000{index:x}"


@dataclass(frozen=True)
class Gpus:
    """Simulated GPUs: the folder that tells of them, and the one where the library lies."""

    folder: Path
    library: Path

    def are(self, *lines: str) -> None:
        """Change what there is, at once: the lines of simulated_gpus.c."""
        new = self.folder / "devices.new"
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.replace(self.folder / "devices")

    def are_alike(self, count: int, size_gib: float = 24, name: str = "NVIDIA_RTX_A5000") -> None:
        """Let there be so many of one kind."""
        self.are(*(line(i, size_gib, name) for i in range(count)))

    def held(self, pid: int, **bytes_by_uuid: int) -> None:
        """Let a process hold bytes of GPUs."""
        take(self.folder, pid, bytes_by_uuid)

    @property
    def env(self) -> dict[str, str]:
        """Return the variables under which a program sees them, and leases of no other run."""
        return {
            VARIABLE: str(self.folder),
            "LD_LIBRARY_PATH": str(self.library),
            "OOMGUARD_LEASE_FOLDER": str(self.folder / "leases"),
        }


def line(index: int, size_gib: float = 24, name: str = "NVIDIA_RTX_A5000", more: str = "") -> str:
    """Return the line of one GPU."""
    return f"gpu {uuid(index)} {round(size_gib * GIB)} {name} {more}".strip()


def take(folder: Path, pid: int, bytes_by_uuid: Mapping[str, int]) -> None:
    """Let a process hold bytes of GPUs, by UUID; all of it is free again when it ends."""
    new = folder / f"new.{pid}"
    new.write_text("".join(f"{name} {size}\n" for name, size in bytes_by_uuid.items()), encoding="utf-8")
    new.replace(folder / f"use.{pid}")


def main() -> int:
    """Run a command on simulated GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--size", type=float, default=24, help="GiB of each")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simulated-gpus-") as folder:
        gpus = Gpus(Path(folder), build(Path(folder)))
        gpus.are_alike(asked.gpus, asked.size)
        return subprocess.run(asked.command, env={**os.environ, **gpus.env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
