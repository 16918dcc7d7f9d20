"""``oomguard plan``: where the bytes of each GPU will go, before anything is started."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

from oomguard.cli.options import color_option, console, form_of, option
from oomguard.cli.other_flags import KEPT_WORDS, OTHER_FLAGS, PlanCommand
from oomguard.cli.plan_options import POSITIVE, call_options, engine_options
from oomguard.errors import SettingError, UsageError
from oomguard.facts import GIB, parse_size
from oomguard.memory.ceilings import KINDS

if TYPE_CHECKING:
    from oomguard.budgeting.start import AskedStart

_FORMS: Final = ("terminal", "json")


@click.command("plan", cls=PlanCommand)
@click.argument("model", metavar="MODEL")
@option("--gpu-memory", metavar="SIZE", help="Total memory of one GPU, for example 24GiB.")
@option("--gpu", type=click.IntRange(0), metavar="INDEX", help="The GPU of this machine with this index.")
@option("--gpu-name", metavar="NAME", help="A GPU by its name, for example H100 or 'RTX 4090'.")
@option(
    "--driver-version", metavar="VERSION", help="The NVIDIA driver's, for example 535.129. [default: this machine's]"
)
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
    multiple=True,
    help="A start-up log of this model: what it measured replaces the priors, now and later. Repeatable.",
)
@option(
    "--ask-engine",
    is_flag=True,
    help="Let the installed vLLM lay out the KV cache itself: about ten seconds, no device.",
)
@option(
    "--compile-cache",
    metavar="DIR",
    help="vLLM's cache folder, to tell whether the next start compiles. [default: this machine's, for a GPU of it]",
)
@option("--no-calibration", is_flag=True, help="Plan with the priors, whatever starts have been measured.")
@option("--sweep", metavar="SETTING=V1,V2,…", help="One row for each value of a setting.")
@option("--format", "form", default="terminal", show_default=True, metavar="[terminal|json]", help="Output form.")
@option("--exit-code", is_flag=True, help="Exit with 1 when it does not fit.")
@color_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    gpu_memory: str | None,
    gpu: int | None,
    gpu_name: str | None,
    driver_version: str | None,
    memory_kind: str | None,
    gpu_replicas: int,
    device: str,
    engine: str,
    engine_version: str | None,
    calibrate: tuple[str, ...],
    compile_cache: str | None,
    ask_engine: bool,
    no_calibration: bool,
    trace: bool,
    sweep: str | None,
    form: str,
    exit_code: bool,
    color: str,
    **settings: Any,
) -> int:
    """Say where the bytes of each GPU will go when vLLM starts with MODEL, or when transformers generates with it.

    MODEL is a folder, a config.json, a GGUF file beside one, or a name on the hub. Nothing is loaded or started: weights are read
    from the headers of safetensors files, else counted from the configuration. A whole vllm serve command can stand in place of
    MODEL; of its flags those that take memory and are not counted are named.

    Exit status: 0 ran, 2 bad usage or a model that cannot be read, 1 with --exit-code when it does not fit.
    """
    from oomguard.budgeting.start import ask_for_start
    from oomguard.budgeting.values import CALL_SETTINGS, START_SETTINGS

    form = form_of(ctx, form, _FORMS)
    if ask_engine and (sweep or engine == "transformers"):
        raise UsageError("--ask-engine answers one plan of vLLM", hint="leave --sweep out")
    gpu_options: dict[str, Any] = {"gpu_memory": _total_bytes(gpu_memory), "gpu": gpu, "gpu_name": gpu_name}
    if engine == "transformers":
        own = {name: value for name, value in settings.items() if name in CALL_SETTINGS}
        fits = _plan_call(model, sweep, form, color, **gpu_options, trace=trace, **own)
        return int(exit_code and not fits)
    settings["cpu_offload_bytes"] = _bytes_of_gib(settings.pop("cpu_offload_gb"))
    asked = ask_for_start(
        model,
        **gpu_options,
        driver_version=driver_version,
        memory_kind=memory_kind,
        gpu_replicas=gpu_replicas,
        device=device,
        engine_version=engine_version,
        calibrate=calibrate,
        use_calibrations=not no_calibration,
        compile_cache=compile_cache,
        not_counted=ctx.meta.get(OTHER_FLAGS, ()),
        kept_words=ctx.meta.get(KEPT_WORDS, ()),
        **{name: value for name, value in settings.items() if name in START_SETTINGS},
    )
    fits = _sweep_start(asked, sweep, form, color) if sweep else _plan_start(asked, form, color, by_engine=ask_engine)
    return int(exit_code and not fits)


def _total_bytes(size: str | None) -> int | None:
    if size is None:
        return None
    total = parse_size(size).bytes
    if total <= 0:
        raise SettingError(f"--gpu-memory is {size}", hint="give the total memory of one GPU, for example 24GiB")
    return total


def _bytes_of_gib(size_gib: float) -> int:
    if not math.isfinite(size_gib):
        raise SettingError(f"cpu_offload_gb is {size_gib}")
    return round(size_gib * GIB)


def _plan_start(asked: AskedStart, form: str, color: str, *, by_engine: bool) -> bool:
    """Print the plan of a start; return whether it fits."""
    from oomguard.budgeting.start import plan_by_engine, plan_start
    from oomguard.report.json import json_line
    from oomguard.report.start_budget import plan_record, print_start_plan

    plan = plan_by_engine(asked) if by_engine else plan_start(asked)
    if form == "json":
        click.echo(json_line(plan_record(plan)))
    else:
        print_start_plan(console(color), plan)
    return plan.fits


def _sweep_start(asked: AskedStart, sweep: str, form: str, color: str) -> bool:
    """Print one row for each value; return whether all of them fit."""
    from oomguard.budgeting.sweep import sweep_start
    from oomguard.report.json import json_line
    from oomguard.report.sweep import print_start_sweep, sweep_records

    name, rows = sweep_start(asked, sweep)
    if form == "json":
        for record in sweep_records(name, rows):
            click.echo(json_line(record))
    else:
        print_start_sweep(console(color), name, rows)
    return all(not isinstance(start, str) and start.fits for _, start in rows)


def _plan_call(model: str, sweep: str | None, form: str, color: str, **options: Any) -> bool:
    """Print the budget of a call of transformers' generate, or one row for each value; return whether all of them fit."""
    from oomguard.budgeting.call import ask_for_call
    from oomguard.budgeting.sweep import sweep_call
    from oomguard.report.call_budget import call_record, print_call_budget
    from oomguard.report.json import json_line
    from oomguard.report.sweep import print_call_sweep

    asked = ask_for_call(model, **options)
    name, rows = sweep_call(asked, sweep) if sweep else ("", [("", asked.budget())])
    if form == "json":
        for _, call in rows:
            click.echo(json_line(call_record(call)))
    elif sweep:
        print_call_sweep(console(color), name, rows)
    else:
        print_call_budget(console(color), rows[0][1])
    return all(call.fits for _, call in rows)
