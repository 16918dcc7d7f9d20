"""A small engine in vLLM's shape, and programs that start it: each in a process of its own, as the hooks are of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_engine")
ROOT = Path(__file__).parents[2]
HEAD = """
import asyncio, contextlib, json, logging, os, sys, threading, time, traceback
import oomguard
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
SMALL = dict(max_model_len=32768, kv_cache_memory_bytes=1_000_000)
def shown(g):
    return [[a.number, [f"{p.setting} {p.old} -> {p.new}" for p in a.patches], a.error] for a in g.attempts]
"""
TAIL = """
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``main`` of a program as a script, or as one without a file, with variables; its engine is the small one."""

    def run(
        body: str, *, check: bool = True, is_file: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        text = HEAD + textwrap.dedent(body) + TAIL
        (tmp_path / "program.py").write_text(text)
        paths = os.pathsep.join([str(ROOT), str(FAKE)])
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "OOMGUARD_"))
        }
        ran = subprocess.run(
            [sys.executable, "program.py"] if is_file else [sys.executable, "-c", text],
            cwd=tmp_path,
            env={**variables, "PYTHONPATH": paths, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or ran.returncode == 0, ran.stderr
        return ran

    return run
