"""An allocation that failed, as its model: it grows with the settings whose product it is, so the room tells their values.

What is made along with it counts too: an allocation that fails is seldom the last of its step. Where no figure tells the room, an
output-preserving setting takes a part that is most likely to fit, and one that cuts what is served takes the engine's default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from oomguard.facts import GIB, format_gib
from oomguard.incident import PATCHED, Alternative, Effect, Incident, Patch
from oomguard.memory.vllm.activations import peak_activation
from oomguard.memory.vllm.encoder_profile import profile_encoder
from oomguard.memory.vllm.exact_kv import exact_kv
from oomguard.memory.vllm.failed_allocation import FailedAllocation
from oomguard.memory.vllm.lora import lora_bytes
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution
from oomguard.settings import effect_of, value_in_force
from oomguard.surfaces import default_value

# Of what failed, the part that is tried where no figure tells what is free.
_PART_OF_UNKNOWN: Final = 8
# What a worker of vLLM on the CPU holds beside weights and KV cache: the interpreter, torch, its threads.
_WORKER_BYTES: Final = 2 * GIB
# Of what the host has free, the part that one allocation may take: beyond it the kernel ends processes, also others.
_HOST_RATIO: Final = 0.8
# Of what the device had free or unused when it failed: freed pieces are not all in one.
_DEVICE_RATIO: Final = 0.9
_SERVING: Final = frozenset({"prompt_logprobs"})


@dataclass(frozen=True, slots=True)
class AllocationModel:
    """A failed allocation, known by its bytes."""

    failed: FailedAllocation

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of a setting with which the allocation fits; None where it is no lever of it."""
        product = self.failed.named.product
        lever = product.allocation.levers.get(setting)
        now = value_in_force(setting, incident.settings, incident.facts)
        value = now[0] if now is not None else product.numbers.get(setting)
        if lever is None or isinstance(value, (str, bool)) or value is None or value <= lever["least"]:
            return None
        now_value, room = int(value), self._room(incident)
        made = self._made(setting, now_value)
        # A limit that no figure shows refused it, now or after it was solved once.
        solved = now is not None and now[1] == PATCHED
        if room is None or solved or room >= self._need(setting, made):
            return self._without_room(setting, now_value, lever, incident)
        fits = self._largest(setting, now_value, lever, room)
        useful = self._useful(setting, incident)
        if fits is not None and useful is not None and lever["least"] <= useful < fits:
            why = f"no more than {useful} requests can run together in the KV cache, of {fits} whose rows would fit"
            return Solution(useful, f"{product.allocation.what}: {why}")
        need = format_gib(self._need(setting, made))
        if fits is None:
            least = format_gib(self._need(setting, lever["least"]))
            return Solution(
                None, f"{least} is needed at {setting} {lever['least']}, {format_gib(max(0, room))} is free"
            )
        reason = f"{product.allocation.what}: {need} at {made}, {format_gib(room)} is free for it"
        return Solution(fits, reason, round(self._need(setting, made) - self._need(setting, fits)))

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return no group: each lever is enough alone."""
        del incident, policy
        return ()

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan says why no value fits."""
        del incident
        return ()

    def _made(self, setting: str, now: int) -> int:
        """Return the value that what failed was made for: a step may be longer than the prompt whose tokens it was."""
        product = self.failed.named.product
        return min(now, product.numbers.get("tokens", now)) if setting in product.allocation.up_to else now

    def _largest(self, setting: str, now: int, lever: Mapping[str, int], room: float) -> int | None:
        """Return the largest value below what was made that fits, in whole steps; None where none does."""
        step = lever["step"]
        low, high = -(-self._least(setting, lever) // step), (self._made(setting, now) - 1) // step
        if high < low or self._taken(setting, low * step, now) > room:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._taken(setting, middle * step, now) <= room else (low, middle - 1)
        return low * step

    def _least(self, setting: str, lever: Mapping[str, int]) -> int:
        """Return the smallest value that the engine takes beside its other settings."""
        start = self.failed.start
        if setting != "max_num_batched_tokens" or start is None:
            return lever["least"]
        return max(lever["least"], start.settings.max_num_seqs or 0)  # a step has a token for every request

    def _need(self, setting: str, value: int) -> float:
        """Return the bytes of the allocation and of all that is made along with it, under a value of one of its settings."""
        product, start = self.failed.named.product, self.failed.start
        allocation = product.allocation
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
            )
            if max(stages):
                return max(stages)
        if allocation.name == "encoder_activations" and start is not None and start.model.encoder is not None:
            stepped = replace(start.settings, max_num_batched_tokens=value)
            images = profile_encoder(start.model.encoder, stepped, start.model.shape.dtype_bytes)
            return 0 if images is None else images.peak_bytes + images.uncertainty_bytes
        numbers = {**product.numbers, setting: value}
        if setting in allocation.up_to:
            numbers = {**product.numbers, "tokens": value}
        return math.prod(numbers.values()) * max(product.element_bytes, allocation.together or 0)

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
        free = incident.number("host_available_bytes")
        held = self._engine_holds(incident)
        if free is None or held is None or free <= held:
            return None
        return (free - held) * _HOST_RATIO  # the last bytes of a host are not for one process

    def _engine_holds(self, incident: Incident) -> float | None:
        """Return what the engine takes of the host beside the allocation, when it runs again."""
        desired, start = incident.number("desired_bytes"), self.failed.start
        if start is None:
            return desired
        settings, pool = start.settings, start.settings.kv_cache_memory_bytes
        weights = sum(parameter.bytes for parameter in start.model.parameters)
        if pool is not None:
            return pool + weights + _WORKER_BYTES
        total = incident.number("device_total_bytes")
        if total is None and settings.device == "cpu":
            total = incident.number("host_total_bytes")  # a start that dies in its profile printed no total yet
        share = desired or (None if total is None else total * settings.gpu_memory_utilization)
        return None if share is None else share + _WORKER_BYTES

    def _without_room(self, setting: str, now: int, lever: Mapping[str, int], incident: Incident) -> Solution:
        """Return a value that most likely fits where nothing tells what is free."""
        what = self.failed.named.product.allocation.what
        made = self._made(setting, now)
        part = (now if now // _PART_OF_UNKNOWN < made else made) // _PART_OF_UNKNOWN
        smaller = max(self._least(setting, lever), part // lever["step"] * lever["step"])
        if effect_of(setting, now, smaller) is Effect.OUTPUT_PRESERVING and smaller < made:
            return Solution(smaller, f"{what}: what is free is not known, an eighth of what failed is tried")
        default = default_value(setting, "vllm", incident.framework_version, device_size=_device_size(self.failed))
        if isinstance(default, int) and default < made:
            return Solution(default, f"{what}: what is free is not known, the engine's own default is tried")
        return Solution(None, f"{what}: what is free is not known", unknown=("free memory: not printed",))


def _device_size(failed: FailedAllocation) -> str:
    return "cpu" if failed.start is not None and failed.start.settings.device == "cpu" else "small"
