"""Kill a process of oomguard with SIGKILL at random moments of a run: no process, no folder and an
intact journal may be left.

Each round starts a run that fails of memory, is run again and then waits, beside a process in a
session of its own, and kills the supervisor, the reaper or the analyst, in turns, between 0 and 2.5
seconds later. Without its analyst the command goes on, and ends by the TERM that follows. 200
rounds by default; with ``--resume FILE`` they go on where they stopped.
"""

import argparse
import contextlib
import os
import random
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import psutil

from support.figure import conclude
from support.resume import Results
from support.supervising import RUN, left, marked, wait_for

ENGINE = Path(__file__).parents[1] / "tests" / "analyst" / "fake_engine.py"
LATEST_S = 2.5
GONE_LIMIT_S = 60
VICTIMS = ("", "oomguard-watch", "oomguard-analys")


def killed_round(number: int, folder: Path) -> list[str]:
    """Kill one run at a moment that follows from its number; return what was left that
    must not be.
    """
    moment_s = random.Random(number).uniform(0, LATEST_S)
    mark = f"round-{number}-{os.getpid()}"
    journal = folder / "journal"
    temporary = folder / f"tmp-{number}"
    temporary.mkdir()
    engine = shlex.join([sys.executable, str(ENGINE), "--mode", "wait"])
    command = [
        *RUN,
        "--journal",
        str(journal),
        "--",
        "sh",
        "-c",
        f'setsid sleep 3600 & {engine} "$@"',
        "sh",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=marked(mark, {"TMPDIR": str(temporary)}),
    ) as process:
        wait_for(lambda: process.poll() is not None, moment_s)
        problems = _kill(process, VICTIMS[number % len(VICTIMS)])
    if not wait_for(lambda: left(mark) == [], GONE_LIMIT_S):
        problems.append(f"processes {left(mark)}")
    if any(
        path.is_dir() for path in temporary.glob("oomguard-*")
    ):  # a file is output that was oomguard could not explain the failure
        problems.append("a folder in the temporary folder")
    if journal.exists():
        with closing(sqlite3.connect(journal)) as database:
            state = database.execute("PRAGMA integrity_check").fetchone()[0]
            if state != "ok":
                problems.append(f"the journal: {state}")
    return [f"killed after {moment_s:.2f} s: {problem}" for problem in problems]


def _kill(process: subprocess.Popen, victim: str) -> list[str]:
    """Kill one process of a run and wait for the run's end; return what is wrong with
    its status.
    """
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children()
        one = next((child for child in children if child.name() == victim), None)
        if victim and one is None:
            victim = ""  # it has not begun, or has ended
        if one is not None:
            one.kill()
    if victim != "oomguard-analys":
        if not victim:
            process.kill()
        process.wait(GONE_LIMIT_S)
        return []
    wait_for(lambda: process.poll() is not None, 1)
    if process.poll() is None:
        process.terminate()
    status = process.wait(GONE_LIMIT_S)
    if status in {1, 143, -15}:
        return []
    return [f"status {status} without the analyst"]


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    results = Results(arguments.resume)
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            problems = results.get(str(number))
            if problems is None:
                problems = killed_round(number, Path(folder))
                results.add(str(number), problems)
            found += problems
    for problem in found:
        print(problem)
    conclude(f"{arguments.rounds} kills: {len(found)} left something (goal: 0)", met=not found)


if __name__ == "__main__":
    main()
