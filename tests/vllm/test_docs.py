"""The outputs of the real vLLM that the README shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _docs_output():
    path = ROOT / "scripts" / "docs_output.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("vllm_env")
def test_each_real_engine_block_shows_what_its_command_prints(tmp_path):
    assert _docs_output().problems(ROOT / "README.md", tmp_path, vllm=True) == []
