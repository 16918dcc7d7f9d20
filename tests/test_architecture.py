"""The shape of the tree: imports point one way, engines load on use."""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oomguard"

# Lower rooms first; a room may import those before it and itself. Rooms of one row do not see each other.
ROOMS = (
    {"supervisor"},
    {"core"},
    {"probe"},
    {"rules"},
    {"scan"},
    {"estimate"},
    {"remedy"},
    {"engines"},
    {"diagnosis"},
    {"planning", "comparison"},
    {"retry"},
    {"guarding"},
    {"report"},
    {"journal"},
    {"analyst", "testing"},
    {"instrumentation"},
    {"cli"},
    {"mapping", "telemetry", "cluster"},
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


OPTIONAL = ("cluster", "mapping", "telemetry")
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
    "capacity of 23.64 GiB of which 4.12 MiB is free. Including non-PyTorch memory, this process "
    "has 23.62 GiB memory in use.\n"
)
SMALL_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
GUARDED_CALL = """
import oomguard

@oomguard.guard
def double(rows):
    return [2 * row for row in rows]

assert double([1, 2]) == [2, 4]
calls = []

@oomguard.guard
def fail(rows):
    calls.append(len(rows))
    raise MemoryError("out of memory")

try:
    fail([1, 2])
except MemoryError:
    print("raised")
"""


@pytest.mark.parametrize("missing", OPTIONAL)
def test_the_rest_works_without_an_optional_package(tmp_path, missing):
    copy = tmp_path / "site" / "oomguard"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", missing))
    (copy.parent / "rules").symlink_to(PACKAGE.parent / "rules")
    assert not (copy / missing).exists()
    (tmp_path / "oom.log").write_text(CUDA_OOM)
    environ = {
        **os.environ,
        "PYTHONPATH": str(copy.parent),
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
    }

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            check=False,
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    where = python("-c", "import oomguard; print(oomguard.__file__)")
    assert where.stdout.strip() == str(copy / "__init__.py")

    diagnosed = python("-m", "oomguard", "diagnose", "--exit-code", "oom.log")
    assert diagnosed.returncode == 1, diagnosed.stderr
    assert "20.00 MiB" in diagnosed.stdout

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL_MODEL))
    planned = python("-m", "oomguard", "plan", "--model", "model", "--gpu-memory", "24GiB")
    assert planned.returncode == 0, planned.stderr

    ran = python("-m", "oomguard", "run", "--", "sh", "-c", "exit 7")
    assert ran.returncode == 7
    assert not ran.stderr

    called = python("-c", GUARDED_CALL)
    assert called.stdout == "raised\n", called.stderr


def test_only_the_registration_point_names_the_optional_packages():
    wrong = []
    for path in SOURCES:
        own = room(path)
        if own == "__init__" or own in OPTIONAL:
            continue
        named = imported(tree_of(path)) & set(OPTIONAL)
        text = path.read_text()
        is_named = any(f"oomguard.{package}." in text for package in OPTIONAL)
        if named or (is_named and path != PACKAGE / "core" / "installation.py"):
            wrong.append(str(path.relative_to(PACKAGE)))
    assert not wrong


def test_optional_packages_do_not_import_each_other():
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if room(path) in OPTIONAL and imported(tree_of(path)) & (set(OPTIONAL) - {room(path)})
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


def test_models_in_estimate_know_no_engine():
    wrong = [
        f"estimate/{path.relative_to(ESTIMATE)} imports estimate/{name}"
        for path in sorted(ESTIMATE.rglob("*.py"))
        for own in [path.relative_to(ESTIMATE).parts[0].removesuffix(".py")]
        if own != "__init__"
        for name in sorted(imported(tree_of(path), below="oomguard.estimate"))
        if name in LEVEL_IN_ESTIMATE and name != own
        if LEVEL_IN_ESTIMATE[name] >= LEVEL_IN_ESTIMATE[own]
    ]
    assert not wrong


def test_simulated_device_imports_only_what_counting_needs():
    files = [
        path
        for path in (PACKAGE / "testing").glob("*.py")
        if path.stem not in ("pytest_plugin", "failed_test")
    ]
    rooms = {name for path in files for name in imported(tree_of(path))}
    assert rooms - {"testing"} == {"core", "estimate", "probe"}


def test_pytest_starts_without_torch_and_diagnosis():
    code = "import sys, oomguard.testing.pytest_plugin; print(sorted(m for m in sys.modules if m.startswith('oomguard.')))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    rooms = {name.split(".")[1] for name in ast.literal_eval(ran.stdout)}
    assert rooms == {"core", "testing"}


# Files of torch's own, or imported where torch is in use.
USES_TORCH = {"simulated_device.py", "call_state.py", "fake_generate.py"}


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


def test_only_displayable_records_use_the_public_module():
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
