"""The shape of the tree: imports point one way, files stay short, engines load on use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oomguard"

# Lower rooms first; a room may import those before it and itself. Rooms of one row do not see each other.
ROOMS = (
    {"_version", "regular_file"},
    {
        "clean_start",
        "errors",
        "escapes",
        "exit_status",
        "installation",
        "fact_registry",
        "records",
        "switch",
        "user_files",
        "live_storages",
        "loading",
        "partial",
    },
    {"facts"},
    {"templates"},
    {"kinds", "missing", "snapshots"},
    {"incident"},
    {"log", "past_runs", "settings", "timeline"},
    {"surfaces"},
    {"assignments"},
    {"rules"},
    {"observe"},
    {"memory"},
    {"remedy"},
    {"engines"},
    {"diagnosing"},
    {"budgeting", "comparing", "fleet"},
    {"placement"},
    {"report"},
    {"rule_testing", "journal"},
    {"attempting", "checking", "telemetry"},
    {"guarding", "supervise", "testing"},
    {"instrumentation", "mapping", "ranks", "serving"},
    {"schedulers"},
    {"cli"},
    {"__main__", "__init__"},
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
ENGINES = {
    "torch",
    "transformers",
    "vllm",
    "numpy",
    "matplotlib",
    "rich",
    "structlog",
    "tenacity",
    "wrapt",
    "prometheus_client",
    "opentelemetry",
    "ray",
    "fsspec",
}


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST, below: str = "oomguard") -> set[str]:
    """The rooms of the package ``below`` that a file imports."""
    depth = below.count(".") + 1
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(f"{below}."):
            parts = node.module.split(".")
            names |= {parts[depth]} if len(parts) > depth else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[depth] for alias in node.names if alias.name.startswith(f"{below}.")}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path):
    own = room(path)
    if own == "__init__":
        return
    for name in imported(ast.parse(path.read_text())):
        assert name == own or LEVEL[name] < LEVEL[own], f"{own} imports {name}"


# The same inside memory/: constants and bytes first, then the model, then what vLLM and a call of generate make of it.
ROOMS_OF_MEMORY = (
    {"constants", "child", "shares", "explicit_pool", "static_share"},
    {"ceilings", "model"},
    {"derive", "vllm", "generate"},
)
LEVEL_IN_MEMORY = {room: level for level, rooms in enumerate(ROOMS_OF_MEMORY) for room in rooms}
MEMORY = PACKAGE / "memory"


@pytest.mark.parametrize("path", sorted(MEMORY.rglob("*.py")), ids=lambda p: str(p.relative_to(MEMORY)))
def test_inside_memory_a_model_knows_no_engine_and_engines_do_not_know_each_other(path: Path):
    own = path.relative_to(MEMORY).parts[0].removesuffix(".py")
    for name in imported(ast.parse(path.read_text()), below="oomguard.memory"):
        assert name == own or LEVEL_IN_MEMORY[name] < LEVEL_IN_MEMORY[own], f"memory/{own} imports memory/{name}"


def test_the_simulated_device_imports_no_more_of_ours_than_counting_takes():
    files = [path for path in (PACKAGE / "testing").glob("*.py") if path.stem not in ("pytest_plugin", "failed_test")]
    rooms = {name for path in files for name in imported(ast.parse(path.read_text()))}
    assert rooms - {"testing"} == {"errors", "live_storages", "memory"}


def test_pytest_starts_without_torch_and_without_what_a_diagnosis_takes():
    code = (
        "import sys, oomguard.testing.pytest_plugin; print(sorted(m for m in sys.modules if m.startswith('oomguard.')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    rooms = {name.split(".")[1] for name in ast.literal_eval(ran.stdout)}
    assert rooms == {"_version", "errors", "switch", "testing"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_is_longer_than_300_lines(path: Path):
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_libraries_load_on_use(path: Path):
    if path.name in {
        "simulated_device.py",
        "trace_child.py",
        "draws.py",
        "drawing.py",
        "fake_copies.py",
        "fake_memory.py",
        "fake_forward.py",
        "fake_generate.py",
        "fake_in_place.py",
        "fake_moves.py",
        "follow_rows.py",
        "known_values.py",
        "left_behind.py",
        "origin.py",
        "own_operations.py",
        "parts_of_rows.py",
        "rows_mixed.py",
        "rows_order.py",
        "rows_placed.py",
        "rows_together.py",
        "rows_on_device.py",
        "rows_on_host.py",
        "scratch.py",
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


def test_only_records_that_show_themselves_ask_the_packages_public_face():
    asking = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import) and any(alias.name == "oomguard" for alias in node.names):
                asking.add(path.relative_to(PACKAGE).as_posix())
    assert asking == {"incident.py", "records.py"}


@pytest.mark.parametrize("name", ["report", "journal", "cli", "comparing", "checking"])
def test_answers_in_json_have_one_writer(name: str):
    writers = [path for path in SOURCES if room(path) == name and "json.dumps" in path.read_text()]
    assert writers in ([], [PACKAGE / "report" / "json.py"])


def test_there_is_no_drawer_for_everything():
    assert not [p.name for p in SOURCES if p.stem in {"utils", "helpers", "misc", "common", "manager"}]
