"""The real vLLM: an environment that scripts/vllm-env makes, and a real tiny model with random weights."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(str(item.path)).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def vllm_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables under which ``vllm``, ``python`` and ``oomguard`` are those of .venv-vllm."""
    if not (ENVIRONMENT / "ready").exists():
        pytest.skip("no vLLM environment: run scripts/vllm-env")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OOMGUARD_", "VLLM_"))
    }
    env["PATH"] = f"{ENVIRONMENT / 'bin'}{os.pathsep}{env['PATH']}"
    env["HF_HUB_OFFLINE"] = "1"
    env["VLLM_RPC_BASE_PATH"] = str(
        tmp_path_factory.mktemp("rpc")
    )  # an engine that is killed leaves its sockets
    return env


@pytest.fixture(scope="session")
def folder(vllm_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder that holds ./tiny and the scripts of the user's cases."""
    place = tmp_path_factory.mktemp("vllm")
    subprocess.run(
        ["python", str(ROOT / "examples" / "make_tiny_model.py"), "tiny"],
        cwd=place,
        env=vllm_env,
        check=True,
        capture_output=True,
    )
    for script in (Path(__file__).parent / "scripts").glob("*.py"):
        shutil.copy(script, place)
    return place
