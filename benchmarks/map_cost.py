"""Figures of ``oomguard.map``: its own cost beside a bare loop over the same batches, and what resuming a finished map takes.

An item takes 1 ms, whatever else the machine does: the function looks at the clock. Loop and map take turns, each over all items; what
is compared is each pair. The finished map is resumed in a process of its own, which reads its items from a file line by line.
"""

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import oomguard
from support.figure import conclude
from support.paired import interval, trimmed

ITEM_S, BATCH = 0.001, 32
MIB = 2**20
GOAL_RATIO, GOAL_S, GOAL_BYTES = 1.05, 5.0, 200 * MIB


def slow(items: list[str]) -> list[int]:
    """Take 1 ms an item."""
    end = time.perf_counter() + ITEM_S * len(items)
    while time.perf_counter() < end:
        pass
    return [len(item) for item in items]


def lengths(items: list[str]) -> list[int]:
    return [len(item) for item in items]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cost(folder: Path, count: int, rounds: int) -> list[float]:
    """Return the logarithms of map's time to the loop's, pair by pair."""
    items = [f"prompt {number}" for number in range(count)]
    logs = []
    for number in range(rounds):
        store = folder / f"{number}.sqlite"

        def loop() -> None:
            for start in range(0, count, BATCH):
                slow(items[start : start + BATCH])

        def mapped(store: Path = store) -> None:
            oomguard.map(slow, items, store=store, batch_size=BATCH, identity={"of": "lengths"})

        took = {work: timed(work) for work in ((loop, mapped) if number % 2 else (mapped, loop))}
        logs.append(math.log(took[mapped] / took[loop]))
    return logs


def resume() -> None:
    """Be the process that resumes: print its seconds and its peaks."""
    store, prompts = Path(sys.argv[2]), Path(sys.argv[3])
    with prompts.open(encoding="ascii") as lines:
        began = time.perf_counter()
        results = oomguard.map(lengths, lines, store=store, identity={"of": "lengths"})
        took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(took, peak, results.computed, results.reused, results[len(results) // 2])


def main() -> None:
    """Measure both."""
    if sys.argv[1:2] == ["resume"]:
        resume()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--finished", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        logs = cost(folder, arguments.items, arguments.rounds)
        ratio, (low, high) = math.exp(trimmed(logs)), interval(logs)
        print(
            f"{arguments.rounds} x {arguments.items} items of 1 ms in batches of {BATCH}, {len(logs)} pairs: "
            f"map takes {ratio:.4f} of the loop's time ({low:.4f} to {high:.4f}; goal <= {GOAL_RATIO})",
            flush=True,
        )
        prompts, store = folder / "prompts.txt", folder / "finished.sqlite"
        with prompts.open("w", encoding="ascii") as out:
            out.writelines(f"prompt {number}: what does the paper say?\n" for number in range(arguments.finished))
        with prompts.open(encoding="ascii") as lines:
            oomguard.map(lengths, lines, store=store, batch_size=500, identity={"of": "lengths"})
        ran = subprocess.run(
            [sys.executable, __file__, "resume", str(store), str(prompts)], capture_output=True, text=True, check=True
        )
    took, peak, computed, reused, _ = map(float, ran.stdout.split())
    met = high <= GOAL_RATIO and took <= GOAL_S and peak <= GOAL_BYTES and (computed, reused) == (0, arguments.finished)
    conclude(
        f"map: {ratio:.3f} of a bare loop (at most {high:.3f}; goal <= {GOAL_RATIO}); {arguments.finished} finished items resumed in "
        f"{took:.1f} s (goal <= {GOAL_S:.0f}) with a peak of {peak / MIB:.0f} MiB in the whole process (goal <= {GOAL_BYTES // MIB})",
        met=met,
    )


if __name__ == "__main__":
    main()
