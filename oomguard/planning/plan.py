"""Estimate the bytes of each GPU before anything starts: ``oomguard.plan`` and sweeps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, overload

from oomguard.core.errors import SettingError, UsageError
from oomguard.estimate.call.call_budget import CallBudget, PlannedCall, budget_call
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.start.start import StartBudget
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.start import (
    START_SETTINGS,
    SettingValue,
    StartPlan,
    StartRequest,
    find_gpu,
    host_of_start,
    parse_word,
    plan_by_engine,
    plan_start,
    read_start_request,
    read_values,
    types_of,
)

# A planned call of transformers' ``generate``, as the user requested it.

CALL_SETTINGS: Final = types_of(PlannedCall) | {"quantization": "str"}
_DEFAULTS: Final = {"batch_size": 1, "prompt_tokens": 1024, "max_new_tokens": 256}


@dataclass(frozen=True, slots=True)
class CallRequest:
    """Hold a call to estimate: its model, its numbers, and the GPU's size.

    ``trace`` runs the model's own code under fake tensors instead of the closed form.
    """

    model: Model
    call: PlannedCall
    gpu_total_bytes: int
    trace: bool

    def budget(self) -> CallBudget:
        """Estimate the call.

        Raises:
            SettingError: a number of the call is invalid.
            InputError: ``trace`` cannot run the model.
        """
        return budget_call(self.model, self.call, self.gpu_total_bytes, trace=self.trace)


def read_call_request(
    model: str,
    *,
    gpu_memory: str | int | None = None,
    gpu: int | None = None,
    gpu_name: str | None = None,
    trace: bool = False,
    **values: SettingValue,
) -> CallRequest:
    """Read the request for a call; the arguments are the same as for ``oomguard.plan``."""
    given = _DEFAULTS | read_values(values, CALL_SETTINGS, ("gpu_memory", "gpu_name", "trace"))
    total_bytes = find_gpu(gpu_memory, gpu, gpu_name).total_bytes
    dtype = given.pop("dtype", "auto")
    quantization = given.pop("quantization", None)
    read = read_model(find_model(model), dtype=dtype, quantization=quantization)
    if read.shape.dtype_bytes == 4:
        weights_dtype = "float32"
    else:
        weights_dtype = "bfloat16"
    return CallRequest(
        read, PlannedCall(read.shape.config, **given, dtype=weights_dtype), total_bytes, trace
    )


# The same plan for several values of one setting.

_START_SWEEPS: Final = (
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
_CALL_SWEEPS: Final = ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams")
# The GPU's total describes the machine, so the table of start settings lacks it.
_OF_A_START: Final = {name: START_SETTINGS.get(name, "int") for name in _START_SWEEPS}
_OF_A_CALL: Final = {name: CALL_SETTINGS[name] for name in _CALL_SWEEPS}


def sweep_start(asked: StartRequest, text: str) -> tuple[str, list[tuple[str, StartBudget | str]]]:
    """Estimate a start for each value of a setting.

    Args:
        asked: the start.
        text: ``SETTING=V1,V2,…``

    Returns:
        The setting's name, and each value with its budget, or with the reason why the engine would
            reject it. One bad value does not hide the others.

    Raises:
        SettingError: the text is not a sweep, or a value is invalid.
    """
    name, values = _read(text, _OF_A_START)
    # The model is read once: only the settings of a sweep differ.
    rows: list[tuple[str, StartBudget | str]] = []
    for word, value in values:
        try:
            rows.append((word, budget_start(asked.model, replace(asked.settings, **{name: value}))))
        except SettingError as error:
            rows.append((word, str(error)))
    return name, rows


def sweep_call(asked: CallRequest, text: str) -> tuple[str, list[tuple[str, CallBudget]]]:
    """Estimate a call for each value of ``SETTING=V1,V2,…``; raises SettingError."""
    name, values = _read(text, _OF_A_CALL)
    budgets = []
    for word, value in values:
        changed = replace(asked, call=replace(asked.call, **{name: value}))
        budgets.append((word, changed.budget()))
    return name, budgets


def _read(text: str, known: Mapping[str, str]) -> tuple[str, list[tuple[str, Any]]]:
    """Return a sweep's setting, and its values as text and parsed."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if name not in known or not equals or not values:
        raise SettingError(
            f"not a sweep: {text!r}", hint=f"write SETTING=V1,V2 with one of {', '.join(known)}"
        )
    rows = []
    for word in map(str.strip, values.split(",")):
        rows.append((word, parse_word(name, word, known)))
    return name, rows


# The largest value of one setting with which a start surely fits, and the fewest ranks.

_SOLVED: Final = (
    "max_model_len",
    "max_num_seqs",
    "gpu_memory_utilization",
    "tensor_parallel_size",
)
_MOST_SEQS: Final = 4096
_LENGTH_STEP: Final = 16
_SHARE_STEPS: Final = 1000
_MOST_DOUBLINGS: Final = 6


@dataclass(frozen=True, slots=True)
class SolvedSetting:
    """Hold a solved setting, its value, and the plan with it.

    ``value`` is None if no value fits; ``plan`` is then the one that was asked for.
    """

    setting: str
    value: int | float | None
    plan: StartPlan


def solve_start(asked: StartRequest, name: str) -> SolvedSetting:
    """Find the largest value of a setting with which a start surely fits.

    For ``tensor_parallel_size`` it is the smallest one, in doublings. For ``max_num_seqs`` the KV
    cache then also holds as many requests of the full length.

    Raises:
        SettingError: the setting cannot be solved, or the engine would reject the others.
    """
    name = name.strip().lstrip("-").replace("-", "_")
    if name not in _SOLVED:
        raise SettingError(
            f"cannot solve {name!r}", hint=f"one of {', '.join(_SOLVED)}, for example max_model_len"
        )

    def with_value(value: int | float) -> StartRequest:
        changed: dict[str, Any] = {name: value}
        settings = replace(asked.settings, **changed)
        return replace(asked, settings=settings, given=asked.given | {name})

    def fits(value: int | float) -> bool:
        # The engine would refuse some values of a search, such as ranks that do not divide heads.
        try:
            budget = budget_start(asked.model, with_value(value).settings)
        except SettingError:
            return False
        if name != "max_num_seqs" or not budget.fits:
            return budget.fits
        # The margin already has one request of the full length.
        least = budget.margin_bytes - budget.uncertainty_bytes
        request = max(stage.request_bytes for stage in budget.stages)
        return request > 0 and 1 + least // request >= value

    if name == "tensor_parallel_size":
        values = [2**doubling for doubling in range(_MOST_DOUBLINGS + 1)]
        found: int | float | None = next(filter(fits, values), None)
    elif name == "gpu_memory_utilization":
        # Whether a share fits is not monotone: a large one exceeds the free memory.
        shares = (step / _SHARE_STEPS for step in range(_SHARE_STEPS, 0, -1))
        found = next(filter(fits, shares), None)
    elif name == "max_num_seqs":
        found = _largest_that_fits(fits, 1, _MOST_SEQS)
    else:
        longest = asked.model.shape.max_positions or asked.settings.max_model_len or 0
        # A block holds a multiple of this step, so a finer search finds no longer request.
        steps = longest // _LENGTH_STEP
        most = _largest_that_fits(lambda step: fits(step * _LENGTH_STEP), 1, steps)
        found = None if most is None else most * _LENGTH_STEP
    if found is None:
        return SolvedSetting(name, None, plan_start(asked))
    return SolvedSetting(name, found, plan_start(with_value(found)))


def _largest_that_fits(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest number from ``low`` to ``high`` that fits, or None."""
    if high < low or not fits(low):
        return None
    while low < high:
        # The middle is rounded up: rounded down, two neighbours would loop forever.
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


_ABOUT_HOST: Final = ("host_memory", "kv_offloading_size", "swap_space")
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
    host_memory: str | int | None = None,
    kv_offloading_size: float = 0,
    swap_space: float = 0,
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
    """Estimate the GPU memory of a vLLM start or a transformers ``generate`` call.

    Nothing is loaded or started. oomguard reads the weights' sizes from the headers of safetensors
    files, or computes them from the configuration.

        planned = oomguard.plan("Qwen/Qwen3-8B", gpu_memory="24GiB", max_model_len=8192)
        if not planned.fits:
            print(planned.command)

    Args:
        model: a folder, its ``config.json``, or a name on the hub (``ORG/NAME``).
        engine: ``vllm`` for a start of vLLM, ``transformers`` for a call of ``generate``.
        **asked: arguments for both engines, then for one engine, then the engine's settings:
            gpu_memory: total memory of one GPU, in bytes or as a size such as ``24GiB``.
            gpu: index of a GPU of this machine; None: the first, unless a size or name is given.
            gpu_name: a GPU by its name, such as ``H100``.
            driver_version: vLLM: the NVIDIA driver, which affects CUDA graphs. None: this
                machine's, if the GPU is on this machine.
            memory_kind: vLLM: who shares the GPU's memory. None: decided by GPU and host.
            gpu_replicas: vLLM: the number of engines that share a time-sliced GPU.
            device: vLLM: its backend.
            engine_version: vLLM: its version. None: the installed one, else the newest known.
            calibrate: vLLM: start-up logs of this model, whose measurements replace the priors
                now and in later plans. None: no new logs.
            use_calibrations: vLLM: whether to use earlier measurements.
            compile_cache: vLLM: its cache folder, to predict whether the next start compiles.
                None: this machine's, if the GPU is on this machine.
            ask_engine: vLLM: whether the installed vLLM lays out the KV cache, in about ten
                seconds.
            host_memory: vLLM: the memory of the host or container, to check as well. None: not
                checked.
            kv_offloading_size: vLLM: GiB of the KV cache in host memory, all ranks together.
            swap_space: vLLM: GiB of swap space of each rank, which only old versions use.
            trace: transformers: whether to run the model's own code under fake tensors. It is
                exact, needs no GPU and takes seconds.
            The settings by canonical name, such as ``max_model_len=8192`` or ``batch_size=4``.
            Byte settings also accept ``4GiB``.

    Returns:
        For vLLM the budget of the fullest GPU and the nearest settings that fit; for transformers
        the budget of the call.

    Raises:
        InputError: the model does not exist, or a requested tool cannot run.
        ConfigError: a number of the model's configuration is missing or absurd.
        SettingError: unknown setting or invalid value.
        UsageError: there is no GPU here and none is given, or arguments contradict each other.
    """
    if not isinstance(model, str | os.PathLike):
        hint = "give a model folder, its config.json, or a hub name (ORG/NAME)"
        raise UsageError(
            f"plan expects a model by its path or name, not {type(model).__name__}", hint=hint
        )
    path = os.fspath(model)
    if engine == "transformers":
        return read_call_request(path, **asked).budget()
    if engine != "vllm":
        raise SettingError(f"engine is {engine!r}", hint="one of vllm, transformers")
    by_engine = asked.pop("ask_engine", False)
    about_host = {}
    for name in _ABOUT_HOST:
        if name in asked:
            about_host[name] = asked.pop(name)
    start = read_start_request(path, **asked)
    host = host_of_start(start.model, start.settings, **about_host)
    if by_engine:
        return replace(plan_by_engine(start), host=host)
    return replace(plan_start(start), host=host)
