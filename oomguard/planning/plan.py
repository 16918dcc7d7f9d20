"""The public door: say where the bytes of each GPU will go, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, overload

from oomguard.core.errors import SettingError, UsageError
from oomguard.estimate.call.call_budget import budget_call
from oomguard.estimate.call.trace import CallBudget, PlannedCall
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.start.start import StartBudget
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.setting_values import (
    CALL_SETTINGS,
    START_SETTINGS,
    SettingValue,
    parse_word,
    read_values,
)
from oomguard.planning.start import (
    AskedStart,
    StartPlan,
    ask_for_start,
    find_gpu,
    plan_by_engine,
    plan_start,
)

# A planned call of transformers' ``generate``, as it is asked for.

_DEFAULTS: Final = {"batch_size": 1, "prompt_tokens": 1024, "max_new_tokens": 256}


@dataclass(frozen=True, slots=True)
class AskedCall:
    """A call to budget: the model read once, the call's numbers, and the GPU's size.

    ``trace`` runs the model's own code under fake tensors in place of the closed form.
    """

    model: Model
    call: PlannedCall
    gpu_total_bytes: int
    trace: bool

    def budget(self) -> CallBudget:
        """Budget the call; raises SettingError for its numbers, InputError where ``trace`` cannot
        run the model.
        """
        return budget_call(self.model, self.call, self.gpu_total_bytes, trace=self.trace)


def ask_for_call(
    model: str,
    *,
    gpu_memory: str | int | None = None,
    gpu: int | None = None,
    gpu_name: str | None = None,
    trace: bool = False,
    **values: SettingValue,
) -> AskedCall:
    """Read what a call is asked for with; the arguments are those of ``oomguard.plan``."""
    given = _DEFAULTS | read_values(values, CALL_SETTINGS, ("gpu_memory", "gpu_name", "trace"))
    total_bytes = find_gpu(gpu_memory, gpu, gpu_name).total_bytes
    dtype = given.pop("dtype", "auto")
    quantization = given.pop("quantization", None)
    read = read_model(find_model(model), dtype=dtype, quantization=quantization)
    if read.shape.dtype_bytes == 4:
        weights_dtype = "float32"
    else:
        weights_dtype = "bfloat16"
    return AskedCall(
        read, PlannedCall(read.shape.config, **given, dtype=weights_dtype), total_bytes, trace
    )


# The same plan for several values of one setting.

_OF_A_START: Final = {
    name: START_SETTINGS.get(name, "int")
    for name in (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "block_size",
        "gpu_total_bytes",
        "kv_cache_dtype",
    )
}
_OF_A_CALL: Final = {
    name: CALL_SETTINGS[name]
    for name in ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams")
}


def sweep_start(asked: AskedStart, text: str) -> tuple[str, list[tuple[str, StartBudget | str]]]:
    """Budget a start for each value of a setting.

    Args:
        asked: the start.
        text: ``SETTING=V1,V2,…``

    Returns:
        The setting's name, and each value with its budget, or with what the engine would refuse it
        for: one value must not hide the others.

    Raises:
        SettingError: the text is not a sweep, or the setting cannot have a value.
    """
    name, values = _read(text, _OF_A_START)
    rows: list[tuple[str, StartBudget | str]] = []
    for word, value in values:
        try:
            rows.append((word, budget_start(asked.model, replace(asked.settings, **{name: value}))))
        except SettingError as error:
            rows.append((word, str(error)))
    return name, rows


def sweep_call(asked: AskedCall, text: str) -> tuple[str, list[tuple[str, CallBudget]]]:
    """Budget a call for each value of a setting, ``SETTING=V1,V2,…``; raises SettingError."""
    name, values = _read(text, _OF_A_CALL)
    calls = (
        (word, replace(asked, call=replace(asked.call, **{name: value}))) for word, value in values
    )
    return name, [(word, one.budget()) for word, one in calls]


def _read(text: str, known: Mapping[str, str]) -> tuple[str, list[tuple[str, Any]]]:
    """Return a sweep's setting, and its values as written and as read."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if name not in known or not equals or not values:
        raise SettingError(
            f"not a sweep: {text!r}", hint=f"SETTING=V1,V2 with one of {', '.join(known)}"
        )
    return name, [
        (word.strip(), parse_word(name, word.strip(), known)) for word in values.split(",")
    ]


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
def plan(
    model: str | os.PathLike[str], *, engine: str = "vllm", **asked: Any
) -> StartPlan | CallBudget:
    """Say where the bytes of each GPU will go when vLLM starts with a model, or when transformers
    generates with it.

    Nothing is loaded or started: weights are read from the headers of safetensors files, else
    counted from the configuration.

    Args:
        model: a folder, its ``config.json``, or a name on the hub (``ORG/NAME``).
        engine: ``vllm`` for a start of vLLM, ``transformers`` for a call of ``generate``.
        **asked: What both engines take, then what only one of them takes, then its settings:
            gpu_memory: total memory of one GPU, in bytes or as a size such as ``24GiB``.
            gpu: index of a GPU of this machine; the first one where neither size nor name is given.
            gpu_name: a GPU by its name, such as ``H100``.
            driver_version: vLLM: the NVIDIA driver's, by which CUDA graphs differ; None for this
                machine's, for a GPU of it.
            memory_kind: vLLM: whose memory it is; None decides by GPU and host.
            gpu_replicas: vLLM: engines that share a time-sliced GPU.
            device: vLLM: its backend.
            engine_version: vLLM: its version; None takes the installed one, else the newest known.
            calibrate: vLLM: a start-up log of this model, or several; what they measured replaces
                the priors, now and later.
            use_calibrations: vLLM: whether to use what starts have measured before.
            compile_cache: vLLM: its cache folder, to tell whether the next start compiles; None for
                this machine's, for a GPU of it.
            ask_engine: vLLM: whether the installed one lays out the KV cache itself, which takes
                about ten seconds.
            trace: transformers: whether to run the model's own code under fake tensors; seconds,
            exact, no GPU.
            The settings by canonical name, such as ``max_model_len=8192`` or ``batch_size=4``;
            bytes also as ``4GiB``.

    Returns:
        For vLLM the budget of the fullest GPU and the nearest settings that fit; for transformers
        the budget of the call.

    Raises:
        InputError: the model cannot be found, or what is asked for cannot be run.
        ConfigError: a number of the model's configuration is missing or absurd.
        SettingError: a setting is unknown, or its value is one that it cannot have.
        UsageError: no GPU is named and none can be seen, or arguments contradict each other.
    """
    if not isinstance(model, str | os.PathLike):
        hint = "a model folder, its config.json, or a hub name (ORG/NAME)"
        raise UsageError(
            f"plan expects a model by its path or name, not {type(model).__name__}", hint=hint
        )
    path = os.fspath(model)
    if engine == "transformers":
        return ask_for_call(path, **asked).budget()
    if engine != "vllm":
        raise SettingError(f"engine is {engine!r}", hint="one of vllm, transformers")
    by_engine = asked.pop("ask_engine", False)
    start = ask_for_start(path, **asked)
    if by_engine:
        return plan_by_engine(start)
    return plan_start(start)
