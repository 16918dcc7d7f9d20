"""Engine arguments as vLLM has them, under vLLM's name: what the plugin is tried on where there is no vLLM.

The shapes are those of vllm/engine/arg_utils.py: a dataclass with defaults, its subclass of the asynchronous front end, and beside
them the kinds of classes that refuse a value. It runs the plugin as vLLM does, unguarded, and prints what the engine got.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from typing import Any


@dataclasses.dataclass
class EngineArgs:
    """What a front end fills in; ``create_engine_config`` makes the configuration."""

    model: str = "org/model"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int | None = None
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"
    cpu_offload_gb: float = 0
    limit_mm_per_prompt: dict[str, int] = dataclasses.field(default_factory=dict)
    speculative_config: dict[str, Any] | None = None
    cudagraph_capture_sizes: list[int] | None = None

    def create_engine_config(
        self, usage_context: object = None, *, headless: bool = False
    ) -> dict[str, Any]:
        """Return what the engine starts with."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """The arguments of the asynchronous front end."""

    enable_log_requests: bool = False


class PlainArgs:
    """No dataclass at all."""

    model = "org/model"
    max_model_len = 8192

    def create_engine_config(self) -> dict[str, Any]:
        """Return what the engine starts with."""
        return {"max_model_len": self.max_model_len}


def install(base: type = EngineArgs) -> None:
    """Put this module in vLLM's place."""
    package, engine = types.ModuleType("vllm"), types.ModuleType("vllm.engine")
    arguments = types.ModuleType("vllm.engine.arg_utils")
    arguments.EngineArgs = base  # type: ignore[attr-defined]
    sys.modules.update({"vllm": package, "vllm.engine": engine, "vllm.engine.arg_utils": arguments})


def main() -> None:
    """Register the plugin, then start one engine for each model named, and print what each got."""
    from oomguard.engines.vllm.plugin import register

    shape, *models = sys.argv[1:]
    kinds = {"sync": EngineArgs, "async": AsyncEngineArgs, "plain": PlainArgs}
    install(PlainArgs if shape == "plain" else EngineArgs)
    register()
    register()
    for model in models:
        arguments = kinds[shape]()
        arguments.model = model
        print(json.dumps(arguments.create_engine_config()), flush=True)


if __name__ == "__main__":
    main()
