"""A KV cache that was set too small, as its model: what the blocks that the memory holds are enough for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oomguard.incident import Alternative, Incident, Patch
from oomguard.memory.vllm.exact_kv import TOO_SMALL, ExactKv
from oomguard.remedy.modelled_start import start_patch
from oomguard.remedy.permitted import why_blocked
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution

_ONE_GROUP = 1


@dataclass(frozen=True, slots=True)
class KvModel:
    """The KV cache of a start whose number of blocks was set."""

    cache: ExactKv

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return None: each setting alone is solved by the facts that the layout gives."""
        del setting, incident
        return None

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return as many blocks as the memory holds with the length that they are enough for; empty where they hold all."""
        fitting, override = incident.number("kv_cache_fitting_blocks"), incident.number("num_gpu_blocks_override")
        if incident.kind != TOO_SMALL or fitting is None or override is None:
            return ()
        length, longest = self.cache.settings.max_model_len, self.cache.longest(int(fitting))
        if not override < fitting < self.cache.needed_blocks or not longest:
            return ()
        reason = f"the memory holds {int(fitting)} blocks, enough for one request of {longest} tokens"
        version = incident.framework_version
        patches = [
            start_patch("num_gpu_blocks_override", int(override), int(fitting), reason, version=version),
            start_patch("max_model_len", length, longest, reason, version=version),
        ]
        blocked = next((why for patch in patches if (why := why_blocked(patch, incident, policy))), None)
        return tuple(replace(patch, blocked_by=blocked, group=_ONE_GROUP) for patch in patches)

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: a start as its model says what else would fit."""
        del incident
        return ()
