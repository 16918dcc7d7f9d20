"""Run a command on a machine with simulated GPUs.

    python simulated_gpus.py [--gpus N] [--size GIB] [--vllm VERSION] -- COMMAND …

This script compiles a replacement for the NVML library (simulated_gpus.c) and puts it before the
driver's library. One file lists the GPUs; another lists the bytes of each process and counts while
the process lives. Both may change while programs run. simulated_engine.py is on PATH as ``vllm``.
Tests, benchmarks and documentation pages use this script.
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
    command = [
        compiler() or "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        folder / "libnvidia-ml.so.1",
        SOURCE,
    ]
    subprocess.run(command, check=True)
    return folder


def uuid(index: int) -> str:
    """Return the UUID of a simulated GPU."""
    return f"GPU-{index:08x}-5eed-4a11-9a00-00000000000{index:x}"


@dataclass(frozen=True)
class Gpus:
    """Describe simulated GPUs: the folder of their files, and the folder of the library."""

    folder: Path
    library: Path

    def are(self, *lines: str) -> None:
        """Replace the list of devices atomically; simulated_gpus.c documents the lines."""
        new = self.folder / "devices.new"
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.replace(self.folder / "devices")

    def are_alike(self, count: int, size_gib: float = 24, name: str = "NVIDIA_RTX_A5000") -> None:
        """Simulate several GPUs of one model."""
        self.are(*(line(i, size_gib, name) for i in range(count)))

    def held(self, pid: int, **bytes_by_uuid: int) -> None:
        """Let a process use bytes of GPUs."""
        take(self.folder, pid, bytes_by_uuid)

    def engine(self, version: str = "0.32.0") -> None:
        """Put the simulated engine on PATH as ``vllm``, with a package and metadata of a version."""
        site = self.folder / "site"
        program = self.folder / "bin" / "vllm"
        for path in (site / "vllm", program.parent, site / f"vllm-{version}.dist-info"):
            path.mkdir(parents=True, exist_ok=True)
        (site / "vllm" / "__init__.py").touch()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (site / f"vllm-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
        here = SOURCE.parent
        engine = SOURCE.with_name("simulated_engine.py")
        program.write_text(
            f"#!{sys.executable}\nimport runpy, sys\nsys.path.insert(0, "
            f"{str(here)!r})\nrunpy.run_path({str(engine)!r})\n",
            encoding="utf-8",
        )
        program.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which a program sees the GPUs, with a separate lease folder."""
        before = os.environ.get("PYTHONPATH")
        return {
            VARIABLE: str(self.folder),
            "LD_LIBRARY_PATH": str(self.library),
            "OOMGUARD_LEASE_FOLDER": str(self.folder / "leases"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(
                [str(self.folder / "site"), *([before] if before else [])]
            ),
        }

    def happened_to(self, what: str) -> int:
        """Count the events of one kind: ``starts``, ``started``, ``ends`` or ``fails``."""
        return sum(row[2] == what for row in self.happened())

    def happened(self) -> list[tuple[float, int, str, list[str]]]:
        """Return the events of the simulated engines: time, process, event, devices."""
        path = self.folder / "happened"
        if path.exists():
            rows = [row.split() for row in path.read_text(encoding="utf-8").splitlines()]
        else:
            rows = []
        return [(float(at), int(pid), what, uuids.split(",")) for at, pid, what, uuids in rows]


def line(index: int, size_gib: float = 24, name: str = "NVIDIA_RTX_A5000", more: str = "") -> str:
    """Return the line of one GPU."""
    return f"gpu {uuid(index)} {round(size_gib * GIB)} {name} {more}".strip()


def take(folder: Path, pid: int, bytes_by_uuid: Mapping[str, int]) -> None:
    """Let a process use bytes of GPUs, by UUID, until the process ends."""
    new = folder / f"new.{pid}"
    new.write_text(
        "".join(f"{name} {size}\n" for name, size in bytes_by_uuid.items()), encoding="utf-8"
    )
    new.replace(folder / f"use.{pid}")


def main() -> int:
    """Run a command on simulated GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--size", type=float, default=24, help="GiB of each")
    parser.add_argument("--vllm", default="0.32.0", metavar="VERSION")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simulated-gpus-") as folder:
        gpus = Gpus(Path(folder), build(Path(folder)))
        gpus.are_alike(asked.gpus, asked.size)
        gpus.engine(asked.vllm)
        return subprocess.run(asked.command, env={**os.environ, **gpus.env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
