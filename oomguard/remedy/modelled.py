"""What the memory model solves where the printed numbers do not: one setting from a lever, several together, or none that can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from oomguard.errors import OomguardError
from oomguard.facts import FactValue, format_gib
from oomguard.incident import Alternative, Incident, Patch
from oomguard.memory.encoder import NO_IMAGES
from oomguard.memory.fitting import Fit, fit, solve
from oomguard.memory.in_force import Start
from oomguard.memory_plan import MemoryPlan
from oomguard.remedy.policy import Policy
from oomguard.remedy.settings import as_env, as_flag, as_kwarg, effect_of

_ONE_GROUP: Final = 1


def solved_lever(start: Start, name: str) -> tuple[FactValue, str, dict[str, float]] | None:
    """The value of one setting with which the start fits, why, and what it predicts; None where no value is enough."""
    try:
        plan = solve(start.model, start.settings, name)
    except OomguardError:
        return None
    return None if plan is None else (getattr(plan.settings, name), _reason(plan), _predicts(plan))


def solved_together(incident: Incident, start: Start, policy: Policy) -> tuple[Patch, ...]:
    """Patches of one group under which the start fits: those that the policy permits, else those it does not; none where nothing helps."""

    def permits(name: str, old: Any, new: Any) -> bool:
        return policy.blocks(_patch(name, old, new, "", {}), incident) is None

    try:
        found = fit(start.model, start.settings, permits)
        if found.plan is None:
            found = fit(start.model, start.settings)
    except OomguardError:
        return ()
    if found.plan is None:
        return ()
    patches = [_patch(*change, _reason(found.plan), _predicts(found.plan)) for change in found.changed]
    blocked = next((why for patch in patches if (why := policy.blocks(patch, incident))), None)
    return tuple(_with(patch, blocked, [p.setting for p in patches if p is not patch]) for patch in patches)


def smallest_that_would(start: Start) -> tuple[Alternative, ...]:
    """What would make the start fit where no setting does: more ranks, a larger device, or prompts without images."""
    try:
        found: Fit = fit(start.model, start.settings)
    except OomguardError:
        return ()
    if found.plan is not None:
        return ()
    others = []
    if found.tensor_parallel_size is not None:
        ranks = found.tensor_parallel_size
        why = f"no setting fits on this device; over {ranks} devices of its size the model does"
        name = "tensor_parallel_size"
        others.append(Alternative(name, ranks, why, as_flag(name, ranks), as_kwarg(name, ranks)))
    if found.gpu_total_bytes is not None:
        size = format_gib(found.gpu_total_bytes)
        others.append(Alternative("device", None, f"no setting fits on this device; one of {size} would do"))
    if found.without_images:
        why = "no setting fits with images profiled; without any in a prompt one does"
        name = "limit_mm_per_prompt"
        others.append(
            Alternative(name, NO_IMAGES, why, as_flag(name, NO_IMAGES), f"{name}={NO_IMAGES}")
        )  # a dict in Python too
    return tuple(others)


def _patch(name: str, old: Any, new: Any, reason: str, predicts: dict[str, float]) -> Patch:
    return Patch(
        name, old, new, effect_of(name, old, new), reason, as_flag=as_flag(name, new), as_kwarg=as_kwarg(name, new),
        as_env=as_env(name, new), predicts=predicts,
    )  # fmt: skip


def _with(patch: Patch, blocked: str | None, others: list[str]) -> Patch:
    if not others:
        return replace(patch, blocked_by=blocked)
    return replace(
        patch, blocked_by=blocked, group=_ONE_GROUP, reason=f"together with {', '.join(others)}, {patch.reason}"
    )


def _reason(plan: MemoryPlan) -> str:
    pool, length = format_gib(plan.kv_cache_pool_bytes), plan.settings.max_model_len
    spare = format_gib(max(0, plan.margin_bytes))
    return f"by the memory model: a KV cache of {pool} holds one request of {length} tokens and {spare} more"


def _predicts(plan: MemoryPlan) -> dict[str, float]:
    return {"kv_cache_available_bytes": plan.kv_cache_pool_bytes}
