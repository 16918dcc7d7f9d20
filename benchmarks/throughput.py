"""Figure: time and memory of the whole command on a long vLLM log with three incidents, beside
ripgrep with the same anchors.

The log is made once for each size and kept in the temporary folder. After one pass that warms the
page cache, the two commands run in turn, then oomguard without the extra ``fast``; the smallest
times are compared. Anonymous memory is that of the command's whole process tree. With --beside PATH
the other command is that of another checkout, under this Python, and processor time counts: other
work on the machine does not lengthen it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from support.commands import ROOT, of_checkout, oomguard_command, processor_seconds, seconds
from support.figure import conclude, skip
from support.memory import anonymous_bytes
from support.vllm_log import FOLDER, INCIDENTS, make_log

RATIO_GOAL = 0.95
WITHOUT_GOAL = 3.0
ANONYMOUS_GOAL_MIB = 150
# Two runs of one checkout differ by so much.
SAME_RATIO = 1.02
POLL_S = 0.02
WITHOUT_LIBRARY = (
    "import sys; sys.modules['hyperscan'] = None; from oomguard.__main__ import main; main()"
)


def make_anchors() -> Path:
    """Every anchor, one a line, as ripgrep reads them."""
    from oomguard.rules.rule_files import load_rules

    anchors = sorted(set(load_rules().anchors))
    path = FOLDER / "anchors.txt"
    path.write_text("".join(f"{anchor}\n" for anchor in anchors), encoding="utf-8")
    return path


def timed(command: list[str]) -> tuple[float, int, str]:
    """Seconds, peak anonymous bytes and output of a command that has to succeed."""
    peak = [0]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            peak[0] = max(peak[0], anonymous_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, error = process.communicate()
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {error[-500:]}")
    return seconds, peak[0], output


def beside_checkout(log: Path, other: Path, rounds: int) -> None:
    """Compare the processor time of two checkouts, in turn."""
    command = [sys.executable, "-P", "-m", "oomguard", "diagnose", "--format", "json", str(log)]
    with tempfile.TemporaryDirectory() as caches:
        environments = [of_checkout(path, Path(caches) / path.name) for path in (ROOT, other)]
        took: list[list[float]] = [[], []]
        for environment in environments:
            seconds(command, environment)  # warm: the first run compiles the anchors
        for number in range(rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                took[side].append(processor_seconds(command, environments[side]))
    ours, theirs = map(min, took)
    conclude(
        f"{log.stat().st_size / 2**30:.2f} GiB: {ours:.2f} s of processor time, of the other "
        f"checkout {theirs:.2f} s: "
        f"ratio {ours / theirs:.2f} (goal: no slower, so at most {SAME_RATIO})",
        met=ours / theirs <= SAME_RATIO,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", type=float, default=2.0, metavar="GIB", help="size of the log in GiB (default 2)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default 3)")
    parser.add_argument("--jobs", help="hand --jobs to the command")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="PATH",
        help="another checkout, such as the commit before a change",
    )
    options = parser.parse_args()
    if options.beside is not None:
        beside_checkout(
            make_log(int(options.size * 2**30)), options.beside.resolve(), options.rounds
        )
        return
    ripgrep = shutil.which("rg")
    if ripgrep is None:
        skip("ripgrep is missing: apt-get install -y ripgrep")
    log = make_log(int(options.size * 2**30))
    anchors = make_anchors()
    with log.open("rb") as stream:  # the page cache is warm for both
        while stream.read(1 << 24):
            pass
    if options.jobs:
        jobs = ["--jobs", options.jobs]
    else:
        jobs = []
    ours = [*oomguard_command(), "diagnose", "--format", "json", *jobs, str(log)]
    theirs = [ripgrep, "-c", "-F", "-f", str(anchors), str(log)]
    without = [
        sys.executable,
        "-c",
        WITHOUT_LIBRARY,
        "diagnose",
        "--format",
        "json",
        *jobs,
        str(log),
    ]
    our_seconds = []
    their_seconds = []
    without_seconds = []
    peak = 0
    for round_number in range(options.rounds):
        seconds, anonymous, output = timed(ours)
        our_seconds.append(seconds)
        peak = max(peak, anonymous)
        seconds, _, count = timed(theirs)
        their_seconds.append(seconds)
        seconds, anonymous, plain_output = timed(without)
        without_seconds.append(seconds)
        peak = max(peak, anonymous)
        print(
            f"round {round_number + 1}: oomguard {our_seconds[-1]:.2f} s, ripgrep "
            f"{their_seconds[-1]:.2f} s, "
            f"oomguard without the extra fast {seconds:.2f} s",
            flush=True,
        )
    size = log.stat().st_size
    kinds = [incident["kind"] for incident in json.loads(output)["incidents"]]
    expected = [kind for _, kind, _ in INCIDENTS]
    print(
        f"{size / 2**30:.2f} GiB, {len(anchors.read_text().splitlines())} anchors, {count.strip()} "
        "lines with one"
    )
    print(
        f"incidents: {', '.join(kinds) or 'none'} "
        f"({'as made' if kinds == expected else f'MADE: {expected}'})"
    )
    ratio = min(our_seconds) / min(their_seconds)
    without_ratio = min(without_seconds) / min(our_seconds)
    same = plain_output == output
    print(f"without the extra fast: {'the same answer' if same else 'ANOTHER ANSWER'}")
    conclude(
        f"oomguard {min(our_seconds):.2f} s ({size / min(our_seconds) / 1e9:.2f} GB/s), ripgrep "
        f"{min(their_seconds):.2f} s "
        f"({size / min(their_seconds) / 1e9:.2f} GB/s): ratio {ratio:.2f} (goal <= {RATIO_GOAL}); "
        f"without the extra fast {without_ratio:.2f} times as long (goal <= {WITHOUT_GOAL:.0f}); "
        f"anonymous memory {peak / 2**20:.0f} MiB (goal <= {ANONYMOUS_GOAL_MIB})",
        met=ratio <= RATIO_GOAL
        and without_ratio <= WITHOUT_GOAL
        and peak <= ANONYMOUS_GOAL_MIB * 2**20
        and kinds == expected
        and same,
    )


if __name__ == "__main__":
    main()
