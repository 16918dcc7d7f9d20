"""Figure: a server prints 100,000 refused allocations and dies: time from its end to the end of
`oomguard run`; scanning in MB/s.
"""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time

from oomguard.rules.rule_files import load_rules
from oomguard.scan.anchors import finder, skim
from support.commands import oomguard_command
from support.figure import conclude

GOAL_S = 10.0
GOAL_MB_A_S = 50.0
LINE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}.00 GiB. GPU 0 has a total "
    "capacity of 23.64 GiB "
    "of which 1.00 GiB is free.\n"
)
PRINTER = (
    "import sys, time\n"
    "line = sys.argv[1]\n"
    "sys.stdout.write(''.join(line.format(n % 1000) for n in range(int(sys.argv[2]))))\n"
    "sys.stdout.flush()\n"
    "sys.stderr.write(f'ended {time.time()}\\n')\n"
    "sys.exit(4)\n"
)


def run_s(count: int) -> float:
    """Return the seconds from the end of the command to the end of the run."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_STATE_HOME": folder, "TMPDIR": folder}
        command = [
            *oomguard_command(),
            "run",
            "--",
            sys.executable,
            "-c",
            PRINTER,
            LINE,
            str(count),
        ]
        ran = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=folder,
            env=env,
        )
        ended = time.time()
    assert ran.returncode == 4, ran
    assert "oomguard could not explain the failure" not in ran.stderr, ran.stderr
    return ended - float(ran.stderr.partition("ended ")[2].split()[0])


def mb_a_s(count: int) -> float:
    """Return how fast such a log is read, its first part aside."""
    rules = load_rules()

    def took_s(lines: int) -> tuple[int, float]:
        data = "".join(LINE.format(number % 1000) for number in range(lines)).encode()
        began = time.process_time()
        for _ in skim(io.BytesIO(data), lambda: finder(rules.anchors)):
            pass
        return len(data), time.process_time() - began

    (little, little_s), (much, much_s) = took_s(count // 2), took_s(2 * count)
    return (much - little) / 1e6 / (much_s - little_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=100_000)
    lines = parser.parse_args().lines
    seconds = run_s(lines)
    speed = mb_a_s(lines)
    conclude(
        f"{lines:,} lines: the run ends {seconds:.1f} s after its command (goal <= {GOAL_S:.0f} "
        "s), "
        f"read at {speed:.0f} MB/s (goal >= {GOAL_MB_A_S:.0f})",
        met=seconds <= GOAL_S and speed >= GOAL_MB_A_S,
    )


if __name__ == "__main__":
    main()
