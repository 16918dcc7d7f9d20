"""Calls of vLLM's LLM under a watch, over a class of its shape: rows of each form of prompts, and nothing changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LLM = """
class LLM:
    def generate(self, prompts, sampling_params=None, **kwargs):
        return [p for p in prompts]
    def chat(self, messages, sampling_params=None):
        if messages == "fail": raise RuntimeError("mine")
        return messages
"""
PROGRAM = """
import sys, oomguard
class Params: max_tokens = 16
{before}
with oomguard.watch() as seen, oomguard.guard():
    from vllm.entrypoints.llm import LLM
    llm = LLM()
    assert llm.generate(["a", "b"], Params()) == ["a", "b"]
    llm.generate(prompts="one")
    llm.generate([1, 2, 3])
    llm.chat([{{"role": "user", "content": "x"}}])
    llm.chat([[{{"role": "user"}}], [{{"role": "user"}}]])
    try: llm.chat("fail")
    except RuntimeError as error: assert not hasattr(error, "__notes__")
llm.generate(["later"])
print([(r.what, r.model, r.rows, r.max_new_tokens, r.error) for r in seen.rows])
print(all(r.uses for r in seen.rows), "torch" in sys.modules)
"""


def ran(folder: Path, before: str = "") -> list[str]:
    module = folder / "vllm" / "entrypoints"
    module.mkdir(parents=True)
    for file in (folder / "vllm" / "__init__.py", module / "__init__.py"):
        file.write_text("")
    (module / "llm.py").write_text(LLM)
    code = PROGRAM.format(before=before)
    env = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


EXPECTED = str(
    [
        ("generate", "LLM", 2, 16, ""),
        ("generate", "LLM", 1, None, ""),
        ("generate", "LLM", 1, None, ""),
        ("chat", "LLM", 1, None, ""),
        ("chat", "LLM", 2, None, ""),
        ("chat", "LLM", 1, None, "RuntimeError"),
    ]
)


def test_each_llm_call_is_a_row_with_host_memory_if_nothing_else(tmp_path):
    assert ran(tmp_path) == [EXPECTED, "True False"]


def test_an_engine_that_was_imported_before_is_seen_too(tmp_path):
    assert ran(tmp_path, before="import vllm.entrypoints.llm") == [EXPECTED, "True False"]
