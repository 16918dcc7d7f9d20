"""The Python sources of a released package: its wheel is downloaded, its files are unzipped, and
nothing of it is installed or run.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_KIND = [
    *("--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11"),
    *("--abi", "cp311", "--abi", "abi3", "--abi", "none"),
    *(
        "--platform",
        "manylinux_2_34_x86_64",
        "--platform",
        "manylinux_2_28_x86_64",
        "--platform",
        "manylinux_2_17_x86_64",
    ),
    *("--platform", "manylinux2014_x86_64", "--platform", "any"),
]


def unzipped(requirement: str, package: str, cache: Path) -> tuple[str, Path]:
    """Download a wheel and return its version with the folder of a package in it, under
    ``cache/VERSION``.

    Raises:
        subprocess.CalledProcessError: the registry has no such wheel, or is not reached; ``stderr``
        says which.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--dest",
            folder,
        ]
        subprocess.run([*pip, *_KIND, requirement], capture_output=True, text=True, check=True)
        wheel = next(Path(folder).glob("*.whl"))
        version = wheel.name.split("-")[1]
        target = cache / version
        shutil.rmtree(target, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.startswith(f"{package}/") and name.endswith(".py")
            ]
            archive.extractall(target, names)
        (target / "complete").touch()  # what an interrupted run left is not taken for the whole
    return version, target / package


def package_of(requirement: str, package: str, cache: Path) -> Path:
    """Return the folder of a package of ``NAME==VERSION``, downloaded where it is not there yet.
    Raises as ``unzipped``.
    """
    known = cache / requirement.partition("==")[2]
    if (known / "complete").exists():
        return known / package
    return unzipped(requirement, package, cache)[1]
