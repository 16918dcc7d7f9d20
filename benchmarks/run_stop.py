"""Figures: three TERM signals while a failure is analyzed, and an engine's start that fails but does
not end: seconds to the end of the run, and to the relaunch.

In every second round of the first figure the analyst is stopped by SIGSTOP, so that it never
answers. The second figure uses a stand-in for vLLM that prints the log of a failed start and waits.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from support.commands import oomguard_command
from support.figure import conclude

LOG = Path(__file__).parents[1] / "examples" / "logs" / "vllm_serve_kv_cache.log"
STOP_GOAL_S = 2.0
HUNG_GOAL_S = 60.0
STAND_IN = f"""#!{sys.executable}
import sys, time
if "--max-model-len" in sys.argv:
    sys.exit(print("AGAIN", flush=True))
print(open({str(LOG)!r}).read(), flush=True)
print("FAILED", flush=True)
time.sleep(300)
"""


def started(command: list[str], folder: str) -> subprocess.Popen[str]:
    env = {**os.environ, "XDG_STATE_HOME": folder, "TMPDIR": folder}
    return subprocess.Popen(
        [*oomguard_command(), "run", "-v", "--allow", "reduces-capacity", "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )


def stopped_s(*, is_analyst_held: bool) -> float:
    """Return the seconds from the first of three TERMs during the analysis to the end of the run."""
    with tempfile.TemporaryDirectory() as folder:
        process = started(["sh", "-c", f"sleep 1; cat {LOG}; exit 1"], folder)
        assert process.stdout is not None
        for line in process.stdout:
            if "Attempt ended" in line:
                break
        if is_analyst_held:
            for child in psutil.Process(process.pid).children():
                if child.name() == "oomguard-analys":
                    child.suspend()
        began = time.monotonic()
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        process.stdout.read()
        status = process.wait()
        assert status == 128 + signal.SIGTERM, status
        return time.monotonic() - began


def hung_s() -> float:
    """Return the seconds from the failure's last line to the relaunched command's first one."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "vllm"
        program.write_text(STAND_IN)
        program.chmod(0o755)
        process = started([str(program), "serve", "org/model"], folder)
        assert process.stdout is not None
        failed = again = None
        for line in process.stdout:
            if line.strip() == "FAILED":
                failed = time.monotonic()
            if line.strip() == "AGAIN":
                again = time.monotonic()
        status = process.wait()
    assert status == 0, status
    assert failed is not None, "the stand-in printed nothing"
    assert again is not None, "the stand-in was not run again"
    return again - failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds of stops (default 10)")
    rounds = parser.parse_args().rounds
    stops = [stopped_s(is_analyst_held=number % 2 == 1) for number in range(rounds)]
    hung = hung_s()
    conclude(
        f"three TERMs during the analysis end the run after at most {max(stops):.1f} s in {rounds} "
        f"rounds (goal <= {STOP_GOAL_S:.0f} s); a start that hangs is run again after {hung:.0f} s "
        f"(goal <= {HUNG_GOAL_S:.0f} s)",
        met=max(stops) <= STOP_GOAL_S and hung <= HUNG_GOAL_S,
    )


if __name__ == "__main__":
    main()
