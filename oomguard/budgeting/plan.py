"""The public door: say where the bytes of each GPU will go, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

from oomguard.budgeting.call import ask_for_call
from oomguard.budgeting.start import StartPlan, ask_for_start, plan_by_engine, plan_start
from oomguard.budgeting.values import SettingValue
from oomguard.errors import SettingError, UsageError
from oomguard.memory.generate.call import CallBudget

MemoryKind = Literal["discrete", "wsl2", "unified"]


@overload
def plan(
    model: str | os.PathLike[str],
    *,
    engine: Literal["vllm"] = "vllm",
    gpu_memory: str | int | None = None,
    gpu: int | None = None,
    gpu_name: str | None = None,
    driver_version: str | None = None,
    memory_kind: MemoryKind | None = None,
    gpu_replicas: int = 1,
    device: Literal["cuda", "cpu"] = "cuda",
    engine_version: str | None = None,
    calibrate: str | Path | Sequence[str | Path] | None = None,
    use_calibrations: bool = True,
    compile_cache: str | Path | None = None,
    ask_engine: bool = False,
    **settings: SettingValue,
) -> StartPlan: ...
@overload
def plan(
    model: str | os.PathLike[str],
    *,
    engine: Literal["transformers"],
    gpu_memory: str | int | None = None,
    gpu: int | None = None,
    gpu_name: str | None = None,
    trace: bool = False,
    **settings: SettingValue,
) -> CallBudget: ...
def plan(model: str | os.PathLike[str], *, engine: str = "vllm", **asked: Any) -> StartPlan | CallBudget:
    """Say where the bytes of each GPU will go when vLLM starts with a model, or when transformers generates with it.

    Nothing is loaded or started: weights are read from the headers of safetensors files, else counted from the configuration.

    Args:
        model: a folder, its ``config.json``, or a name on the hub (``ORG/NAME``).
        engine: ``vllm`` for a start of vLLM, ``transformers`` for a call of ``generate``.
        **asked: What both engines take, then what only one of them takes, then its settings:
            gpu_memory: total memory of one GPU, in bytes or as a size such as ``24GiB``.
            gpu: index of a GPU of this machine; the first one where neither size nor name is given.
            gpu_name: a GPU by its name, such as ``H100``.
            driver_version: vLLM: the NVIDIA driver's, by which CUDA graphs differ; None for this machine's, for a GPU of it.
            memory_kind: vLLM: whose memory it is; None decides by GPU and host.
            gpu_replicas: vLLM: engines that share a time-sliced GPU.
            device: vLLM: its backend.
            engine_version: vLLM: its version; None takes the installed one, else the newest known.
            calibrate: vLLM: a start-up log of this model, or several; what they measured replaces the priors, now and later.
            use_calibrations: vLLM: whether to use what starts have measured before.
            compile_cache: vLLM: its cache folder, to tell whether the next start compiles; None for this machine's, for a GPU of it.
            ask_engine: vLLM: whether the installed one lays out the KV cache itself, which takes about ten seconds.
            trace: transformers: whether to run the model's own code under fake tensors; seconds, exact, no GPU.
            The settings by canonical name, such as ``max_model_len=8192`` or ``batch_size=4``; bytes also as ``4GiB``.

    Returns:
        For vLLM the budget of the fullest GPU and the nearest settings that fit; for transformers the budget of the call.

    Raises:
        InputError: the model cannot be found, or what is asked for cannot be run.
        ConfigError: a number of the model's configuration is missing or absurd.
        SettingError: a setting is unknown, or its value is one that it cannot have.
        UsageError: no GPU is named and none can be seen, or arguments contradict each other.
    """
    if not isinstance(model, str | os.PathLike):
        hint = "a model folder, its config.json, or a hub name (ORG/NAME)"
        raise UsageError(f"plan expects a model by its path or name, not {type(model).__name__}", hint=hint)
    path = os.fspath(model)
    if engine == "transformers":
        return ask_for_call(path, **asked).budget()
    if engine != "vllm":
        raise SettingError(f"engine is {engine!r}", hint="one of vllm, transformers")
    by_engine = asked.pop("ask_engine", False)
    start = ask_for_start(path, **asked)
    return plan_by_engine(start) if by_engine else plan_start(start)
