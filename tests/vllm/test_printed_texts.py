"""Every text that oomguard looks for in vLLM's output is printed by the sources of the real vLLM."""

from __future__ import annotations

import subprocess
from pathlib import Path

import vllm_versions
from support.vllm_printed import printed_rows

WHERE = (
    "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"
)
VERSION = "0.32.0"


def test_every_text_is_printed_by_the_real_sources(vllm_env):
    found = subprocess.run(
        ["python", "-c", WHERE], env=vllm_env, capture_output=True, text=True, check=True
    ).stdout
    printed = vllm_versions.stated()["printed"]

    assert [
        row for row in printed_rows(Path(found.strip()), VERSION, printed) if not row.holds
    ] == []
