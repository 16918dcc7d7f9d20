"""A KV cache that was set too small, as its model: what the blocks that the memory holds are enough for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oomguard.incident import Alternative, Incident, Patch
from oomguard.memory.vllm.exact_kv import TOO_SMALL, ExactKv, may_shrink_steps, pool_blocks
from oomguard.remedy.modelled_start import start_patch
from oomguard.remedy.permitted import grouped
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution


@dataclass(frozen=True, slots=True)
class KvModel:
    """The KV cache of a start whose number of blocks was set."""

    cache: ExactKv

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return None: each setting alone is solved by the facts that the layout gives."""
        del setting, incident
        return None

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return patches of one group with which a longer request fits than with any of them alone; empty where none does."""
        changes = dict(self._together(incident)) if incident.kind == TOO_SMALL else {}
        if not changes:
            return ()
        reason = f"one request of {changes['max_model_len'][1]} tokens fits, to the block, by the model's configuration"
        patches = [
            start_patch(name, old, new, reason, version=incident.framework_version)
            for name, (old, new) in changes.items()
        ]
        return grouped(patches, incident, policy)

    def _together(self, incident: Incident) -> Iterator[tuple[str, tuple[int | None, int]]]:
        """Yield each setting to change with its value before and after: blocks or the step first, then the length."""
        settings, pool = self.cache.settings, pool_blocks(self.cache, incident)
        fitting, override = incident.number("kv_cache_fitting_blocks"), incident.number("num_gpu_blocks_override")
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
        """Return nothing: a start as its model says what else would fit."""
        del incident
        return ()
