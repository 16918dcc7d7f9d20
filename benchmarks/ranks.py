"""Figures: one rank of four fails at a random moment, under torchrun and as actors of Ray; one plan, the same patch on all, none waits.

Each round draws the rank that runs out of memory (another one than in the round before), the step and the moment, in a third of the
rounds a second one that does so too with less room, and a wall clock for each rank, up to an hour apart. All ranks run under an
`oomguard run` of their own; under torchrun they meet in a folder of the host, as its agent has started all of them, as actors of Ray in
Ray's key-value store. A round counts where every rank ended with status 0, all ranks ran twice, the second time with the length that
the fullest of those that failed has room for, one rank told of one first cause, and that was one that failed; how long a rank
waited is from the moment that the first one failed until the last one began again. 40 rounds each by default; `--resume FILE` keeps
each round.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.figure import conclude, skip
from support.resume import Results

RANKS = 4
WAIT_GOAL_S = 30.0
LIMIT_S = 300
SUPPORT = Path(__file__).parent / "support" / "ranked"
ROOT = Path(__file__).parents[1]
RUN = [sys.executable, "-m", "oomguard", "run", "--no-pty", "--journal"]


def drawn(number: int, launcher: str, notes: Path) -> dict[str, Any]:
    """Draw a round."""
    chance = random.Random(f"{launcher} {number}")
    rank = (number + chance.choice([0, 0, 1])) % RANKS if number % 2 else (number // 2) % RANKS
    room = {str(rank): chance.choice([1792, 4096, 8192])}
    if number % 3 == 2:
        room[str((rank + 1 + chance.randrange(RANKS - 1)) % RANKS)] = chance.choice([1024, 2048])
    return {
        "room_tokens": room,
        "step": chance.randrange(6),
        "after_s": round(chance.uniform(0, 0.5), 3),
        "skew_s": {str(one): round(chance.uniform(-1800, 1800), 3) for one in range(RANKS)},
        "notes": str(notes),
        "group": "gloo" if launcher == "torchrun" else "files",
    }


def variables(draw: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return what each rank is started with."""
    return {
        "DRAWN": json.dumps(draw),
        "SKEW_S": json.dumps(draw["skew_s"]),
        "PYTHONPATH": f"{SUPPORT / 'skewed'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
    }


def by_torchrun(draw: dict[str, Any], folder: Path) -> tuple[list[int], str]:
    """Run a round under torchrun; return its status for each rank, and all that was printed."""
    command = [*RUN, str(folder / "journal.sqlite3"), "--", sys.executable, str(SUPPORT / "rank.py")]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        "--no-python",
    ]
    ran = subprocess.run(
        [*launcher, *command],
        env={**os.environ, **variables(draw, folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return [ran.returncode] * RANKS, ran.stdout + ran.stderr


def by_ray(draw: dict[str, Any], folder: Path, address: str) -> tuple[list[int], str]:
    """Run a round as actors of a Ray job; return the status of each rank, and all that was printed."""
    job = [sys.executable, str(SUPPORT / "rank.py")]
    commands = [[*RUN, str(folder / "journal.sqlite3"), "--rendezvous", f"ray://{address}", "--", *job]] * RANKS
    asked = {"address": address, "commands": commands, "env": variables(draw, folder)}
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "on_ray.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        check=False,
    )
    if ran.returncode:
        return [ran.returncode] * RANKS, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    return [status for status, _ in told], "".join(output for _, output in told)


def attempts_of(path: Path) -> list[dict[str, Any]]:
    """Return what a rank noted, an attempt each: its length, and when it began, failed and ran to its end."""
    attempts: list[dict[str, Any]] = []
    for row in map(json.loads, path.read_text().splitlines() if path.is_file() else []):
        if row["what"] == "began":
            attempts.append({"length": row["length"]})
        attempts[-1][row["what"]] = row["at_s"]
    return attempts


def judged(draw: dict[str, Any], statuses: list[int], text: str) -> dict[str, Any]:
    """Return what went wrong in a round, and how long a rank waited."""
    ranks = [attempts_of(Path(draw["notes"]) / f"{rank}.log") for rank in range(RANKS)]
    problems = [f"status of rank {rank}: {status}" for rank, status in enumerate(statuses) if status]
    lengths = [[attempt["length"] for attempt in attempts] for attempts in ranks]
    if (
        any(one != lengths[0] for one in lengths)
        or len(lengths[0]) < 2
        or lengths[0][-1] != min(draw["room_tokens"].values())
    ):
        problems.append(f"lengths by rank: {lengths}")
    problems += [
        f"rank {rank} has not run to its end" for rank in range(RANKS) if not any("ran" in one for one in ranks[rank])
    ]
    waited_s, told = 0.0, [int(rank) for rank in re.findall(r"note: first: rank (\d)", text)]
    for number in range(len(lengths[0]) - 1 if not problems else 0):
        failed = {rank: ranks[rank][number]["failed"] for rank in range(RANKS) if "failed" in ranks[rank][number]}
        again_s = max(attempts[number + 1]["began"] for attempts in ranks)
        waited_s = max(waited_s, again_s - min(failed.values()))
        if told[number : number + 1] == [] or told[number] not in failed:
            problems.append(f"told as first: {told}, failed: {sorted(failed)}")
    if len(told) > len(lengths[0]) - 1:
        problems.append(f"told {len(told)} times")
    return {"problems": problems, "waited_s": waited_s, "text": text[-6000:] if problems else ""}


def one_round(number: int, launcher: str, address: str) -> dict[str, Any]:
    """Run and judge one round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        draw = drawn(number, launcher, folder / "notes")
        began_s = time.monotonic()
        try:
            ran = by_ray(draw, folder, address) if launcher == "Ray" else by_torchrun(draw, folder)
        except subprocess.TimeoutExpired:
            ran = [1] * RANKS, f"not ended after {LIMIT_S} s"
        result = judged(draw, *ran) | {"draw": draw, "seconds": round(time.monotonic() - began_s, 1)}
    state = "; ".join(result["problems"]) or f"waited {result['waited_s']:.1f} s"
    print(f"{launcher} round {number}: {state} ({result['seconds']} s)", flush=True)
    return result


def main() -> None:
    """Run the rounds of each launcher."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--launcher", choices=["torchrun", "Ray"], action="append")
    parser.add_argument("--resume", type=Path)
    asked = parser.parse_args()
    try:
        import ray
        import torch  # noqa: F401 - asked for before the rounds
    except ImportError as error:
        skip(f"needs {error.name}")
    results, lines, met = Results(asked.resume), [], True
    for launcher in asked.launcher or ["torchrun", "Ray"]:
        address = ""
        if launcher == "Ray":
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            ray.init("local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False, logging_level="error")
            address = ray.get_runtime_context().gcs_address
        rounds = [
            results.kept(
                f"{launcher} {number}",
                lambda number=number, launcher=launcher, address=address: one_round(number, launcher, address),
            )
            for number in range(asked.rounds)
        ]
        if launcher == "Ray":
            ray.shutdown()
        bad = [row for row in rounds if row["problems"]]
        waited_s = max(row["waited_s"] for row in rounds)
        met = met and not bad and waited_s <= WAIT_GOAL_S
        lines.append(
            f"{launcher}: {len(rounds) - len(bad)} of {len(rounds)} rounds with one plan and the same patch on all (goal: all), no rank"
            f" waited longer than {waited_s:.1f} s (goal: {WAIT_GOAL_S:g} s)"
        )
        for row in bad:
            print(f"{launcher}: {row['problems']}\n{row['text']}")
    conclude("; ".join(lines), met=met)


if __name__ == "__main__":
    main()
