"""A failed start of vLLM as its model: one setting solved, several together, or what else would fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from oomguard.errors import OomguardError
from oomguard.facts import format_gib
from oomguard.incident import Alternative, Incident, Patch
from oomguard.memory.vllm.encoder_profile import NO_IMAGES
from oomguard.memory.vllm.failed_start import FailedStart, fails_while_profiling, read_failed_start
from oomguard.memory.vllm.fitting import Fit, fit, solve
from oomguard.memory.vllm.start import StartBudget
from oomguard.remedy.permitted import assumed, grouped, why_blocked
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution
from oomguard.settings import effect_of
from oomguard.surfaces import as_env, as_flag, as_kwarg

_ENGINE: Final = "vllm"  # whose starts the memory model plans


# Failures of a start that the memory equation decides; others are decided by what the memory model does not plan.
STARTS: Final = frozenset(
    {"kv_cache_none_left", "kv_cache_too_small_for_max_len", "cpu_node_memory", "startup_free_memory_below_utilization"}
)


@dataclass(frozen=True, slots=True)
class StartModel:
    """A start of vLLM that failed: its model and its settings, corrected by what it printed."""

    start: FailedStart

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of one setting with which the start fits; None where no value is enough."""
        if not self._decides(incident):
            return None
        try:
            budget = solve(self.start.model, self.start.settings, setting)
        except OomguardError:
            return None
        if budget is None:
            return None
        return Solution(getattr(budget.settings, setting), _reason(budget), predicts=_predicts(budget))

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return patches of one group under which the start fits: permitted ones, else blocked ones, else none."""

        def permits(name: str, old: Any, new: Any) -> bool:
            return why_blocked(start_patch(name, old, new, "", {}), incident, policy) is None

        found = self._fit(incident, permits)
        if found is None or found.budget is None:
            found = self._fit(incident)
        if found is None or found.budget is None:
            return ()
        reason, predicts, version = _reason(found.budget), _predicts(found.budget), incident.framework_version
        patches = [
            start_patch(name, None if assumed(name, incident) else old, new, reason, predicts, version=version)
            for name, old, new in found.changed
        ]
        together = [_with(patch, [p.setting for p in patches if p is not patch]) for patch in patches]
        return grouped(together, incident, policy)

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return more ranks, a larger device or prompts without images, where no setting makes the start fit."""
        found = self._fit(incident)
        if found is None or found.budget is not None:
            return ()
        others = []
        if found.tensor_parallel_size is not None:
            name, ranks = "tensor_parallel_size", found.tensor_parallel_size
            why = f"no setting fits on this device; over {ranks} devices of its size the model does"
            others.append(Alternative(name, ranks, why, as_flag(name, ranks, _ENGINE), as_kwarg(name, ranks, _ENGINE)))
        if found.cpu_offload_bytes is not None:
            name, part = "cpu_offload_bytes", found.cpu_offload_bytes
            why = (
                f"no setting fits on this device; with {format_gib(part)} of the weights in the host's memory one does"
            )
            flag, in_python = as_flag(name, part, _ENGINE), as_kwarg(name, part, _ENGINE)
            others.append(Alternative(name, part, why, flag, in_python, "Every step reads that part over the bus."))
        if found.gpu_total_bytes is not None:
            size = format_gib(found.gpu_total_bytes)
            others.append(Alternative("device", None, f"no setting fits on this device; one of {size} would do"))
        if found.without_images:
            name, why = "limit_mm_per_prompt", "no setting fits with images profiled; without any in a prompt one does"
            in_python = f"{name}={NO_IMAGES}"  # a dict there too
            others.append(Alternative(name, NO_IMAGES, why, as_flag(name, NO_IMAGES, _ENGINE), in_python))
        return tuple(others)

    def _decides(self, incident: Incident) -> bool:
        """Return whether the memory equation decides this failure: not where the pool was set and its size is not known."""
        is_fixed = "kv_cache_is_fixed" in incident.facts and self.start.settings.kv_cache_memory_bytes is None
        return (incident.kind in STARTS or fails_while_profiling(incident)) and not is_fixed

    def _fit(self, incident: Incident, permits: Callable[[str, Any, Any], bool] | None = None) -> Fit | None:
        """Return the least change with which the start fits; None where the model does not decide this failure."""
        if not self._decides(incident):
            return None
        try:
            return fit(self.start.model, self.start.settings, *(() if permits is None else (permits,)))
        except OomguardError:
            return None


def start_model(incident: Incident, model: str | None = None) -> StartModel | None:
    """Return the model behind a failed start of vLLM; None where it cannot be read here or a size is not known.

    ``model`` is the folder or hub name to read in place of the one that the log names.
    """
    start = read_failed_start(incident, model)
    return None if start is None else StartModel(start)


def start_patch(
    name: str,
    old: Any,
    new: Any,
    reason: str,
    predicts: Mapping[str, float] = MappingProxyType({}),
    *,
    version: str | None = None,
) -> Patch:
    """Return one setting of a vLLM start changed, spelled as that version of vLLM has it; ``predicts`` by fact."""
    return Patch(
        name,
        old,
        new,
        effect_of(name, old, new),
        reason,
        as_flag=as_flag(name, new, _ENGINE, version),
        as_kwarg=as_kwarg(name, new, _ENGINE, version),
        as_env=as_env(name, new),
        predicts=predicts,
    )


def _with(patch: Patch, others: list[str]) -> Patch:
    return replace(patch, reason=f"together with {', '.join(others)}, {patch.reason}") if others else patch


def _reason(budget: StartBudget) -> str:
    pool, length = format_gib(budget.kv_cache_pool_bytes), budget.settings.max_model_len
    spare = format_gib(max(0, budget.margin_bytes))
    return f"by the memory model: a KV cache of {pool} holds one request of {length} tokens and {spare} more"


def _predicts(budget: StartBudget) -> dict[str, float]:
    return {"kv_cache_available_bytes": budget.kv_cache_pool_bytes}
