"""The command line that the benchmarks over testers' vLLM cases share."""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from support.figure import skip
from support.resume import Results
from support.stranger_case import read_cases
from support.stranger_run import BINARIES


def asked_cases(purpose: str, name: str) -> tuple[list[dict[str, Any]], Results]:
    """Return the cases of a set that the command line asks for, and the results kept of them.

    Skip without a vLLM environment. A TERM then ends what a case has started before the benchmark
    itself.
    """
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="only cases whose name begins so")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps each start's result; starts in it are not run again",
    )
    asked = parser.parse_args()
    cases = [case for case in read_cases(name) if case["name"].startswith(asked.only)]
    if not cases:
        parser.error(f"no case begins with {asked.only!r}")
    if not (BINARIES / "vllm").is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return cases, Results(asked.resume)
