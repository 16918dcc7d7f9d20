"""A plan whose KV cache vLLM's own planning code laid out, where vLLM is installed: right also for what the closed form does not read."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from oomguard.errors import SettingError
from oomguard.memory.child import ask_child
from oomguard.memory_plan import MemoryPlan, VllmSettings

_LIMIT_S: Final = 300
_ENVIRONMENT: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
_PASSED: Final = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "mamba_ssm_cache_dtype", "dtype", "quantization",
    "block_size", "enforce_eager", "enable_prefix_caching", "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip


def asked_of_engine(plan: MemoryPlan, model_path: str) -> MemoryPlan:
    """The plan with its KV cache as the installed vLLM lays it out; takes about ten seconds, loads no weights.

    Adapters and copies of the model change what a pool is, not how it is laid out: they are in the pool already. Raises
    SettingError where the installed vLLM is another than the planned one, and InputError where it cannot be asked.
    """
    settings = plan.settings
    found = _ask(
        settings,
        model_path,
        [max(0, stage.pool_bytes) for stage in plan.stages],
        max(plan.longest_request_tokens, settings.max_model_len or 1),
    )
    if found["device"] != settings.device:
        raise SettingError(
            f"the installed vLLM is for {found['device']}, not {settings.device}", hint=f"--device {found['device']}"
        )
    if Version(found["version"]).release[:2] != settings.version.release[:2]:
        raise SettingError(
            f"the installed vLLM is {found['version']}, not {settings.version}", hint="leave --engine-version out"
        )
    block_bytes = plan.kv_cache_pool_bytes // found["blocks"] if found["blocks"] else 0
    stages = tuple(replace(stage, request_bytes=found["needed_bytes"], block_bytes=0) for stage in plan.stages)
    fits = found["longest_tokens"] >= (settings.max_model_len or 1)
    reasons = tuple(r for r in plan.reasons if not r.startswith("one request of "))
    if not fits and plan.kv_cache_pool_bytes > 0:
        longest = found["longest_tokens"]
        reasons = (
            f"one request of {settings.max_model_len} tokens does not fit, one of {longest} does, says vLLM",
            *reasons,
        )
    return replace(
        plan, kv_cache_blocks=found["blocks"], block_tokens=found["block_tokens"], max_concurrency=found["max_concurrency"],
        kv_cache_tokens=int(found["max_concurrency"] * (settings.max_model_len or 0)), longest_request_tokens=found["longest_tokens"],
        kv_bytes_per_token=plan.kv_bytes_per_token or block_bytes // max(1, found["block_tokens"]), stages=stages, reasons=reasons,
        assumptions=(*plan.assumptions, "KV cache: laid out by the installed vLLM itself"),
    )  # fmt: skip


def _ask(settings: VllmSettings, model_path: str, pools_bytes: list[int], limit_tokens: int) -> dict[str, Any]:
    arguments = {name: getattr(settings, name) for name in _PASSED if getattr(settings, name) is not None}
    if settings.device == "cpu" and settings.mamba_ssm_cache_dtype == "auto":
        arguments["mamba_ssm_cache_dtype"] = "float32"  # what the CPU backend's kernels take
    path = Path(model_path)
    if settings.speculative_config is not None:
        arguments["speculative_config"] = json.loads(settings.speculative_config)
    arguments["model"] = str(path.parent if path.is_file() else path)
    with tempfile.TemporaryDirectory(prefix="oomguard-") as folder:
        question = {
            "arguments": {**arguments, "kv_cache_memory_bytes": max([1, *pools_bytes])}, "pools_bytes": pools_bytes,
            "limit_tokens": limit_tokens, "rendezvous": str(Path(folder) / "rendezvous"),
        }  # fmt: skip
        return ask_child(
            "oomguard.memory.engine_child", question, limit_s=_LIMIT_S, environment=_ENVIRONMENT,
            failed="vLLM cannot be asked", late="vLLM did not answer in {} seconds", late_hint="leave --ask-engine out",
            hint="--ask-engine needs vLLM in the Python that runs oomguard; without it the closed form plans",
        )  # fmt: skip
