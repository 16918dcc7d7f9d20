"""Run ``oomguard plan``: estimate the memory of each GPU before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from oomguard.cli.options import (
    Count,
    F,
    GroupedCommand,
    SizeText,
    add_options,
    color_option,
    console_of,
    format_option,
    option,
)
from oomguard.core.errors import UsageError, exit_status_of
from oomguard.core.settings import surfaces
from oomguard.estimate.constants import KINDS

if TYPE_CHECKING:
    from oomguard.estimate import Fit
    from oomguard.planning.start import HostBudget, StartRequest


POSITIVE: Final = Count(1)
GPU: Final = "The GPU"
ENGINE: Final = "The engine"
PARALLEL: Final = "Parallelism"
REQUESTS: Final = "Requests and KV cache"
WEIGHTS: Final = "Weights"
GRAPHS: Final = "CUDA graphs"
EXTRAS: Final = "Speculative decoding, LoRA and images"
MEASURED: Final = "Measured figures"
CALL: Final = "transformers generate (needs --engine transformers)"
_OF_MODEL: Final = "the model's own"
_OF_SERVE: Final = "vllm serve's for the GPU"
_OF_VERSION: Final = "the version's"


def engine_options(function: F) -> F:
    """Add vLLM's settings, with the flags of vLLM's own data file."""
    return add_options(
        function,
        (
            _setting(
                "tensor_parallel_size",
                type=POSITIVE,
                default=1,
                show_default=True,
                help="Number of GPUs that share each layer.",
                group=PARALLEL,
            ),
            _setting(
                "pipeline_parallel_size",
                type=POSITIVE,
                default=1,
                show_default=True,
                help="Number of GPU groups that share the layers.",
                group=PARALLEL,
            ),
            _setting(
                "data_parallel_size",
                type=POSITIVE,
                default=1,
                show_default=True,
                help="Number of model copies, which share the experts.",
                group=PARALLEL,
            ),
            _setting(
                "decode_context_parallel_size",
                type=POSITIVE,
                default=1,
                show_default=True,
                help="Number of ranks that share a request's cache by tokens.",
                group=PARALLEL,
            ),
            _setting(
                "enable_expert_parallel",
                is_flag=True,
                help="Put whole experts on each GPU instead of parts of all.",
                group=PARALLEL,
            ),
            _setting(
                "disable_custom_all_reduce",
                is_flag=True,
                help="Use only NCCL between ranks.",
                group=PARALLEL,
            ),
            _setting(
                "max_model_len",
                type=POSITIVE,
                help="Longest request in tokens, prompt and answer.",
                show_default=_OF_MODEL,
                group=REQUESTS,
                example="32768",
            ),
            _setting(
                "max_num_seqs",
                type=POSITIVE,
                help="Maximum number of requests in one step.",
                show_default=_OF_SERVE,
                group=REQUESTS,
                example="256",
            ),
            _setting(
                "max_num_batched_tokens",
                type=POSITIVE,
                help="Maximum number of tokens in one step.",
                show_default=_OF_SERVE,
                group=REQUESTS,
                example="8192",
            ),
            _setting(
                "gpu_memory_utilization",
                type=click.FloatRange(0, 1, min_open=True),
                metavar="RATIO",
                help="Share of the GPU that vLLM may use, above 0 and at most 1.",
                show_default=_OF_VERSION,
                group=REQUESTS,
                example="0.9",
            ),
            _setting(
                "kv_cache_memory_bytes",
                metavar="SIZE",
                help="Size of the KV cache on each GPU, which replaces the utilization.",
                group=REQUESTS,
                example="4GiB",
            ),
            _setting(
                "kv_cache_dtype",
                default="auto",
                show_default=True,
                metavar="DTYPE",
                help="Data type of the KV cache, such as auto, fp8 or bfloat16.",
                group=REQUESTS,
                example="fp8",
            ),
            _setting(
                "block_size",
                type=POSITIVE,
                help="Number of tokens in one block of the KV cache.",
                show_default="the platform's",
                group=REQUESTS,
                example="16",
            ),
            _setting(
                "enable_prefix_caching",
                default=None,
                help="Keep the KV cache of shared prefixes.",
                show_default=_OF_VERSION,
                group=REQUESTS,
            ),
            _setting(
                "mamba_ssm_cache_dtype",
                default="auto",
                show_default=True,
                metavar="DTYPE",
                help="Data type of recurrent states: auto, float32, bfloat16 or float16.",
                group=REQUESTS,
                example="float32",
            ),
            option(
                "--prompt-logprobs",
                is_flag=True,
                help="Count requests that ask for log-probabilities of their prompts.",
                group=REQUESTS,
            ),
            _setting(
                "dtype",
                default="auto",
                show_default=True,
                metavar="DTYPE",
                help="Data type of the weights: auto, bfloat16, float16 or float32.",
                group=WEIGHTS,
                example="bfloat16",
            ),
            _setting(
                "quantization",
                metavar="METHOD",
                help="Quantize the weights on load, with fp8 or bitsandbytes.",
                show_default="as the checkpoint is",
                group=WEIGHTS,
                example="fp8",
            ),
            _setting(
                "cpu_offload_bytes",
                parameter="cpu_offload_gb",
                type=click.FloatRange(0),
                default=0.0,
                show_default="0",
                metavar="GIB",
                help="GiB of each GPU's weights that stay in host memory.",
                group=WEIGHTS,
                example="4",
            ),
            option(
                "--kv-offloading-size",
                type=click.FloatRange(0),
                default=0.0,
                show_default="0",
                metavar="GIB",
                help="GiB of the KV cache in host memory, all ranks together.",
                group=WEIGHTS,
                example="40",
            ),
            option(
                "--swap-space",
                type=click.FloatRange(0),
                default=0.0,
                show_default="0",
                metavar="GIB",
                help="GiB of swap space of each rank in host memory, before vLLM 0.11.",
                group=WEIGHTS,
                example="4",
            ),
            option(
                "--host-memory",
                type=SizeText(),
                metavar="SIZE",
                help="Memory of the host or container, to check offloaded parts against.",
                show_default="not checked",
                group=WEIGHTS,
                example="64GiB",
            ),
            _setting("enforce_eager", is_flag=True, help="Run without CUDA graphs.", group=GRAPHS),
            _setting(
                "cudagraph_capture_sizes",
                metavar="SIZES",
                help="Batch sizes for which vLLM captures CUDA graphs.",
                show_default="the version's for max_num_seqs",
                group=GRAPHS,
                example="'1 2 4 8'",
            ),
            _setting(
                "max_cudagraph_capture_size",
                type=POSITIVE,
                help="Largest batch size of the CUDA graphs.",
                show_default=_OF_VERSION,
                group=GRAPHS,
                example="512",
            ),
            _setting(
                "speculative_config",
                metavar="JSON",
                help=(
                    'Speculative decoding as JSON, such as {"model": "DRAFT", '
                    '"num_speculative_tokens": 5}.'
                ),
                group=EXTRAS,
                example="""'{"model": "DRAFT", "num_speculative_tokens": 5}'""",
            ),
            _setting(
                "enable_lora",
                is_flag=True,
                help="Reserve slots for LoRA adapters.",
                group=EXTRAS,
            ),
            _setting(
                "max_loras",
                type=POSITIVE,
                default=1,
                show_default=True,
                help="Maximum number of LoRA adapters in one step.",
                group=EXTRAS,
            ),
            _setting(
                "max_lora_rank",
                type=POSITIVE,
                default=16,
                show_default=True,
                help="Largest rank of a LoRA adapter.",
                group=EXTRAS,
            ),
            _setting(
                "limit_mm_per_prompt",
                metavar="JSON",
                help=(
                    "Maximum number of images and videos in one prompt as JSON, such as "
                    '{"image": 2, "video": 0}.'
                ),
                group=EXTRAS,
                example="""'{"image": 2, "video": 0}'""",
            ),
            _setting(
                "mm_processor_kwargs",
                metavar="JSON",
                help='Options of the image processor as JSON, such as {"max_pixels": 1003520}.',
                group=EXTRAS,
                example="""'{"max_pixels": 1003520}'""",
            ),
            _setting(
                "skip_mm_profiling",
                is_flag=True,
                help="Reserve no memory for the encoder's own peak.",
                group=EXTRAS,
            ),
        ),
    )


def call_options(function: F) -> F:
    """Add the options of a call of transformers' generate."""
    return add_options(
        function,
        (
            option(
                "--batch-size",
                type=POSITIVE,
                default=1,
                show_default=True,
                help="Number of rows in the call.",
                group=CALL,
            ),
            option(
                "--prompt-tokens",
                type=POSITIVE,
                default=1024,
                show_default=True,
                help="Length of the prompts in tokens, with padding.",
                group=CALL,
            ),
            option(
                "--max-new-tokens",
                type=POSITIVE,
                default=256,
                show_default=True,
                help="Maximum number of new tokens in each row.",
                group=CALL,
            ),
            option(
                "--num-beams",
                type=POSITIVE,
                default=1,
                show_default=True,
                help="Number of beams for each row.",
                group=CALL,
            ),
            option(
                "--attn-implementation",
                default="sdpa",
                show_default=True,
                metavar="NAME",
                help="Attention of the model, sdpa or eager.",
                group=CALL,
                example="eager",
            ),
            option(
                "--cache-implementation",
                metavar="NAME",
                help="Kind of KV cache, such as static.",
                show_default="dynamic",
                group=CALL,
                example="static",
            ),
            option(
                "--trace",
                is_flag=True,
                help="Run the model's own code on fake tensors, which is exact and needs no GPU.",
                group=CALL,
            ),
        ),
    )


def _setting(name: str, *, parameter: str | None = None, **kwargs: Any) -> Callable[[F], F]:
    """Return the option of one setting, with vLLM's flags.

    A yes/no setting with a default of None also gets its off flag.
    """
    own = surfaces("vllm")[name]
    long, *short = own.flags
    if kwargs.get("default", ...) is None and "metavar" not in kwargs and "type" not in kwargs:
        long = f"{long}/{own.off_flag}"
    return option(long, *short, parameter or name, **kwargs)


# PlanCommand accepts a whole ``vllm serve`` command: its settings become options, and the plan
# names flags that it does not count.

OTHER_FLAGS: Final = "oomguard.other_flags"
KEPT_WORDS: Final = "oomguard.kept_words"


def _has_own_options_only(args: list[str], options: Mapping[str, bool]) -> bool:
    """Return whether a command line has one model and options of oomguard, with nothing of vLLM."""
    models = 0
    words = iter(args)
    for word in words:
        flag, equals, _ = word.partition("=")
        if not word.startswith("-"):
            models += 1
        elif flag not in options:
            return False
        # The next word is this option's value, not a model.
        elif options[flag] and not equals:
            next(words, None)
    # Several words may be a pasted command that begins with ``vllm serve``.
    return models <= 1


class PlanCommand(GroupedCommand):
    """Parse vLLM's flags as vLLM does; flags that are not an option go to ``ctx.meta``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments with vLLM's settings as options, without its other flags.

        Raises:
            NoSuchOption: if a flag is neither ours nor a flag of any vLLM version.
            InputError: if the file of ``--config`` cannot be read.
        """
        # A shell completes a word of an unfinished line.
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        options = {}
        for own in self.get_params(ctx):
            for flag in (*own.opts, *own.secondary_opts):
                if flag.startswith("-"):
                    options[flag] = not getattr(own, "is_flag", False)
        # Most plans use no other flag of vLLM, and the tables of its flags take time to load.
        if _has_own_options_only(args, options):
            return super().parse_args(ctx, args)
        from oomguard.engines.vllm.pasted_command import read_pasted

        found = read_pasted(args, options)
        if found.unknown is not None:
            raise click.NoSuchOption(found.unknown, possibilities=found.nearest, ctx=ctx)
        ctx.meta[OTHER_FLAGS] = found.not_counted
        ctx.meta[KEPT_WORDS] = found.kept
        return super().parse_args(ctx, found.words)


@click.command(
    "plan",
    cls=PlanCommand,
    common=(
        "gpu_memory",
        "gpu_name",
        "max_model_len",
        "tensor_parallel_size",
        "sweep",
        "form",
    ),
    example="oomguard plan Qwen/Qwen3-8B --gpu-memory 24GiB",
)
@click.argument("model", metavar="MODEL")
@option(
    "--gpu-memory",
    metavar="SIZE",
    help="Total memory of one GPU, such as 24GiB.",
    show_default="this machine's GPU",
    group=GPU,
    example="24GiB",
)
@option(
    "--gpu-name",
    metavar="NAME",
    help="Name of the GPU, such as H100 or 'RTX 4090'.",
    group=GPU,
    example="H100",
)
@option(
    "--sweep",
    metavar="SETTING=V1,V2,…",
    help="Print one row for each value of a setting.",
    example="max_model_len=8192,16384,32768",
)
@format_option("the plan")
@option(
    "--gpu",
    type=Count(0),
    metavar="INDEX",
    help="Plan for the GPU of this machine with this index.",
    group=GPU,
    example="0",
)
@option(
    "--driver-version",
    metavar="VERSION",
    help="Version of the NVIDIA driver, such as 535.129.",
    show_default="this machine's",
    group=GPU,
    example="535.129",
)
@option(
    "--memory-kind",
    type=click.Choice(KINDS),
    help="Kind of the GPU's memory.",
    show_default="from GPU and host",
    group=GPU,
)
@option(
    "--gpu-replicas",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Number of engines that share a time-sliced GPU.",
    group=GPU,
)
@option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Backend of vLLM, which decides block size and state.",
    group=GPU,
)
@option(
    "--engine",
    type=click.Choice(["vllm", "transformers"]),
    default="vllm",
    show_default=True,
    help="Engine that runs the model.",
    group=ENGINE,
)
@option(
    "--engine-version",
    metavar="VERSION",
    help="Version of vLLM to plan for.",
    show_default="the installed or newest known one",
    group=ENGINE,
    example="0.11.0",
)
@engine_options
@call_options
@option(
    "--calibrate",
    metavar="LOG",
    multiple=True,
    help="Replace estimates by the figures of this start-up log, now and later (repeatable).",
    group=MEASURED,
    example="start.log",
)
@option(
    "--no-calibration",
    is_flag=True,
    help="Use the estimates even if starts were measured.",
    group=MEASURED,
)
@option(
    "--ask-engine",
    is_flag=True,
    help="Let the installed vLLM lay out the KV cache, in about ten seconds without a GPU.",
    group=MEASURED,
)
@option(
    "--solve",
    metavar="SETTING",
    help="Find the largest value of a setting that fits, or the fewest ranks.",
    example="max_model_len",
)
@option(
    "--exit-code",
    is_flag=True,
    help="Exit with status 1 if the model does not fit, 3 if the plan is unsure.",
)
@color_option
@click.pass_context
def command(ctx: click.Context, /, model: str, form: str, exit_code: bool, **options: Any) -> int:
    """Estimate the memory of each GPU for a vLLM start or a transformers generate call.

    MODEL is a folder, a config.json, a GGUF file, a name on the hub, or a YAML file with several
    services that share the GPUs of a machine. oomguard loads no weights and starts nothing. You can
    give a whole vllm serve command instead of MODEL: the plan names those of its flags that take
    memory but are not counted.

    Exit status: 0 after success, 2 after a usage error or if the model is unreadable. With
    --exit-code, 1 if the model does not fit and 3 if the plan is unsure.
    """
    try:
        fit = _plan(ctx, model, form, **options)
    except UsageError as error:
        # A program that reads JSON gets the refusal as a record.
        if form != "json":
            raise
        from oomguard.report.json import json_line
        from oomguard.report.plan import refusal_record

        click.echo(json_line(refusal_record(model, error)))
        return exit_status_of(error)
    return _STATUS[fit] if exit_code else 0


def _plan(
    ctx: click.Context,
    model: str,
    form: str,
    *,
    engine: str,
    ask_engine: bool,
    trace: bool,
    sweep: str | None,
    solve: str | None,
    color: str,
    **options: Any,
) -> Fit:
    """Print one plan, or one row for each value of a sweep; return whether all of them fit."""
    if ask_engine and (sweep or engine == "transformers"):
        raise UsageError("--ask-engine works for one plan of vLLM only", hint="leave out --sweep")
    if solve and (sweep or ask_engine or engine == "transformers"):
        raise UsageError(
            "--solve works for one plan of vLLM only", hint="leave out --sweep and --ask-engine"
        )
    if model.endswith((".yaml", ".yml")):
        return _plan_stack(model, form, color, options)
    if engine == "transformers":
        from oomguard.planning.plan import CALL_SETTINGS

        gpu = {name: options[name] for name in ("gpu_memory", "gpu", "gpu_name")}
        own = {}
        for name, value in options.items():
            if name in CALL_SETTINGS:
                own[name] = value
        return _plan_call(model, sweep, form, color, **gpu, trace=trace, **own)
    asked = start_request(ctx, model, **options)
    if solve:
        return _solve_start(asked, solve, form, color)
    if sweep:
        return _sweep_start(asked, sweep, form, color)
    return _plan_start(asked, form, color, by_engine=ask_engine, host=_host(asked, options))


def _plan_stack(path: str, form: str, color: str, options: dict[str, Any]) -> Fit:
    """Print where the services of a file go; return whether all of them fit."""
    from oomguard.cli.read_stack import read_stack
    from oomguard.planning.stack import plan_stack
    from oomguard.report.json import json_line
    from oomguard.report.stack import print_stack, stack_record

    # Each service is parsed as its own command, so it may set every option of a plan.
    def request_of(words: list[str]) -> StartRequest:
        context = command.make_context("oomguard plan", words)
        return start_request(context, **context.params)

    gpus, services = read_stack(path, request_of, options)
    stack = plan_stack(gpus, services)
    if form == "json":
        click.echo(json_line(stack_record(stack)))
    else:
        print_stack(console_of(form, color), stack)
    return stack.fit


def start_request(
    ctx: click.Context,
    model: str,
    *,
    engine_version: str | None,
    calibrate: tuple[str, ...],
    no_calibration: bool,
    cpu_offload_gb: float,
    **options: Any,
) -> StartRequest:
    """Return the start that the options of a command ask for; a context has its other flags."""
    from oomguard.planning.start import START_SETTINGS, bytes_of_gib, read_start_request

    others = (
        "gpu_memory",
        "gpu",
        "gpu_name",
        "driver_version",
        "memory_kind",
        "gpu_replicas",
        "device",
    )
    own = {}
    for name, value in options.items():
        if name in START_SETTINGS:
            own[name] = value
    return read_start_request(
        model,
        **{name: options[name] for name in others},
        engine_version=engine_version,
        calibrate=calibrate,
        use_calibrations=not no_calibration,
        not_counted=ctx.meta.get(OTHER_FLAGS, ()),
        kept_words=(*ctx.meta.get(KEPT_WORDS, ()), *_host_words(options)),
        cpu_offload_bytes=bytes_of_gib("cpu_offload_gb", cpu_offload_gb),
        **own,
    )


# Status 2 belongs to usage errors, so an unsure plan has 3.
_STATUS: Final[Mapping[Fit, int]] = {"yes": 0, "no": 1, "unsure": 3}


def _least(fits: Iterable[Fit]) -> Fit:
    """Return ``no`` if any row does not fit, else ``unsure`` if any is unsure."""
    found = set(fits)
    if "no" in found:
        return "no"
    if "unsure" in found:
        return "unsure"
    return "yes"


_HOST_FLAGS: Final = {
    "kv_offloading_size": "--kv-offloading-size",
    "swap_space": "--swap-space",
}


def _host_words(settings: dict[str, Any]) -> list[str]:
    """Return the flags of the host's memory, which a changed command keeps."""
    words: list[str] = []
    for name, flag in _HOST_FLAGS.items():
        if settings[name]:
            words += [flag, f"{settings[name]:g}"]
    return words


def _host(asked: StartRequest, settings: dict[str, Any]) -> HostBudget | None:
    """Return the host's memory of a start; None if no option concerns it."""
    from oomguard.planning.start import host_of_start

    return host_of_start(
        asked.model,
        asked.settings,
        host_memory=settings["host_memory"],
        kv_offloading_size=settings["kv_offloading_size"],
        swap_space=settings["swap_space"],
    )


def _plan_start(
    asked: StartRequest, form: str, color: str, *, by_engine: bool, host: HostBudget | None
) -> Fit:
    """Print the plan of a start; return whether it fits, on the GPUs and on the host."""
    from dataclasses import replace

    from oomguard.planning.start import plan_by_engine, plan_start
    from oomguard.report.plan import plan_record, print_start_plan

    if by_engine:
        plan = plan_by_engine(asked)
    else:
        plan = plan_start(asked)
    plan = replace(plan, host=host)
    if form == "json":
        from oomguard.report.json import json_line

        record = plan_record(plan)
        if host is not None:
            # The start needs both memories, so the host may change the answer.
            record |= {"host": host.record(), "fit": plan.fit, "fits": plan.fits}
        click.echo(json_line(record))
    else:
        screen = console_of(form, color)
        print_start_plan(screen, plan)
        if host is not None:
            screen.print(host.line(), markup=False, soft_wrap=True)
    return plan.fit


def _solve_start(asked: StartRequest, name: str, form: str, color: str) -> Fit:
    """Print the largest value of a setting that fits; return whether there is one."""
    from oomguard.planning.plan import solve_start
    from oomguard.report.json import json_line
    from oomguard.report.plan import print_solved_plan, solved_record

    solved = solve_start(asked, name)
    if form == "json":
        click.echo(json_line(solved_record(solved)))
    else:
        print_solved_plan(console_of(form, color), solved)
    # Without a value the plan is the user's own start, whose fit does not answer the question.
    if solved.value is None and solved.plan.fit == "yes":
        return "no"
    return solved.plan.fit


def _sweep_start(asked: StartRequest, sweep: str, form: str, color: str) -> Fit:
    """Print one row for each value; return whether all of them fit."""
    from oomguard.planning.plan import sweep_start
    from oomguard.report.json import json_line
    from oomguard.report.plan import print_start_sweep, sweep_records

    name, rows = sweep_start(asked, sweep)
    if form == "json":
        for record in sweep_records(name, rows):
            click.echo(json_line(record))
    else:
        print_start_sweep(console_of(form, color), name, rows)
    return _least("no" if isinstance(start, str) else start.fit for _, start in rows)


def _plan_call(model: str, sweep: str | None, form: str, color: str, **options: Any) -> Fit:
    """Print the budget of a generate call, or one row for each value.

    Returns:
        Whether all of them fit.
    """
    from oomguard.planning.plan import read_call_request, sweep_call
    from oomguard.report.json import json_line
    from oomguard.report.plan import call_record, print_call_budget, print_call_sweep

    asked = read_call_request(model, **options)
    name, rows = sweep_call(asked, sweep) if sweep else ("", [("", asked.budget())])
    if form == "json":
        for _, call in rows:
            click.echo(json_line(call_record(call)))
    elif sweep:
        print_call_sweep(console_of(form, color), name, rows)
    else:
        print_call_budget(console_of(form, color), rows[0][1])
    return _least(call.fit for _, call in rows)
