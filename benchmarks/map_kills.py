"""Kill a worker of ``oomguard.map`` with SIGKILL at random moments: every item stored once, and no more computed again than was at work.

Two workers share a map of 1,000 items; one of them is killed again and again, and another takes its place, until the map is done. Maps
follow one another until there were 200 kills. A worker notes each batch before it computes it, so what is computed twice can be held
against what each killed one had at hand.
"""

import argparse
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import oomguard
from support.commands import ROOT
from support.figure import conclude

LATEST_S, ITEM_S, BATCH = 0.8, 0.008, 8
WORKER = "import map_kills; map_kills.work()"


def compute(items: list[int]) -> list[dict[str, int]]:
    """Note a batch in one write, and compute it."""
    with Path("computed.txt").open("a", encoding="ascii") as out:
        out.write(f"{os.getpid()} {' '.join(map(str, items))}\n")
    time.sleep(ITEM_S * len(items))
    return squares(items)


def squares(items: list[int]) -> list[dict[str, int]]:
    return [{"item": item, "square": item * item} for item in items]


def run(count: int) -> oomguard.Results[dict[str, int]]:
    return oomguard.map(compute, range(count), store="results.sqlite", batch_size=BATCH, identity={"of": "squares"})


def work() -> None:
    """Be a worker: what the processes below run."""
    run(int(sys.argv[1]))


def start(folder: Path, count: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    return subprocess.Popen([sys.executable, "-c", WORKER, str(count)], cwd=folder, env=env)


def killed_map(folder: Path, count: int, kills: int, draw: random.Random) -> tuple[list[str], int, int]:
    """Run one map under kills; return what is wrong, how many kills there were, and how many items were computed again."""
    workers = [start(folder, count) for _ in range(2)]
    killed: list[int] = []
    while len(killed) < kills and all(worker.poll() is None for worker in workers):
        time.sleep(draw.uniform(0, LATEST_S))
        side = draw.randrange(2)
        if workers[side].poll() is None:
            workers[side].kill()
            workers[side].wait()
            killed.append(workers[side].pid)
            workers[side] = start(folder, count)
    problems = [f"a worker ended with {worker.returncode}" for worker in workers if worker.wait() != 0]
    again, wrong = counted(folder, count, killed)
    return [*problems, *wrong, *stored(folder, count)], len(killed), again


def counted(folder: Path, count: int, killed: list[int]) -> tuple[int, list[str]]:
    """Return how often an item was computed again, and which of them no killed worker had at hand."""
    batches = [list(map(int, line.split())) for line in (folder / "computed.txt").read_text().splitlines()]
    last = {pid: items for pid, *items in batches}
    at_hand = Counter(item for pid in killed for item in last.get(pid, ()))
    times = Counter(item for _, *items in batches for item in items)
    missing = [f"item {item} was never computed" for item in range(count) if not times[item]]
    extra = times - Counter(range(count))
    return extra.total(), missing + [f"item {item} was computed again without a kill" for item in extra - at_hand]


def stored(folder: Path, count: int) -> list[str]:
    """Return what is wrong with the store, and with the results that a last call gives."""
    with closing(sqlite3.connect(folder / "results.sqlite")) as database:
        rows = database.execute("SELECT count(*), count(DISTINCT item) FROM result").fetchone()
        state = database.execute("PRAGMA integrity_check").fetchone()[0]
    before = Path.cwd()
    os.chdir(folder)
    try:
        results = run(count)
        found = list(results)
    finally:
        os.chdir(before)
    wrong = [] if rows == (count, count) else [f"{rows[0]} results of {rows[1]} items are stored"]
    wrong += [] if state == "ok" else [f"the store: {state}"]
    wrong += [] if results.computed == 0 else [f"{results.computed} items were not stored"]
    return wrong + ([] if found == squares(list(range(count))) else ["the results are not those of an undisturbed run"])


def main() -> None:
    """Run maps until there were enough kills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--items", type=int, default=1000)
    arguments = parser.parse_args()
    draw, kills, again, maps, found = random.Random(0), 0, 0, 0, list[str]()
    while kills < arguments.kills:
        with tempfile.TemporaryDirectory() as folder:
            problems, were, repeated = killed_map(Path(folder), arguments.items, arguments.kills - kills, draw)
        kills, again, maps, found = kills + were, again + repeated, maps + 1, found + problems
        print(f"map {maps}: {were} kills, {repeated} items computed again, {len(problems)} problems", flush=True)
    for problem in found:
        print(problem)
    conclude(
        f"{kills} kills in {maps} maps of {arguments.items} items, two workers: each stored once with the results of an undisturbed run, "
        f"{again} items in flight computed again, {len(found)} problems (goal: 0)",
        met=not found,
    )


if __name__ == "__main__":
    main()
