"""Let the installed vLLM lay out a budget's KV cache, which also works for unread fields."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.estimate.child_python import call_child
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.probe.host import multiplies_in_bfloat16

_LIMIT_S: Final = 300
_ENVIRONMENT: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
_PASSED: Final = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "dtype",
    "quantization",
    "block_size",
    "enforce_eager",
    "enable_prefix_caching",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)


def lay_out_with_engine(budget: StartBudget, model_path: str) -> StartBudget:
    """Return a budget with its KV cache as the installed vLLM lays it out.

    This takes about ten seconds and loads no weights. LoRA slots and copies of the model change the
    size of the pool, which already includes them, but not its layout.

    Raises:
        SettingError: the installed vLLM has another version or device than the budget.
        InputError: vLLM cannot run.
    """
    settings = budget.settings
    length = settings.max_model_len or 1
    pools = [max(0, stage.pool_bytes) for stage in budget.stages]
    found = _ask(settings, model_path, pools, max(budget.longest_request_tokens, length))
    _check_installed(settings, found)
    blocks = found["blocks"]
    tokens = found["block_tokens"]
    longest = found["longest_tokens"]
    if blocks:
        block_bytes = budget.kv_cache_pool_bytes // blocks
    else:
        block_bytes = 0
    reasons = tuple(reason for reason in budget.reasons if not reason.startswith("one request of "))
    if longest < length and budget.kv_cache_pool_bytes > 0:
        reasons = (
            (
                f"by vLLM's own layout a request of {length} tokens does not fit, but one of "
                f"{longest} does"
            ),
            *reasons,
        )
    return replace(
        budget,
        kv_cache_blocks=blocks,
        block_tokens=tokens,
        max_concurrency=found["max_concurrency"],
        kv_cache_tokens=int(found["max_concurrency"] * (settings.max_model_len or 0)),
        longest_request_tokens=longest,
        kv_bytes_per_token=budget.kv_bytes_per_token or block_bytes // max(1, tokens),
        stages=tuple(
            replace(stage, request_bytes=found["needed_bytes"], block_bytes=0)
            for stage in budget.stages
        ),
        reasons=reasons,
        assumptions=(*budget.assumptions, "KV cache: the installed vLLM's own layout"),
    )


def _check_installed(settings: VllmSettings, found: Mapping[str, Any]) -> None:
    if found["device"] != settings.device:
        raise SettingError(
            f"the installed vLLM is for {found['device']}, not {settings.device}",
            hint=f"--device {found['device']}",
        )
    if Version(found["version"]).release[:2] != settings.version.release[:2]:
        raise SettingError(
            f"the installed vLLM is {found['version']}, not {settings.version}",
            hint="omit --engine-version",
        )


def _ask(
    settings: VllmSettings, model_path: str, pools_bytes: list[int], limit_tokens: int
) -> dict[str, Any]:
    arguments = {
        name: getattr(settings, name) for name in _PASSED if getattr(settings, name) is not None
    }
    if (
        settings.device == "cpu"
        and settings.mamba_ssm_cache_dtype == "auto"
        and multiplies_in_bfloat16()
    ):
        arguments["mamba_ssm_cache_dtype"] = "float32"  # the CPU backend's kernels need this
    path = Path(model_path)
    if settings.speculative_config is not None:
        arguments["speculative_config"] = json.loads(settings.speculative_config)
    arguments["model"] = str(path.parent if path.is_file() else path)
    with tempfile.TemporaryDirectory(prefix="oomguard-") as folder:
        question = {
            "arguments": {**arguments, "kv_cache_memory_bytes": max([1, *pools_bytes])},
            "pools_bytes": pools_bytes,
            "limit_tokens": limit_tokens,
            "rendezvous": str(Path(folder) / "rendezvous"),
        }
        return call_child(
            "oomguard.estimate.start.engine_layout_process",
            question,
            limit_s=_LIMIT_S,
            environment=_ENVIRONMENT,
            failed="vLLM could not compute the layout",
            late="vLLM did not answer in {} seconds",
            late_hint="omit --ask-engine",
            hint=(
                "--ask-engine needs vLLM in the Python that runs oomguard. Omit it to "
                "use the closed form"
            ),
        )
