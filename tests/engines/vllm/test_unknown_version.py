"""``oomguard run`` with a vLLM of a version that is not known: diagnosed always, changed only by what its own sources show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

ENGINE = r"""
import sys
words = sys.argv
length = int(words[words.index("--max-model-len") + 1]) if "--max-model-len" in words else 32768
print("(EngineCore pid=2) INFO 11-21 07:14:43 [core.py:133] Initializing a V1 LLM engine (v9.9.9) with config: model='m'")
print("(APIServer pid=1) INFO 11-21 07:14:43 [utils.py:1] non-default args: {'model': 'm'}")
if length > 1792:
    print("ValueError: To serve at least one request with the model's max seq len (32768), (0.02 GiB KV cache is needed, which is "
          "larger than the available KV cache memory (0.01 GiB). Based on the available memory, the estimated maximum model length "
          "is 1792. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.")
    sys.exit(1)
print("RESULT", length)
"""


@pytest.fixture
def run(vllm_environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the engine of an environment; what is given is replaced in its sources, or it has none at all."""

    def start(
        old: str = "", new: str = "", *, sources: bool = True
    ) -> subprocess.CompletedProcess[str]:
        scripts = vllm_environment(ENGINE, old, new, sources=sources) / "bin"
        path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [sys.executable, "-m", "oomguard", "run", "--", "vllm", "serve", "m"],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, "PATH": path},
        )

    return start


def test_it_is_run_again_with_a_flag_that_its_sources_show(run):
    ran = run()

    assert ran.returncode == 0, ran.stderr
    assert "RESULT 1792" in ran.stdout


def test_a_flag_that_its_sources_do_not_show_is_not_written(run):
    ran = run('"--max-model-len"', '"--model-length"')

    assert (ran.returncode, ran.stdout.count("Initializing")) == (1, 1)
    assert (
        "oomguard does not know vLLM 9.9.9, and its sources show no flag for max_model_len"
        in ran.stderr
    )
    assert "1792" in ran.stderr  # diagnosed all the same


def test_without_sources_it_is_diagnosed_and_left_as_it_is(run):
    ran = run(sources=False)

    assert (ran.returncode, ran.stdout.count("Initializing")) == (1, 1)
    assert "and did not find its sources on this machine" in ran.stderr
    assert "1792" in ran.stderr
