"""Figure: oomguard's own package is removed, emptied or broken while a run is alive: the command's
status is kept.

A copy of the package is used, so that nothing of the installation is touched. 30 rounds by default.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import oomguard
from support.figure import conclude

LATEST_S = 1.5
LOG = Path(__file__).parents[1] / "examples" / "logs" / "vllm_serve_kv_cache.log"
OPTIONS = ((), ("--allow", "reduces-capacity"), ("--journal", "journal", "--report", "report.json"))


def removed(package: Path) -> None:
    shutil.rmtree(package)


def emptied(package: Path) -> None:
    for path in package.rglob("*.py"):
        path.write_text("")


def broken(package: Path) -> None:
    for path in package.rglob("*.py"):
        path.write_text("raise ImportError('another version')\n")


WAYS = (removed, emptied, broken)


def round_of(number: int, folder: Path) -> str | None:
    """Run a command whose status is to be kept; return what is wrong."""
    chosen = random.Random(number)
    package = folder / "copy" / "oomguard"
    shutil.copytree(
        Path(oomguard.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    status = chosen.choice((0, 9))
    way = WAYS[number % 3]
    options = OPTIONS[number // 3 % 3]
    code = (
        f"echo BEGUN; while [ ! -e {folder}/go ]; do sleep 0.05; done; cat {LOG} >&2; exit {status}"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(package.parent),
        "XDG_STATE_HOME": str(folder),
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-m", "oomguard", "run", *options, "--", "sh", "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, env=env
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.readline()
        time.sleep(chosen.uniform(0, LATEST_S))
        way(package)
        (folder / "go").touch()
        found = process.wait(60)
    # A log of a dead engine makes a failure of status 0, where it is read.
    if status:
        allowed = {9}
    else:
        allowed = {0, 1}
    if begun != b"BEGUN\n" or found not in allowed:
        return (
            f"{way.__name__} with {' '.join(options) or 'no options'}: status {found}, not {status}"
        )
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    wrong = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            wrong += filter(None, [round_of(number, Path(folder))])
    for problem in wrong:
        print(problem)
    conclude(
        f"{rounds - len(wrong)} of {rounds} runs kept their command's status (goal: all)",
        met=not wrong,
    )


if __name__ == "__main__":
    main()
