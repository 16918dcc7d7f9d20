"""The end of every benchmark: its figure beside the goal in one last line, and the goal's verdict
as exit status.
"""

import sys
from typing import NoReturn

# the status by which a run says that it could not measure; automake and many others use the same
SKIPPED = 77


def conclude(figure: str, *, met: bool) -> NoReturn:
    """Print the last line and end: status 0 where the goal is met, 1 where it is missed."""
    print(f"{figure}: {'met' if met else 'NOT MET'}", flush=True)
    sys.exit(0 if met else 1)


def skip(reason: str) -> NoReturn:
    """End without a figure: what it is measured with is not here."""
    print(f"skipped: {reason}", flush=True)
    sys.exit(SKIPPED)
