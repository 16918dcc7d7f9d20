"""Tell which starts of a file the fit of a plan's constants has seen: ``unseen_starts.py
FILE.jsonl``; status 1 where it has seen any.

The same log is found in several places and under several names, so a set gathered blind may hold
starts that the constants were fitted on: of two such sets, 18 of 24 and 15 of 30 were. Figures with
decimals, and counts of tens of thousands of tokens, are hardly ever the same in two logs: a start
that shares three of them with one of benchmarks/data or ../shared is that one.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.figure import conclude
from support.published import published

SHARED_FIGURES = 3
LEAST_COUNT = 10_000


def telling(printed: Any) -> Iterator[float]:
    """Yield the figures of a start that tell it from others."""
    if isinstance(printed, dict):
        for value in printed.values():
            yield from telling(value)
    elif isinstance(printed, (int, float)) and (printed != int(printed) or printed > LEAST_COUNT):
        yield round(float(printed), 4)


def seen(starts: Sequence[dict[str, Any]], known: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the starts that are known, by their names, each with the name of the one that printed
    the same.
    """
    figures = {row["id"]: set(telling(row["printed"])) for row in known}
    found = {}
    for start in starts:
        own = set(telling(start["printed"]))
        nearest = max(figures, key=lambda name: len(own & figures[name]), default=None)
        if nearest is not None and len(own & figures[nearest]) >= SHARED_FIGURES:
            found[start["id"]] = nearest
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "file",
        type=Path,
        help="starts, one JSON object a line, as benchmarks/data/starts.jsonl has them",
    )
    starts = [json.loads(line) for line in parser.parse_args().file.read_text().splitlines()]
    found = seen(starts, published())
    for name, known in found.items():
        print(f"{name}: the fit has it, as {known}")
    conclude(f"{len(starts) - len(found)} of {len(starts)} starts are unseen", met=not found)


if __name__ == "__main__":
    main()
