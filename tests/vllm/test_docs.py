"""The outputs of the real vLLM that README, docs/run.md and docs/guard.md show."""

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


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["README.md", "docs/run.md", "docs/guard.md"])
def test_each_block_with_the_real_engine_is_what_its_command_prints(name, vllm_env, tmp_path):
    assert _docs_output().problems(ROOT / name, tmp_path, vllm=True) == []
