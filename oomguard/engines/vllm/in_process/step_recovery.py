"""Let a vLLM engine survive an out-of-memory in a step: only a request that cannot fit fails.

vLLM's engine core ends if a step raises. Here the core drops the failed step instead: the worker
releases its caches, the scheduler forgets the step and computes its requests again, in smaller
steps if needed (``StepBudget``). A request that fails alone ends with an error for its client.

The module runs in vLLM's processes. It acts only if our variable is set, and it never raises a
new error into vLLM: if a recovery fails, vLLM sees the error of the step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import re
import sys
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.engines.vllm.in_process import message_sender
from oomguard.engines.vllm.plugin import STEP_RECOVERY

# --- the decision after a failed step, without anything of vLLM ---------------------------------
#
# A step is its scheduled tokens by request. A request is *fresh* until it has produced a token: the
# requests that ran before are unlikely to be the ones that do not fit.

# A chunk of so few tokens is not worth splitting further before its request is blamed.
SMALL_TOKENS = 16
# After so long without a failure the budget of a step doubles.
QUIET_S = 10.0
# The others wait so long for a suspected request that makes progress alone; twice as long after
# each of its failures, so that even a long prompt comes to the part that fails.
ALONE_S = 0.1
# So many requests that fail alone, one after another within a minute and without a step that works
# in between: then it may not be the requests.
MOST_OFFENDERS = 3
OFFENDERS_WITHIN_S = 60.0
# So many failed steps without one that works.
MOST_FAILURES = 40


@dataclass(frozen=True)
class FailedStep:
    """A step that ran out of memory.

    Attributes:
        tokens: the scheduled tokens by request, in the order of the step.
        fresh: the requests that have not produced a token yet.
        tried_bytes: the size of the failed allocation; None if unknown.
        is_alone: whether the other requests were held back to test this one.
        can_split: whether a request's prompt may be computed in several steps.
    """

    tokens: Mapping[str, int]
    fresh: Collection[str]
    tried_bytes: int | None = None
    is_alone: bool = False
    can_split: bool = True

    @property
    def total_tokens(self) -> int:
        """The tokens of the step."""
        return sum(self.tokens.values())


@dataclass(frozen=True)
class StepDecision:
    """What follows a failed step.

    Attributes:
        budget_tokens: the most tokens of a step from now on.
        offender: the request that cannot fit; None if none is proven.
        alone: the request to run alone next, to learn whether it is the one; None: all run.
        gives_up: whether recoveries do not help. If an offender is named too, the engine may still
            work without it.
    """

    budget_tokens: int
    offender: str | None = None
    alone: str | None = None
    gives_up: bool = False


class StepBudget:
    """The most tokens of a step, lowered by failures and raised in quiet times.

        budget = StepBudget(2048)
        budget.fail(FailedStep({"a": 2048}, {"a"}), now_s=0.0).budget_tokens    # 1024

    Args:
        full_tokens: the budget that the engine was started with.
    """

    def __init__(self, full_tokens: int) -> None:
        self.full_tokens = full_tokens
        self.current_tokens = full_tokens
        # The smallest size that failed: the budget stays below it.
        self.ceiling_tokens: int | None = None
        # The lowered budget under which steps last worked; None if steps of full size do.
        self.learned_tokens: int | None = None
        self._largest_success_tokens = 0
        self._failures: dict[str, int] = {}
        # The budget, the ceiling and the learned budget before a request's first failure: they come
        # back if it was the one that did not fit.
        self._before: dict[str, tuple[int, int | None, int | None]] = {}
        # The steps of one request only that failed since the last step that worked, each as its
        # tokens and the size of the failed allocation.
        self._single_failures: list[tuple[int, int | None]] = []
        self._failed_in_a_row = 0
        self._offenders_at_s: deque[float] = deque()
        self._changed_at_s = 0.0

    @property
    def is_calm(self) -> bool:
        """Whether the budget is full and no request is suspected."""
        return self.current_tokens == self.full_tokens and not self._failures

    def fail(self, step: FailedStep, now_s: float) -> StepDecision:
        """Record a failed step, and return what follows."""
        # In the order of the step.
        fresh = list(filter(step.fresh.__contains__, step.tokens))
        suspects = fresh or list(step.tokens)
        self._changed_at_s = now_s
        self._failed_in_a_row += 1
        for name in suspects:
            self._failures[name] = self._failures.get(name, 0) + 1
            before = (self.current_tokens, self.ceiling_tokens, self.learned_tokens)
            self._before.setdefault(name, before)
        if self._failed_in_a_row > MOST_FAILURES:
            return StepDecision(self.current_tokens, gives_up=True)
        if len(step.tokens) > 1:
            self._single_failures.clear()
        else:
            self._single_failures.append((step.total_tokens, step.tried_bytes))
            if self._is_proven(step):
                return self._end(suspects[0], now_s)
        # The first failure at a size that has worked may be chance: the caches are free now.
        if self._failed_in_a_row > 1 or step.total_tokens > self._largest_success_tokens:
            self._lower(step, fresh)
        if step.is_alone:
            return StepDecision(self.current_tokens, alone=suspects[0])
        if len(step.tokens) > 1:
            for name in fresh:
                if self._failures[name] > 1:
                    return StepDecision(self.current_tokens, alone=name)
        return StepDecision(self.current_tokens)

    def succeed(self, tokens: int, produced: Collection[str]) -> None:
        """Record a step that worked, with the requests that produced a token in it."""
        self._largest_success_tokens = max(self._largest_success_tokens, tokens)
        self.learned_tokens = None
        if self.current_tokens < self.full_tokens:
            self.learned_tokens = self.current_tokens
        self._failed_in_a_row = 0
        self._single_failures.clear()
        self._offenders_at_s.clear()
        for name in produced:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Drop what is known of a request that made progress or ended."""
        self._failures.pop(name, None)
        self._before.pop(name, None)

    def alone_s(self, name: str) -> float:
        """Return how long a suspected request may run alone; longer after each failure."""
        failures = min(self._failures.get(name, 0), 8)
        return ALONE_S * float(2**failures)

    def names(self) -> list[str]:
        """Return the requests that are suspected."""
        return list(self._failures)

    def grow(self, now_s: float) -> bool:
        """Double the budget after a quiet time, below what failed; return whether it changed."""
        if self.current_tokens >= self.full_tokens or now_s - self._changed_at_s < QUIET_S:
            return False
        wanted = min(self.current_tokens * 2, self.full_tokens)
        if self.ceiling_tokens is not None:
            wanted = min(wanted, max(1, self.ceiling_tokens - 1))
        self._changed_at_s = now_s
        has_grown = wanted > self.current_tokens
        self.current_tokens = max(self.current_tokens, wanted)
        return has_grown

    def _is_proven(self, step: FailedStep) -> bool:
        """Return whether the only request of a step is the one that does not fit.

        One failure may be chance. After two in a row, it is proven if its step cannot get smaller,
        or if a smaller step did not need less.
        """
        if len(self._single_failures) < 2:
            return False
        if not step.can_split or step.total_tokens <= SMALL_TOKENS:
            return True
        tokens, tried_bytes = self._single_failures[-2]
        if tried_bytes is None or step.tried_bytes is None:
            return False
        return step.total_tokens < tokens and step.tried_bytes >= tried_bytes

    def _end(self, name: str, now_s: float) -> StepDecision:
        """Return the end of a request; its failures say nothing about other requests' steps."""
        self._single_failures.clear()
        self.current_tokens, self.ceiling_tokens, self.learned_tokens = self._before[name]
        self.forget(name)
        self._offenders_at_s.append(now_s)
        while now_s - self._offenders_at_s[0] > OFFENDERS_WITHIN_S:
            self._offenders_at_s.popleft()
        gives_up = len(self._offenders_at_s) >= MOST_OFFENDERS
        return StepDecision(self.current_tokens, offender=name, gives_up=gives_up)

    def _lower(self, step: FailedStep, fresh: Collection[str]) -> None:
        """Halve the budget below what failed; the requests that ran before keep their token."""
        total = step.total_tokens
        wanted = total // 2
        if fresh and step.can_split:
            # A budget of half would leave nothing for a prompt next to many streams.
            others = len(step.tokens) - len(fresh)
            wanted = max(wanted, others + sum(step.tokens[name] for name in fresh) // 2)
        wanted = max(1, min(wanted, total - 1))
        self.current_tokens = min(self.current_tokens, wanted)
        self.ceiling_tokens = min(total, self.ceiling_tokens or total)
        self._largest_success_tokens = min(self._largest_success_tokens, total - 1)


_RELIED_ON: Final = Path(__file__).parents[1] / "step_recovery.toml"
# vLLM's log handler and oomguard's record of the log both take this logger.
_LOGGER: Final = "vllm.oomguard"
# The beginning of every error that ends one request; the front end recognizes it.
ERROR_PREFIX: Final = "oomguard: "
# The error of a step behind a failed one; the failure itself is the worker's.
_BEHIND: Final = "oomguard: the step before this one failed"
_MOST_REFUSED: Final = 256
_MOST_SNAPSHOTS: Final = 8
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_TRIED: Final = re.compile(
    r"[Tt]ried to allocate (?P<size>[\d.]+) ?(?P<unit>bytes|KiB|MiB|GiB)", re.ASCII
)
_LIMIT: Final = re.compile(
    r"total capacity of (?P<total>[\d.]+ [KMG]iB) of which (?P<free>[\d.]+ [KMG]iB) is free",
    re.ASCII,
)
_UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": _MIB, "GiB": _GIB}
# Messages of an allocation that failed, in exceptions without a class of their own. After a
# driver's "CUDA error: out of memory" a process cannot go on, so that text is not among them.
_MESSAGES: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# The parameters of a request on whose account it may need more memory than another.
_ASKED: Final = ("prompt_logprobs", "logprobs", "structured_outputs", "max_tokens", "n")
# The functions of a step that say which of its parts failed, innermost first in a traceback.
_PARTS: Final = {
    "_get_prompt_logprobs_dict": "prompt logprobs",
    "compute_prompt_logprobs": "prompt logprobs",
    "_execute_mm_encoder": "image or audio encoder",
    "apply_grammar_bitmask": "structured output",
    "_sample": "sampler",
    "sample": "sampler",
    "compute_logits": "logits",
    "_model_forward": "forward pass",
    "sample_tokens": "sampler",
    "execute_model": "forward pass",
}


# --- hooks -------------------------------------------------------------------------------------


def is_wanted() -> bool:
    """Return whether oomguard asks the engines of this process to recover."""
    return os.environ.get(STEP_RECOVERY) == "1"


def install() -> str | None:
    """Hook vLLM's engine core and front end in this process; return why not, None if hooked.

    A second call does nothing.
    """
    why = _why_unknown()
    if why is not None:
        return why
    import importlib

    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    _wrap(core, "__init__", _making)
    for name in ("step", "step_with_batch_queue"):
        _wrap(core, name, _stepping)
    _wrap(core, "add_request", _adding)
    front = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
    _wrap(front, "process_outputs", _processing)
    return None


def _why_unknown() -> str | None:
    """Return why this vLLM is not one whose internals are known; None if it is."""
    import importlib
    import importlib.metadata

    known = relied_on()
    version = _version()
    if version is None:
        return "the version of vLLM is unknown"
    shown = ".".join(map(str, version))
    if version[:2] < _numbers(known["first"]):
        return f"vLLM {shown} is older than {known['first']}"
    if version[:2] > _numbers(known["newest"]):
        return f"vLLM {shown} is newer than {known['newest']}"
    for row in known["hooks"]:
        owner = getattr(importlib.import_module(row["module"]), row["owner"], None)
        for name, parameters in row["functions"].items():
            function = inspect.getattr_static(owner, name, None)
            if not inspect.isfunction(function):
                return f"{row['owner']}.{name} is not a plain method"
            found = [*inspect.signature(function).parameters]
            if found[: len(parameters)] != parameters:
                return f"{row['owner']}.{name} has other parameters: {', '.join(found)}"
    return None


def relied_on() -> dict[str, Any]:
    """Return the data file of the names in vLLM that the recovery relies on."""
    import tomllib

    return tomllib.loads(_RELIED_ON.read_text(encoding="utf-8"))


def _version() -> tuple[int, ...] | None:
    text = str(getattr(sys.modules.get("vllm"), "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        return None
    return tuple(map(int, found.groups()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _wrap(owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = inspect.getattr_static(owner, name)
    if not getattr(original, "_oomguard_recovery", False):
        wrapped = wrapper(original)
        wrapped._oomguard_recovery = True
        setattr(owner, name, wrapped)


def _making(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Decide now: the guard's variable is set only while the engine starts.
        _recovery_of(self)

    return init


def _stepping(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any) -> Any:
        recovery = _recovery_of(self)
        if recovery is None:
            return original(self)
        return recovery.step(original)

    return step


def _adding(original: Any) -> Any:
    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        recovery = _recovery_of(self)
        if recovery is not None:
            with contextlib.suppress(Exception):
                recovery.note_request(request)
        return result

    return add_request


def _processing(original: Any) -> Any:
    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            engine_core_outputs = _raise_in_clients(self, engine_core_outputs)
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _raise_in_clients(processor: Any, outputs: list[Any]) -> list[Any]:
    """Raise our errors in the requests of an asynchronous front end; return the other outputs.

    vLLM's servers answer "Internal server error" to a request that ended with an error. An
    exception of this class carries the text and the status instead. Offline the output itself
    carries the text, as its ``stop_reason``.
    """
    ours = list(filter(_is_ours, outputs))
    if not ours:
        return outputs
    from http import HTTPStatus

    from vllm.exceptions import GracefulHTTPError

    raised = set()
    for one in ours:
        state = processor.request_states.get(one.request_id)
        if state is not None and state.queue is not None:
            processor.abort_requests([one.request_id], internal=True)
            error = GracefulHTTPError(one.stop_reason, HTTPStatus.INTERNAL_SERVER_ERROR)
            # Instead of the output that reports the abort.
            state.queue.put(error)
            raised.add(one.request_id)
    return list(filter(lambda one: one.request_id not in raised, outputs))


def _is_ours(output: Any) -> bool:
    reason = output.stop_reason
    return (
        output.finish_reason is not None
        and isinstance(reason, str)
        and reason.startswith(ERROR_PREFIX)
    )


def _recovery_of(core: Any) -> StepRecovery | None:
    """Return the recovery of an engine core, made at its first step; None if it has none."""
    try:
        return core._oomguard_recovery  # type: ignore[no-any-return]
    except AttributeError:
        pass
    recovery = None
    try:
        if is_wanted():
            why = why_not(core)
            if why is None:
                recovery = StepRecovery(core)
            else:
                _log(logging.INFO, "steps that run out of memory end the engine", why=why)
    except Exception as error:  # noqa: BLE001 - the engine works as without oomguard
        recovery = None
        _log(logging.DEBUG, "no recovery of steps", why=f"{type(error).__name__}: {error}")
    core._oomguard_recovery = recovery
    return recovery


def why_not(core: Any) -> str | None:
    """Return why steps of this engine cannot be recovered; None if they can."""
    config = core.vllm_config
    parallel = config.parallel_config
    ranks = max(getattr(parallel, "world_size", 1), getattr(parallel, "data_parallel_size", 1))
    if ranks > 1:
        return f"the engine has {ranks} ranks"
    if getattr(config, "speculative_config", None) is not None:
        return "it decodes speculatively"
    if getattr(config, "kv_transfer_config", None) is not None:
        return "it has a KV connector"
    if getattr(config, "ec_transfer_config", None) is not None:
        return "it has an encoder connector"
    scheduler = type(core.scheduler)
    if scheduler.__name__ not in {"Scheduler", "AsyncScheduler"}:
        return f"it has its own scheduler, {scheduler.__name__}"
    if getattr(config.model_config, "is_encoder_decoder", False):
        return "its model is an encoder-decoder"
    if getattr(config.model_config, "runner_type", "generate") != "generate":
        return "its model does not generate text"
    if getattr(core.scheduler, "need_mamba_block_aligned_split", False):
        return "its layers with a state need steps of whole blocks"
    if getattr(getattr(config, "scheduler_config", None), "disable_chunked_mm_input", False):
        return "its images cannot be computed in parts"
    for row in relied_on()["uses"]:
        if row["owner"] not in {"Scheduler", "EngineCore"}:
            continue
        holder = core
        if row["owner"] == "Scheduler":
            holder = core.scheduler
        for name in row["names"]:
            if not hasattr(holder, name):
                return f"this {row['owner']} has no {name}"
    return None


# --- the worker's part ---------------------------------------------------------------------------


def install_in_worker(worker: Any) -> None:
    """Watch the two calls of a step in a worker: keep a failure, and the state of the seeds."""
    runner = worker.model_runner
    if hasattr(runner, "_oomguard_steps"):
        return
    watch = runner._oomguard_steps = WorkerSteps(runner)
    runner.execute_model = watch.watched(runner.execute_model, watch.begin)
    runner.sample_tokens = watch.watched(runner.sample_tokens, watch.keep_seeds)


def release_steps(worker: Any, dropped: int) -> dict[str, Any] | None:
    """Drop the last steps in a worker, release its caches, and return its failure, if any."""
    runner = worker.model_runner
    watch: WorkerSteps = runner._oomguard_steps
    failure = watch.failure
    watch.failure = None
    if failure is not None and not failure["is_oom"]:
        return failure
    runner.execute_model_state = None
    batch = getattr(runner, "input_batch", None)
    # Tokens that the dropped steps sampled on the device must not continue a request.
    for name in ("prev_sampled_token_ids", "prev_req_id_to_index"):
        if hasattr(batch, name):
            setattr(batch, name, None)
    watch.restore_seeds(dropped)
    _release_caches()
    return failure


class WorkerSteps:
    """The steps of one worker: the last failure, and the random states before each sampling."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._number = 0
        self._seeds: deque[tuple[int, list[tuple[Any, Any]]]] = deque(maxlen=_MOST_SNAPSHOTS)
        self.failure: dict[str, Any] | None = None

    def watched(self, call: Any, before: Callable[[], None]) -> Any:
        """Return a call that runs ``before`` first and keeps its failure."""

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if self.failure is None:
                    self.failure = describe(error)
                raise

        return watched

    def begin(self) -> None:
        """Count a step, and refuse it after a failed one: its tokens would be missing.

        With asynchronous scheduling the next step is already on its way. On a device, the
        placeholders of missing tokens would be an illegal access.
        """
        self._number += 1
        if self.failure is not None:
            raise RuntimeError(_BEHIND)

    def keep_seeds(self) -> None:
        """Keep the state of the generators of seeded requests, which sampling advances."""
        generators = getattr(getattr(self._runner, "input_batch", None), "generators", None)
        if generators:
            states = [(one, one.get_state()) for one in generators.values()]
            self._seeds.append((self._number, states))

    def restore_seeds(self, dropped: int) -> None:
        """Return the generators to their state before the last ``dropped`` steps."""
        # From the newest to the oldest, so that the oldest state remains.
        while self._seeds and self._seeds[-1][0] > self._number - dropped:
            _, states = self._seeds.pop()
            for generator, state in states:
                generator.set_state(state)
        self._seeds.clear()


def _release_caches() -> None:
    """Return the memory that torch's allocator keeps without using it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def describe(error: BaseException) -> dict[str, Any]:
    """Return what is known of a step's failure: is it memory, its size, its limit, its part."""
    text = str(error)
    tried = _TRIED.search(text)
    tried_bytes = None
    if tried is not None:
        tried_bytes = int(float(tried["size"]) * _UNITS[tried["unit"]])
    return {
        "is_oom": is_out_of_memory(error),
        "text": text.partition("\n")[0][:200],
        "tried_bytes": tried_bytes,
        "limit": _limit(text),
        "part": _part(error),
    }


def _limit(text: str) -> str | None:
    """Return what a device had, as its message says; on a CPU what this process may have."""
    found = _LIMIT.search(text)
    if found is not None:
        return f"{found['free']} of {found['total']} free"
    import resource

    limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if "CPUAllocator" in text and limit_bytes != resource.RLIM_INFINITY:
        return f"{_in_words(limit_bytes)} allowed for the whole process"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a failed allocation after which a process can go on."""
    text = str(error)
    if "CUDA error" in text:
        return False
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"OutOfMemoryError", "MemoryError"}:
        return True
    return isinstance(error, RuntimeError) and any(message in text for message in _MESSAGES)


def _part(error: BaseException) -> str | None:
    part = None
    # The last one that is known is the innermost.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part = _PARTS.get(frame.f_code.co_name, part)
    return part


# --- the engine core's part ----------------------------------------------------------------------


class StepRecovery:
    """Recovers the steps of one engine core.

    Args:
        core: vLLM's engine core, before its first step.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._budget = StepBudget(core.scheduler.max_num_scheduled_tokens)
        config = core.vllm_config.scheduler_config
        self._can_split = getattr(config, "enable_chunked_prefill", True)
        device = getattr(core.vllm_config, "device_config", None)
        self._is_on_cpu = getattr(device, "device_type", None) == "cpu"
        # Scheduled steps without a processed output.
        self._in_flight: deque[Any] = deque()
        self._alone: str | None = None
        self._alone_since_s = 0.0
        self._refused: OrderedDict[int, str] = OrderedDict()
        self._to_refuse: dict[str, str] = {}
        self._dump = core.log_error_detail
        core.log_error_detail = _without_dump
        self._schedule = core.scheduler.schedule
        self._update = core.scheduler.update_from_output
        core.scheduler.schedule = self._scheduled
        core.scheduler.update_from_output = self._updated
        core.model_executor.collective_rpc(install_in_worker)

    # --- every step

    def step(self, original: Any) -> Any:
        """Run a step of the core; after an out-of-memory in it, recover."""
        if self._to_refuse:
            refused = self._refuse()
            if refused:
                return refused, False
        try:
            return original(self._core)
        except Exception as error:
            outputs = None
            failed = next(iter(self._in_flight), None)
            try:
                outputs = self._recover(error)
            except Exception as own:  # noqa: BLE001 - vLLM's own behavior follows
                _log(logging.DEBUG, "a recovery failed", why=f"{type(own).__name__}: {own}")
            if outputs is None:
                with contextlib.suppress(Exception):
                    self._say_end(error)
                if failed is None:
                    raise
                # vLLM logs the step with which it ends.
                with self._dump(failed):
                    raise
        return outputs, False

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        budget = self._budget
        if not budget.is_calm:
            self._prepare()
        if self._alone is None:
            output = self._schedule(*args, **kwargs)
        else:
            with self._others_hidden(self._alone):
                output = self._schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._in_flight.append(output)
        return output

    def _updated(self, scheduler_output: Any, output: Any) -> Any:
        outputs = self._update(scheduler_output, output)
        if self._in_flight and self._in_flight[0] is scheduler_output:
            self._in_flight.popleft()
            produced: list[str] = []
            if not self._budget.is_calm:
                for group in outputs.values():
                    produced += [one.request_id for one in group.outputs]
            self._budget.succeed(scheduler_output.total_num_scheduled_tokens, produced)
            if self._alone is not None:
                alone_s = time.monotonic() - self._alone_since_s
                if self._alone in produced or alone_s > self._budget.alone_s(self._alone):
                    self._alone = None
        return outputs

    def _prepare(self) -> None:
        """Set the budget of the next step."""
        budget = self._budget
        scheduler = self._scheduler
        for name in budget.names():
            if name not in scheduler.requests:
                budget.forget(name)
        if self._alone is not None and self._alone not in scheduler.requests:
            self._alone = None
        if budget.grow(time.monotonic()):
            _log(logging.INFO, "steps may be larger again", most_tokens=budget.current_tokens)
        self._apply_budget()

    def _apply_budget(self) -> None:
        wanted = self._budget.current_tokens
        if self._has_seeds_on_cpu():
            wanted = self._budget.full_tokens
        elif not self._can_split:
            # A prompt that cannot be split would wait for ever.
            requests = self._scheduler.requests.values()
            wanted = max([wanted, *(request.num_tokens for request in requests)])
            wanted = min(wanted, self._budget.full_tokens)
        self._scheduler.max_num_scheduled_tokens = wanted

    def _has_seeds_on_cpu(self) -> bool:
        """Return whether smaller steps would end the engine.

        vLLM's CPU backend raises if a prompt with a seed is computed in several steps (0.32).
        """
        if not self._is_on_cpu:
            return False
        params = (request.sampling_params for request in self._scheduler.requests.values())
        return any(one is not None and one.seed is not None for one in params)

    @contextlib.contextmanager
    def _others_hidden(self, name: str) -> Iterator[None]:
        """Let the scheduler see one request only, which waits or is in the step in flight."""
        scheduler = self._scheduler
        running = scheduler.running
        own, running_others = _split_by_name(running, {name})
        _, others = _split_by_name(scheduler.waiting, {name})
        if not own and len(others) == len(scheduler.waiting):
            self._alone = None
            yield
            return
        scheduler.running = own
        scheduler.waiting.remove_requests(others)
        try:
            yield
        finally:
            scheduler.running = [*running_others, *scheduler.running]
            for one in reversed(others):
                scheduler.waiting.prepend_request(one)

    # --- refused requests

    def note_request(self, request: Any) -> None:
        """Mark a request that failed before; it ends before it is scheduled."""
        if self._refused:
            why = self._refused.get(_key(request))
            if why is not None:
                self._to_refuse[request.request_id] = why

    def _refuse(self) -> dict[int, Any]:
        refused = self._to_refuse
        self._to_refuse = {}
        outputs: dict[int, Any] = {}
        for name, why in refused.items():
            request = self._scheduler.requests.get(name)
            if request is not None:
                text = f"{why} It was not run again. Send a shorter or smaller request."
                _log(logging.WARNING, "refused a request that did not fit before", request=name)
                self._end(request, text, outputs)
        return outputs

    # --- a failed step

    def _recover(self, error: Exception) -> dict[int, Any] | None:
        """Drop the failed step and the later ones; return outputs, None if vLLM is to fail."""
        began_s = time.perf_counter()
        is_remote = "Worker failed with error" in str(error) or str(error) == _BEHIND
        if not (is_remote or is_out_of_memory(error)) or not self._in_flight:
            return None
        here = None
        if not is_remote:
            here = describe(error)
        outputs = self._finish_earlier_steps()
        dropped = list(self._in_flight)
        if not dropped or not self._can_drop(dropped):
            return None
        _clear_frames(error)
        answer = self._core.model_executor.collective_rpc(release_steps, args=(len(dropped),))
        failure = here or answer[0]
        if failure is None or not failure["is_oom"]:
            return None
        requests = self._scheduler.requests
        tokens = {}
        fresh = set()
        for name, number in dropped[0].num_scheduled_tokens.items():
            # A request may have been aborted while its step ran.
            if name not in requests:
                continue
            tokens[name] = number
            if not requests[name].output_token_ids:
                fresh.add(name)
        step = FailedStep(
            tokens,
            fresh,
            failure["tried_bytes"],
            [*tokens] == [self._alone],
            self._can_split and not self._has_seeds_on_cpu(),
        )
        decision = StepDecision(self._budget.current_tokens)
        if tokens:
            decision = self._budget.fail(step, time.monotonic())
        if decision.gives_up and (decision.offender is None or not self._works()):
            return None
        rolled_back = self._roll_back(dropped)
        self._in_flight.clear()
        self._alone = decision.alone
        self._alone_since_s = time.monotonic()
        self._apply_budget()
        if decision.offender is not None:
            request = requests[decision.offender]
            text = _error_text(request, step, failure)
            self._refused[_key(request)] = text
            if len(self._refused) > _MOST_REFUSED:
                self._refused.popitem(last=False)
            self._end(request, text, outputs)
        self._report(step, failure, decision, rolled_back, time.perf_counter() - began_s)
        return outputs

    def _can_drop(self, dropped: list[Any]) -> bool:
        """Return whether the requests of these steps can be computed again.

        Not if a request came in several messages, or has images, which the worker keeps too.
        """
        for step in dropped:
            if step.scheduled_encoder_inputs or step.free_encoder_mm_hashes:
                return False
            for name in step.num_scheduled_tokens:
                request = self._scheduler.requests.get(name)
                if request is None:
                    continue
                if getattr(request, "resumable", False) or getattr(request, "mm_features", None):
                    return False
        return True

    def _works(self) -> bool:
        """Return whether the engine can run one token: then its requests do not fit, not it."""
        try:
            self._core.model_executor.execute_dummy_batch()
        except Exception:  # noqa: BLE001 - whatever it is, vLLM's own end follows
            return False
        return True

    def _finish_earlier_steps(self) -> dict[int, Any]:
        """Process the outputs of the steps before the failed one, and wait for those behind."""
        core = self._core
        outputs: dict[int, Any] = {}
        has_failed = False
        queue = getattr(core, "batch_queue", None)
        while queue:
            future, scheduled, *_ = queue.pop()
            has_failed = has_failed or not self._in_flight or scheduled is not self._in_flight[0]
            try:
                output = future.result()
            except Exception:  # noqa: BLE001 - the failure that is being recovered
                has_failed = True
                continue
            has_failed = has_failed or output is None
            if not has_failed:
                if hasattr(core, "_process_aborts_queue"):
                    core._process_aborts_queue()
                _add_outputs(outputs, core.scheduler.update_from_output(scheduled, output))
        return outputs

    def _roll_back(self, dropped: list[Any]) -> int:
        """Let the scheduler forget steps; return how many requests are computed again."""
        from vllm.v1.request import RequestStatus

        scheduler = self._scheduler
        names: dict[str, int] = {}
        for step in dropped:
            names |= step.num_scheduled_tokens
        known = filter(scheduler.requests.__contains__, names)
        requests = [scheduler.requests[name] for name in known]
        is_known = len(requests) == len(names) and self._forget_blocks(requests, dropped)
        now_s = time.monotonic()
        if is_known:
            gone, scheduler.running = _split_by_name(scheduler.running, names)
        else:
            gone = [*scheduler.running]
            scheduler.running = []
        for request in reversed(gone):
            scheduler._preempt_request(request, now_s)
        if not is_known:
            scheduler.kv_cache_manager.reset_prefix_cache()
        for request in requests:
            _forget_tokens_in_flight(request)
            if not request.output_token_ids and request.status == RequestStatus.PREEMPTED:
                # The worker may not know it: it comes again as a new request.
                request.status = RequestStatus.WAITING
                scheduler.finished_req_ids.add(request.request_id)
        for step in dropped:
            scheduler.finished_req_ids |= step.finished_req_ids
            if hasattr(scheduler, "reset_preempted_req_ids"):
                scheduler.reset_preempted_req_ids |= step.preempted_req_ids or set()
        scheduler.prev_step_scheduled_req_ids.clear()
        return len(gone)

    def _forget_blocks(self, requests: list[Any], dropped: list[Any]) -> bool:
        """Remove the blocks that the dropped steps were to fill from the prefix cache.

        Returns whether all of them are known; if not, the whole prefix cache has to go.
        """
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        if not hasattr(manager, "evict_blocks"):
            return False
        groups = scheduler.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or any(one not in scheduler.running for one in requests):
            return False
        block_tokens = groups[0].kv_cache_spec.block_size
        blocks: set[int] = set()
        for request in requests:
            name = request.request_id
            lost = sum(step.num_scheduled_tokens.get(name, 0) for step in dropped)
            first = max(0, request.num_computed_tokens - lost) // block_tokens
            blocks.update(manager.get_block_ids(name)[0][first:])
        manager.evict_blocks(blocks)
        return True

    def _end(self, request: Any, text: str, outputs: dict[int, Any]) -> None:
        """End one request with an error."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        self._budget.forget(request.request_id)
        output = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=text
        )
        _add_outputs(outputs, {request.client_index: EngineCoreOutputs(outputs=[output])})

    def _say_end(self, error: Exception) -> None:
        """Log with which steps the engine worked last; `run` starts it with them (OG397)."""
        learned = self._budget.learned_tokens
        is_memory = "Worker failed with error" in str(error) or is_out_of_memory(error)
        if learned is None or not is_memory or not self._can_split:
            return
        # vLLM refuses a start with steps of fewer tokens than requests.
        learned = max(learned, self._core.vllm_config.scheduler_config.max_num_seqs)
        if learned < self._budget.full_tokens:
            # Without "oomguard: " in front, which marks lines that a diagnosis skips.
            logging.getLogger(_LOGGER).warning(
                "The engine ends. It worked before with smaller steps: tokens=%d", learned
            )

    def _report(
        self,
        step: FailedStep,
        failure: dict[str, Any],
        decision: StepDecision,
        rolled_back: int,
        took_s: float,
    ) -> None:
        row = {
            "at": round(time.time(), 3),
            "part": failure["part"],
            "tokens": step.total_tokens,
            "requests": len(step.tokens),
            "tried_bytes": failure["tried_bytes"],
            "rolled_back": rolled_back,
            "most_tokens": decision.budget_tokens,
            "ended": decision.offender,
            "took_ms": round(took_s * 1e3, 2),
        }
        for name, value in [*row.items()]:
            if value is None:
                del row[name]
        message_sender.send_row({"step_recovery": row})
        # A log line has its own time.
        del row["at"]
        _log(logging.WARNING, "a step did not fit, and the engine goes on", **row)


def _split_by_name(requests: Iterable[Any], names: Collection[str]) -> tuple[list[Any], list[Any]]:
    """Return the requests with one of the names, and the others, each in their order."""
    own = []
    others = []
    for one in requests:
        if one.request_id in names:
            own.append(one)
        else:
            others.append(one)
    return own, others


def _forget_tokens_in_flight(request: Any) -> None:
    for name in ("num_in_flight_tokens", "num_stale_output_tokens", "num_output_placeholders"):
        if hasattr(request, name):
            setattr(request, name, 0)
    for name in ("drop_stale_output", "discard_latest_async_tokens"):
        if hasattr(request, name):
            setattr(request, name, False)


def _add_outputs(outputs: dict[int, Any], more: dict[int, Any]) -> None:
    """Add the outputs of another step for the same clients."""
    for client, group in more.items():
        known = outputs.get(client)
        if known is None:
            outputs[client] = group
            continue
        known.outputs = [*known.outputs, *group.outputs]
        known.scheduler_stats = group.scheduler_stats or known.scheduler_stats
        if group.finished_requests:
            known.finished_requests = {*(known.finished_requests or ()), *group.finished_requests}


def _key(request: Any) -> int:
    """Return a number that the same request has again: its prompt and what it asks for."""
    params = request.sampling_params
    asked = tuple(str(getattr(params, name, None)) for name in _ASKED)
    media = tuple(one.mm_hash for one in getattr(request, "mm_features", None) or ())
    lora = getattr(request.lora_request, "lora_int_id", None)
    return hash((tuple(request.prompt_token_ids or ()), asked, media, lora))


def _error_text(request: Any, step: FailedStep, failure: dict[str, Any]) -> str:
    prompt = len(request.prompt_token_ids or ())
    size = ""
    if failure["tried_bytes"] is not None:
        size = f" It tried to allocate {_in_words(failure['tried_bytes'])}"
        if failure["limit"]:
            size += f", with {failure['limit']}"
        size += "."
    part = ""
    if failure["part"]:
        part = f" in the {failure['part']}"
    return (
        f"{ERROR_PREFIX}this request does not fit into the device's memory. "
        f"Its step of {step.total_tokens} tokens ran out of memory{part} with no other request "
        f"in the step.{size} The prompt has {prompt} tokens. Other requests are not affected."
    )


def _in_words(size_bytes: int) -> str:
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.2f} GiB"
    return f"{size_bytes / _MIB:.2f} MiB"


def _clear_frames(error: BaseException | None) -> None:
    """Release the tensors in the frames of a failed step."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _without_dump(_scheduler_output: Any) -> Iterator[None]:
    """Replace vLLM's dump of a failed step: most failed steps are recovered."""
    yield


def _log(level: int, sentence: str, **values: Any) -> None:
    """Log one line as `oomguard` does: a sentence, then its values."""
    words = [f"oomguard: {sentence}"]
    for name, value in values.items():
        if " " in str(value):
            words.append(f"{name}={json.dumps(str(value))}")
        else:
            words.append(f"{name}={value}")
    logging.getLogger(_LOGGER).log(level, "%s", " ".join(words))
