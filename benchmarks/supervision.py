"""Figure: the rows of docs/supervision.md and the test cases that hold them, all run."""

import argparse
import re
import subprocess
import sys

from support.commands import ROOT
from support.figure import conclude

PAGE, TESTS = ROOT / "docs" / "supervision.md", ROOT / "tests" / "supervise"
CASES_GOAL = 150


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    held = re.findall(r"^\| .*\| `(test_\w+\.py::test_\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *(str(TESTS / name) for name in dict.fromkeys(held))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(ran.stdout[-2000:])
    passed = int((re.search(r"(\d+) passed", ran.stdout) or [0, 0])[1])
    conclude(
        f"{len(held)} rows of the page on signals and processes, {passed} cases, {'all' if not ran.returncode else 'not all'} "
        f"hold (goal: all, >= {CASES_GOAL} cases)",
        met=not ran.returncode and passed >= CASES_GOAL,
    )


if __name__ == "__main__":
    main()
