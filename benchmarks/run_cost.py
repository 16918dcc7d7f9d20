"""Figure: what `oomguard run -- true` costs: modules that it imports, time beside `python -c pass`,
and its resident memory.

The times are medians of alternating rounds, so that other work on the machine is in both. Modules
are counted without those that any Python imports as it starts.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.commands import oomguard_command
from support.figure import conclude

GOAL_MODULES = 90
GOAL_MS = 120
GOAL_MIB = 25
# The supervisor, and what comes before it: the package itself, the safe path and the switch that
# turns everything off.
OURS = (
    "oomguard",
    "oomguard.__main__",
    "oomguard.core",
    "oomguard.core.process",
)
_BARE = [sys.executable, "-c", "pass"]
# What the installed script does.
_AS_SCRIPT = [
    sys.executable,
    "-X",
    "importtime",
    "-c",
    "import sys; from oomguard.__main__ import main; sys.exit(main())",
]


def imported(command: list[str], env: dict[str, str]) -> set[str]:
    """Return the modules that a Python command imports."""
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    lines = (line for line in ran.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines} - {"imported package"}


def modules(env: dict[str, str]) -> tuple[set[str], set[str]]:
    """Return the modules of a run beyond those of any Python, and those of ours that belong to no
    run.
    """
    bare = imported([sys.executable, "-X", "importtime", "-c", "pass"], env)
    found = imported([*_AS_SCRIPT, "run", "--", "true"], env) - bare
    ours = {name for name in found if name.partition(".")[0] == "oomguard"}
    return found, {
        name for name in ours if name not in OURS and not name.startswith("oomguard.supervisor")
    }


def resident_mib(env: dict[str, str]) -> float:
    """Return the most memory that the supervisor had, in MiB."""
    show = ["sh", "-c", "grep VmHWM /proc/$OOMGUARD_OUTER_RUN/status"]
    ran = subprocess.run(
        [*oomguard_command(), "run", "--", *show],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(ran.stdout.split()[1]) / 1024


def later_ms(rounds: int, env: dict[str, str]) -> float:
    """Return how much longer a run takes than a bare Python, in milliseconds."""
    took: dict[str, list[float]] = {"bare": [], "run": []}
    for _ in range(rounds + 1):  # the first one warms the caches
        for name, command in (("bare", _BARE), ("run", [*oomguard_command(), "run", "--", "true"])):
            began = time.perf_counter()
            subprocess.run(command, check=True, env=env)
            took[name].append((time.perf_counter() - began) * 1e3)
    return statistics.median(took["run"][1:]) - statistics.median(took["bare"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each (default 20)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_STATE_HOME": str(Path(folder) / "state")}
        os.chdir(folder)  # a pyproject.toml of the working directory may ask for the analyst
        found, others = modules(env)
        mib = resident_mib(env)
        ms = later_ms(rounds, env)
    conclude(
        f"run -- true imports {len(found)} modules (goal <= {GOAL_MODULES}), {len(others)} of ours "
        "outside the supervisor (goal 0), "
        f"takes {ms:.0f} ms more than python -c pass (goal <= {GOAL_MS}) and {mib:.1f} MiB (goal "
        f"<= {GOAL_MIB})",
        met=len(found) <= GOAL_MODULES and not others and ms <= GOAL_MS and mib <= GOAL_MIB,
    )


if __name__ == "__main__":
    main()
