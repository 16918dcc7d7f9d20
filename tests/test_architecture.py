"""The shape of the tree: imports point one way, engines load on use."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "oomguard"

# Lower rooms first; a room may import those before it and itself. Rooms of one row do not see each other.
ROOMS = (
    {"_version", "supervisor"},
    {"core"},
    {"probe"},
    {"rules"},
    {"scan"},
    {"estimate"},
    {"remedy"},
    {"engines"},
    {"diagnosis"},
    {"planning", "comparison"},
    {"report"},
    {"journal", "retry", "telemetry"},
    {"guarding", "analyst", "testing"},
    {"instrumentation", "mapping", "cluster"},
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
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and f"{node.module}.".startswith(f"{below}.")
        ):
            parts = node.module.split(".")
            names |= {parts[depth]} if len(parts) > depth else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {
                alias.name.split(".")[depth]
                for alias in node.names
                if alias.name.startswith(f"{below}.")
            }
    return names


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_imports_point_one_way():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in SOURCES
        if room(path) != "__init__"
        for name in sorted(imported(tree_of(path)))
        if name != room(path) and LEVEL[name] >= LEVEL[room(path)]
    ]
    assert not wrong


def test_the_supervisor_knows_nothing_of_ours_but_itself():
    assert not {
        name for path in (PACKAGE / "supervisor").glob("*.py") for name in imported(tree_of(path))
    } - {"supervisor"}


# The same inside estimate/: constants and bytes first, then the model, then what vLLM and a call of generate make of it.
ROOMS_OF_ESTIMATE = (
    {"constants", "child_python", "budget"},
    {"model"},
    {"printed_budget", "start", "call"},
)
LEVEL_IN_ESTIMATE = {room: level for level, rooms in enumerate(ROOMS_OF_ESTIMATE) for room in rooms}
ESTIMATE = PACKAGE / "estimate"


def test_inside_estimate_a_model_knows_no_engine_and_engines_do_not_know_each_other():
    wrong = [
        f"estimate/{path.relative_to(ESTIMATE)} imports estimate/{name}"
        for path in sorted(ESTIMATE.rglob("*.py"))
        for own in [path.relative_to(ESTIMATE).parts[0].removesuffix(".py")]
        if own != "__init__"
        for name in sorted(imported(tree_of(path), below="oomguard.estimate"))
        if name != own and LEVEL_IN_ESTIMATE[name] >= LEVEL_IN_ESTIMATE[own]
    ]
    assert not wrong


def test_the_simulated_device_imports_no_more_of_ours_than_counting_takes():
    files = [
        path
        for path in (PACKAGE / "testing").glob("*.py")
        if path.stem not in ("pytest_plugin", "failed_test")
    ]
    rooms = {name for path in files for name in imported(tree_of(path))}
    assert rooms - {"testing"} == {"core", "estimate", "probe"}


def test_pytest_starts_without_torch_and_without_what_a_diagnosis_takes():
    code = "import sys, oomguard.testing.pytest_plugin; print(sorted(m for m in sys.modules if m.startswith('oomguard.')))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    rooms = {name.split(".")[1] for name in ast.literal_eval(ran.stdout)}
    assert rooms == {"_version", "core", "testing"}


# Files of torch's own, or imported where torch is in use.
USES_TORCH = {"simulated_device.py", "trace_process.py", "random_draws.py", "fake_generate.py"}


def imported_at_load(path: Path) -> set[str]:
    """The packages that a file's first level of statements imports."""
    found = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_heavy_libraries_load_on_use():
    wrong = {
        str(path.relative_to(PACKAGE)): sorted(imported_at_load(path) & ENGINES)
        for path in SOURCES
        if path.name not in USES_TORCH and imported_at_load(path) & ENGINES
    }
    assert not wrong


def test_only_records_that_show_themselves_ask_the_packages_public_face():
    asking = set()
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import) and any(
                alias.name == "oomguard" for alias in node.names
            ):
                asking.add(path.relative_to(PACKAGE).as_posix())
    assert asking == {"core/incident.py", "core/records.py"}


def test_answers_in_json_have_one_writer():
    rooms = {"report", "journal", "cli", "comparison"}
    writers = [path for path in SOURCES if room(path) in rooms and "json.dumps" in path.read_text()]
    assert writers == [PACKAGE / "report" / "json.py"]


def test_there_is_no_drawer_for_everything():
    assert not [
        p.name for p in SOURCES if p.stem in {"utils", "helpers", "misc", "common", "manager"}
    ]
