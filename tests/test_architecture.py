"""The shape of the tree: imports point one way, files stay short, engines load on use."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oomguard"

# Lower rooms first; a room may import those before it and itself. Rooms of one row do not see each other.
ROOMS = (
    {"_version"},
    {"errors", "escapes", "switch", "decorating", "kept", "live_storages"},
    {"facts"},
    {"incident"},
    {"difference", "memory_plan"},
    {"report", "rules", "log"},
    {"observe"},
    {"memory"},
    {"remedy"},
    {"engines"},
    {"diagnosing", "comparing"},
    {"selftest", "journal"},
    {"splitting", "supervise"},
    {"guarding"},
    {"attempting"},
    {"cli"},
    {"__main__", "__init__"},
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
ENGINES = {"torch", "transformers", "vllm", "numpy", "rich", "structlog", "tenacity", "wrapt"}


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("oomguard"):
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("oomguard.")}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path):
    own = room(path)
    if own in {"__init__", "testing"}:
        return
    for name in imported(ast.parse(path.read_text())):
        assert name == own or LEVEL[name] < LEVEL[own], f"{own} imports {name}"


def test_the_simulated_device_imports_no_more_of_ours_than_errors_and_the_count_of_storages():
    tree = ast.parse((PACKAGE / "testing.py").read_text())
    assert imported(tree) == {"errors", "live_storages"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_is_longer_than_400_lines(path: Path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_libraries_load_on_use(path: Path):
    if path.name in {
        "testing.py",
        "trace_child.py",
        "fake_generate.py",
    }:  # torch's own, or imported where torch is in use
        return
    for node in ast.parse(path.read_text()).body:
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        assert not {name.split(".")[0] for name in names} & ENGINES


def test_there_is_no_drawer_for_everything():
    assert not [p.name for p in SOURCES if p.stem in {"utils", "helpers", "misc", "common", "manager"}]
