"""What is exported, from metrics.toml: names, labels and help texts stand once."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Place = Literal["run", "scrape", "process"]
_FILE: Final = Path(__file__).with_name("metrics.toml")


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric.

    Attributes:
        name: the whole name, as it is scraped.
        type: ``counter`` or ``gauge``.
        labels: names of its labels, in order.
        figure: the attribute of a tally or a sample that holds it.
        at: where it is exported.
        help: one sentence.
    """

    name: str
    type: str
    labels: tuple[str, ...]
    figure: str
    at: tuple[Place, ...]
    help: str


@functools.cache
def metrics() -> tuple[Metric, ...]:
    """Return all metrics, in the order of their file."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["metric"]
    return tuple(Metric(**{**row, "labels": tuple(row["labels"]), "at": tuple(row["at"])}) for row in rows)
