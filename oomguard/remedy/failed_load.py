"""Weights that did not fit on a device: how many of their bytes it takes, the rest on the host, or
all of them in fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from oomguard.core.facts import FactValue, format_gib
from oomguard.core.incident import Alternative, Incident, Patch
from oomguard.core.settings import effect_of
from oomguard.estimate.constants import reserved_ratio
from oomguard.remedy.failed_call import device_room_bytes
from oomguard.remedy.policy import Policy, present_value, why_blocked
from oomguard.remedy.solution import Solution

ON_DEVICE: Final = "weights_on_device_bytes"
# What no arithmetic sees: kernels' scratch memory, the pieces of the allocator beyond its share.
_MARGIN_RATIO: Final = 0.01


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model as they are loaded.

    Attributes:
        total_bytes: all of them.
        largest_block_bytes: those of the largest layer, which comes to the device as a whole.
        work_bytes: what a row of ``work_tokens`` tokens takes beside them; it is left free.
        work_tokens: as the name says.
    """

    total_bytes: int
    largest_block_bytes: int
    work_bytes: int
    work_tokens: int


@dataclass(frozen=True, slots=True)
class Lighter:
    """The same weights in fewer bits.

    Attributes:
        setting: what is changed.
        value: its value.
        as_kwarg: how a program says so.
        need_bytes: what they then take, at the peak of loading; None where that is not known.
        why_not: why it cannot be done here; None where it can.
    """

    setting: str
    value: FactValue
    as_kwarg: str | None
    need_bytes: int | None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class LoadModel:
    """A load of weights that did not fit.

    Attributes:
        weights: what they are; None where nothing tells.
        base_bytes: what was alive on the device before the load; None where nothing counts it.
        host_free_bytes: what the host has for the rest; None where nothing tells.
        device: how a program names the device, for the line to paste.
        is_cached: whether tensors come from a caching allocator, which holds more than they are.
        why_not_on_host: why no layer can wait on the host; None where they can.
        lighter: the weights in fewer bits, the least costly first.
    """

    weights: Weights | None
    base_bytes: int | None
    host_free_bytes: int | None
    device: str = "0"
    is_cached: bool = False
    why_not_on_host: str | None = None
    lighter: tuple[Lighter, ...] = ()

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return nothing: each way stands by itself, and ``solve_together`` has them all."""
        del setting, incident
        return None

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return what each way would be, the least costly first: every one of them is enough alone.

        Of several values of one setting (8 and 4 bits) the first that fits counts, else the last
        one's reason.
        """
        ways: dict[str, Patch] = {}
        for way in self._ways(incident):
            patch = self._patch(*way, incident, policy)
            if patch.setting not in ways or ways[patch.setting].new is None:
                ways[patch.setting] = patch
        return tuple(ways.values())

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan says what is missing."""
        del incident
        return ()

    def room_bytes(self, incident: Incident) -> float | None:
        """Return the bytes that weights and work may take together; None where the device's size is
        not known.
        """
        margin = _MARGIN_RATIO + (reserved_ratio() if self.is_cached else 0.0)
        return device_room_bytes(incident, self.base_bytes, margin)

    def _ways(self, incident: Incident) -> Iterator[tuple[str, Solution, str | None]]:
        offloaded = self._on_host(incident)
        if self.host_free_bytes is None:
            host = ""
        else:
            host = f', "cpu": {self.host_free_bytes}'
        yield (
            ON_DEVICE,
            offloaded,
            f'device_map="sequential", max_memory={{{self.device}: {offloaded.value}{host}}}',
        )
        for way in self.lighter:
            yield way.setting, self._in_fewer_bits(way, incident), way.as_kwarg

    def _on_host(self, incident: Incident) -> Solution:
        """Return the bytes of the device that weights may take: those on it, and the largest layer
        of those that are not.
        """
        weights = self.weights
        room = self.room_bytes(incident)
        if self.why_not_on_host is not None:
            return Solution(None, self.why_not_on_host)
        if weights is None or room is None:
            return Solution(
                None,
                "not known: what the weights are, by layer"
                if weights is None
                else "not known: device total",
            )
        share = int(room - weights.work_bytes)
        layer = weights.largest_block_bytes
        kept = share - layer
        left = f"{format_gib(weights.work_bytes)} is left for a row of {weights.work_tokens} tokens"
        if kept <= 0:
            return Solution(
                None,
                f"the largest layer alone is {format_gib(layer)}, {format_gib(max(0, share))} is "
                f"free, and {left}",
            )
        kept = min(kept, weights.total_bytes)
        waiting = weights.total_bytes - kept
        if self.host_free_bytes is not None and waiting > self.host_free_bytes:
            return Solution(
                None,
                f"{format_gib(waiting)} would wait on the host, which has "
                f"{format_gib(self.host_free_bytes)}",
            )
        reason = (
            f"{format_gib(weights.total_bytes)} of weights, {format_gib(kept)} of them stay on the "
            "device; the layers of the others "
            f"come from the host one at a time, {format_gib(layer)} at most; {left}"
        )
        return Solution(share, reason, waiting)

    def _in_fewer_bits(self, way: Lighter, incident: Incident) -> Solution:
        weights = self.weights
        room = self.room_bytes(incident)
        if way.why_not is not None:
            return Solution(None, way.why_not)
        if weights is None or room is None or way.need_bytes is None:
            return Solution(None, "not known: what the weights are then")
        need = way.need_bytes + weights.work_bytes
        told = (
            f"so the weights are {format_gib(way.need_bytes)}, {format_gib(need)} with a row of "
            f"{weights.work_tokens} tokens"
        )
        if need > room:
            return Solution(None, f"{told}; {format_gib(max(0, room))} is free")
        return Solution(
            way.value, f"{told}, of {format_gib(room)}", weights.total_bytes - way.need_bytes
        )

    @staticmethod
    def _patch(
        setting: str, solution: Solution, as_kwarg: str | None, incident: Incident, policy: Policy
    ) -> Patch:
        old = present_value(setting, incident)
        new = solution.value
        effect = effect_of(setting, old, new if new is not None else 0)
        patch = Patch(
            setting,
            old,
            new,
            effect,
            solution.reason,
            as_kwarg=None if new is None else as_kwarg,
            predicted_freed_bytes=solution.freed_bytes,
        )
        return replace(patch, blocked_by=why_blocked(patch, incident, policy))
