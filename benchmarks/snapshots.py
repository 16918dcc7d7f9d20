"""Figure: what reading an allocation snapshot takes, and that no pickle of twenty hostile kinds runs anything.

The snapshot has 1,000,000 blocks (--blocks N), each live one with a stack of its own. The time and the peak memory are those of the
whole command, JSON and HTML; then each hostile pickle is given to the command, which has to refuse it within a second of its own.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.commands import oomguard_command
from support.figure import conclude
from support.hostile_pickles import hostile_pickles
from support.made_snapshots import write_large

BLOCKS, GOAL_S, GOAL_MIB = 1_000_000, 10.0, 1024
REFUSED = 2
LIMIT_S = 60


def measured(command: list[str]) -> tuple[int, float, float, float]:
    """Run a command; return its exit status, the seconds it took, those of a processor, and the most MiB that it held."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def read_large(folder: Path, blocks: int) -> tuple[float, float]:
    """Write and read the large snapshot; return the seconds and the MiB of the worse of both forms."""
    path = folder / "snapshot.pickle"
    # In a process of its own: its memory is not this one's, whose children would start with it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(write_large, (path, blocks))
    size_mib = path.stat().st_size / 2**20
    worst_s = worst_mib = 0.0
    for form in ("json", "html"):
        status, took_s, worked_s, held_mib = measured([*oomguard_command(), "diagnose", "--format", form, str(path)])
        figures = f"{took_s:.1f} s ({worked_s:.1f} s of a processor), {held_mib:.0f} MiB, exit {status}"
        print(f"{blocks:,} blocks, {size_mib:.0f} MiB, {form}: {figures}", flush=True)
        if status != 0:
            sys.exit(f"diagnose of the snapshot ended with {status}")
        worst_s, worst_mib = max(worst_s, took_s), max(worst_mib, held_mib)
    path.unlink()
    return worst_s, worst_mib


def refuse_hostile(folder: Path) -> tuple[int, int, int]:
    """Give each hostile pickle to the command; return how many there are, how many were refused, and how many ran something."""
    marker, refused, ran = folder / "marker", 0, 0
    kinds = hostile_pickles(marker)
    for number, (name, content) in enumerate(kinds.items()):
        path = folder / f"{number}.pickle"
        path.write_bytes(content)
        ended = subprocess.run(
            [*oomguard_command(), "diagnose", str(path)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        is_refused = ended.returncode == REFUSED and "Traceback" not in ended.stderr
        refused += is_refused
        ran += marker.exists()
        marker.unlink(missing_ok=True)
        said = next((line for line in ended.stderr.splitlines() if line), "")
        print(
            f"{name}: {'refused' if is_refused else 'NOT REFUSED'}: {said.partition('snapshot: ')[2] or said}",
            flush=True,
        )
    return len(kinds), refused, ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS, metavar="N", help="blocks of the snapshot")
    blocks = parser.parse_args().blocks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        took_s, held_mib = read_large(folder, blocks)
        kinds, refused, ran = refuse_hostile(folder)
    conclude(
        f"{blocks:,} blocks: {took_s:.1f} s (goal <= {GOAL_S:.0f}), {held_mib:.0f} MiB (goal <= {GOAL_MIB}); "
        f"{kinds} hostile pickles: {refused} refused, {ran} ran something (goal: 0)",
        met=took_s <= GOAL_S and held_mib <= GOAL_MIB and refused == kinds and ran == 0,
    )


if __name__ == "__main__":
    main()
