"""Solve a load of weights that did not fit: offload layers to the host, or use fewer bits."""

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
# Memory that no formula covers: kernels' scratch memory and allocator fragments.
_MARGIN_RATIO: Final = 0.01


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model as they are loaded.

    Attributes:
        total_bytes: all weights.
        largest_block_bytes: the largest layer, which comes to the device as a whole.
        work_bytes: what a row of ``work_tokens`` tokens needs besides; it stays free.
        work_tokens: the tokens of that row.
    """

    total_bytes: int
    largest_block_bytes: int
    work_bytes: int
    work_tokens: int


@dataclass(frozen=True, slots=True)
class LighterWeights:
    """The same weights in fewer bits.

    Attributes:
        setting: the setting to change.
        value: its value.
        as_kwarg: the Python argument that sets it; None if there is none.
        need_bytes: their peak bytes during the load; None if unknown.
        why_not: why it cannot be done here; None if it can.
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
        weights: the weights; None if unknown.
        base_bytes: allocated bytes on the device before the load; None if not counted.
        host_free_bytes: host memory for offloaded layers; None if unknown.
        device: the device's name in a program.
        is_cached: whether a caching allocator is used, which reserves more than tensors need.
        why_not_on_host: why layers cannot wait on the host; None if they can.
        lighter: the weights in fewer bits, with the most bits first.
    """

    weights: Weights | None
    base_bytes: int | None
    host_free_bytes: int | None
    device: str = "0"
    is_cached: bool = False
    why_not_on_host: str | None = None
    lighter: tuple[LighterWeights, ...] = ()

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return None: each way works alone, and ``solve_together`` returns all."""
        del setting, incident
        return None

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return a patch for each way, the least costly first; each is enough alone.

        If a setting has several values (8 and 4 bits), the first that fits counts; otherwise the
        last one's reason.
        """
        ways: dict[str, Patch] = {}
        for way in self._ways(incident):
            patch = self._patch(*way, incident, policy)
            if patch.setting not in ways or ways[patch.setting].new is None:
                ways[patch.setting] = patch
        return tuple(ways.values())

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan's reasons show what is missing."""
        del incident
        return ()

    def room_bytes(self, incident: Incident) -> float | None:
        """Return the bytes for weights and work together; None if the device size is unknown."""
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
        """Return the device bytes for weights, which include the largest offloaded layer."""
        weights = self.weights
        room = self.room_bytes(incident)
        if self.why_not_on_host is not None:
            return Solution(None, self.why_not_on_host)
        if weights is None:
            return Solution(None, "not known: the size of the weights by layer")
        if room is None:
            return Solution(None, "not known: how large the device is")
        share = int(room - weights.work_bytes)
        layer = weights.largest_block_bytes
        kept = share - layer
        work = format_gib(weights.work_bytes)
        left = f"{work} is kept free for a row of {weights.work_tokens} tokens"
        if kept <= 0:
            return Solution(
                None,
                f"the largest layer alone needs {format_gib(layer)}, but "
                f"{format_gib(max(0, share))} is free; {left}",
            )
        kept = min(kept, weights.total_bytes)
        waiting = weights.total_bytes - kept
        if self.host_free_bytes is not None and waiting > self.host_free_bytes:
            return Solution(
                None,
                f"{format_gib(waiting)} would wait on the host, but it has only "
                f"{format_gib(self.host_free_bytes)}",
            )
        reason = (
            f"{format_gib(kept)} of {format_gib(weights.total_bytes)} of weights stay on the "
            "device; the other layers come from the host one at a time, "
            f"{format_gib(layer)} at most; {left}"
        )
        return Solution(share, reason, waiting)

    def _in_fewer_bits(self, way: LighterWeights, incident: Incident) -> Solution:
        weights = self.weights
        room = self.room_bytes(incident)
        if way.why_not is not None:
            return Solution(None, way.why_not)
        if weights is None or room is None or way.need_bytes is None:
            return Solution(None, "not known: the size of the weights in fewer bits")
        need = way.need_bytes + weights.work_bytes
        need_text = (
            f"the weights then need {format_gib(way.need_bytes)}, and {format_gib(need)} with a "
            f"row of {weights.work_tokens} tokens"
        )
        if need > room:
            return Solution(None, f"{need_text}, but {format_gib(max(0, room))} is free")
        return Solution(
            way.value,
            f"{need_text}; {format_gib(room)} is free",
            weights.total_bytes - way.need_bytes,
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
