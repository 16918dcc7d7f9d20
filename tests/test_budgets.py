"""No budget has parts above its device without saying which printed numbers contradict each other, over all logs at hand."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oomguard.diagnosis import diagnose

ROOT = Path(__file__).parents[1]
_SHORTEST_LOG_CHARS = 60


def _logs(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".log", ".txt"}:
            yield path.read_text(encoding="utf-8", errors="replace")
        elif path.suffix == ".jsonl":
            rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            yield from (row["text"] for row in rows if isinstance(row, dict) and "text" in row)
        elif path.suffix == ".toml":
            yield from _texts(tomllib.loads(path.read_text(encoding="utf-8")))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from [value] if len(value) > _SHORTEST_LOG_CHARS else []
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _above_device(logs: Iterator[str]) -> tuple[int, list[str]]:
    """Return how many budgets have a device, and those that exceed it in silence."""
    counted, above = 0, []
    for log in logs:
        diagnosis = diagnose(log if "\n" in log else f"{log}\n")
        for record in (*diagnosis.incidents, *diagnosis.starts):
            budget = record.budget
            if budget.device_total_bytes is None:
                continue
            counted += 1
            sum_bytes = sum(part.bytes for part in budget.parts)
            if sum_bytes > max(0, budget.device_total_bytes) and budget.conflict is None:
                above.append(f"{sum_bytes} > {budget.device_total_bytes}: {log[:200]!r}")
    return counted, above


@pytest.mark.parametrize(
    ("folder", "least"), [("rules", 40), ("tests", 40), ("benchmarks/data", 30), ("examples", 1)]
)
def test_no_budget_of_a_log_of_ours_exceeds_its_device(folder, least):
    counted, above = _above_device(_logs(ROOT / folder))

    assert counted >= least
    assert above == []


@pytest.mark.parametrize(("folder", "least"), [("corpus", 140), ("faults", 5), ("seeds", 0)])
def test_no_budget_of_a_labelled_log_exceeds_its_device(shared, folder, least):
    counted, above = _above_device(_logs(shared / folder))

    assert counted >= least
    assert above == []
