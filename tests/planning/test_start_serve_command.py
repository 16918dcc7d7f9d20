"""The command that a planned start ends with: what a shell takes, and no more than was named."""

from __future__ import annotations

import shlex

from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.start.start import VllmSettings
from oomguard.planning.start import serve_command


def test_the_command_quotes_and_names_only_what_was_given():
    settings = VllmSettings(
        Version("0.30"), 24 * GIB, 0.9, max_model_len=4096, enforce_eager=True, kv_cache_dtype="fp8"
    )
    line = serve_command(
        "./my model", settings, {"max_model_len", "enforce_eager", "kv_cache_dtype", "dtype"}
    )
    assert shlex.split(line) == [
        "vllm",
        "serve",
        "./my model",
        "--max-model-len",
        "4096",
        "--kv-cache-dtype",
        "fp8",
        "--enforce-eager",
    ]
