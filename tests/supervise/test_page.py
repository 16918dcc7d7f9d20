"""docs/supervision.md: each row of its tables is held by a test that is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "supervision.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and ".py::" in line]


def held_in(name: str) -> set[str]:
    tree = ast.parse((HERE / name).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_each_row_names_a_test_that_is_there(row: str):
    name, _, test = row.rstrip(" |").rpartition("| ")[2].strip("`").partition("::")
    assert test in held_in(name)


def test_every_row_of_the_tables_is_held_by_a_test():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| what happens")]
    assert rows == ROWS
    assert len(rows) > 70
