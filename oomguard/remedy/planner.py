"""From causes to a plan: each fix solved to a value, judged by the policy, the least costly that fits first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import Alternative, Incident, Patch
from oomguard.remedy.policy import HARD_LIMIT, Policy
from oomguard.remedy.settings import as_env, as_flag, as_kwarg, default_value, effect_of, setting
from oomguard.remedy.solvers import SOLVERS, Solution
from oomguard.rules.load import Fix, Rule, RuleSet

if TYPE_CHECKING:
    from oomguard.memory.in_force import Start

Tried = Collection[tuple[str, FactValue]]

# Failures of a start that the memory equation decides; others are decided by what the memory model does not plan.
STARTS: Final = frozenset(
    {"kv_cache_none_left", "kv_cache_too_small_for_max_len", "cpu_node_memory", "startup_free_memory_below_utilization"}
)
# The fact that holds a setting's value in force, where its name differs from the setting's.
_CURRENT_FACTS: Final = {
    "gpu_memory_utilization": "gpu_memory_utilization_ratio",
    "max_model_len": "max_model_len_tokens",
}


def plan(incident: Incident, rules: RuleSet, policy: Policy, tried: Tried = (), start: Start | None = None) -> Incident:
    """The incident with its plan: one patch for each setting, applicable ones first, then blocked, then unsolved.

    ``tried`` are the (setting, value) pairs of earlier attempts: none is ever planned again. ``start`` is the model behind the
    failed start, where it could be read: it solves what the printed numbers leave open.
    """
    patches: dict[str, Patch] = {}
    alternatives: dict[str, Alternative] = {}
    unknown: dict[str, None] = dict.fromkeys(incident.unknown)
    for cause in incident.causes:
        if not cause.rule:
            continue
        rule = rules.rule(cause.rule)
        for fix in rule.fixes:
            setting(fix.setting)  # a name that is none is the rule author's mistake, told before anything is solved
            if fix.setting in patches:
                continue
            missing = _missing(fix, incident)
            if missing is None:
                continue
            solution = _solve(fix, incident, missing, start if incident.kind in STARTS else None)
            patch = _patch(fix, rule, solution, incident, policy)
            if missing and patch.new is not None and patch.blocked_by is None:
                patch = replace(patch, blocked_by=f"not known: {', '.join(missing)}")
            unknown.update(dict.fromkeys(solution.unknown))
            if patch.new is not None and (patch.setting, patch.new) in tried:
                continue
            if fix.alternative or patch.blocked_by == HARD_LIMIT:
                alternatives.setdefault(patch.setting, _alternative(patch))
                continue
            patches[patch.setting] = patch
    if start is not None and incident.kind in STARTS and not any(patch.applicable for patch in patches.values()):
        _add_modelled(incident, start, policy, tried, patches, alternatives)
    if "device_total_bytes" not in incident.facts:
        unknown.setdefault("device total: not printed")
    ordered = sorted(patches.values(), key=lambda p: (not p.applicable, p.new is None, p.effect))
    return replace(incident, plan=tuple(ordered), alternatives=tuple(alternatives.values()), unknown=tuple(unknown))


def _alternative(patch: Patch) -> Alternative:
    why = patch.blocked_by or patch.reason
    return Alternative(patch.setting, patch.new, why, patch.as_flag, patch.as_kwarg, patch.tradeoff)


def _add_modelled(
    incident: Incident,
    start: Start,
    policy: Policy,
    tried: Tried,
    patches: dict[str, Patch],
    alternatives: dict[str, Alternative],
) -> None:
    """What the memory model says where no printed number leads to a patch that may be applied."""
    from oomguard.remedy.modelled import smallest_that_would, solved_together

    together = solved_together(incident, start, policy)
    if together and not any((patch.setting, patch.new) in tried for patch in together):
        # What may be applied takes the place of what may not; what may not does not hide a value that the engine printed.
        for patch in together:
            if patch.blocked_by == HARD_LIMIT:
                alternatives.setdefault(patch.setting, _alternative(patch))
                continue
            known = patches.get(patch.setting)
            if patch.applicable or known is None or known.new is None:
                patches[patch.setting] = patch
    elif not together:
        for other in smallest_that_would(start):
            alternatives.setdefault(other.setting, other)


def _missing(fix: Fix, incident: Incident) -> list[str] | None:
    """The facts that the fix's conditions need and nobody knows; None where a condition is known not to hold."""
    missing: list[str] = []
    for condition in fix.when:
        held = condition.evaluate(incident.facts)
        if held is False:
            return None
        if held is None:
            missing += condition.missing(incident.facts)
    return missing


def _solve(fix: Fix, incident: Incident, missing: list[str], start: Start | None) -> Solution:
    """The fix's value. What the user set may be unknown and the value still solved; any other missing fact may not."""
    needed = [name for name in missing if not name.endswith("_set")]
    if needed:
        return Solution(
            None, f"not applicable: {', '.join(needed)} unknown", unknown=tuple(f"{n}: not known" for n in needed)
        )
    if fix.value is not None:
        value = _typed(fix.setting, fix.value.evaluate(incident.facts))
        if value is None:
            names = ", ".join(fix.value.missing(incident.facts))
            return Solution(None, f"not applicable: {names} unknown" if names else f"not a value of {fix.setting}")
        return Solution(value, "")
    if fix.lever:
        found = _solved_lever(start, fix.setting) if start is not None else None
        if found is not None:
            value, reason, predicts = found
            return Solution(value, f"{fix.lever}; {reason}", predicts=predicts)
        return Solution(None, f"{fix.lever}; by how much is not known ({fix.missing})", unknown=(fix.missing,))
    solver = SOLVERS.get(fix.solve or "")
    if solver is None:
        raise SettingError(f"no solver named {fix.solve!r}", hint=f"known solvers: {', '.join(SOLVERS)}")
    return solver(incident)


def _solved_lever(start: Start, name: str) -> tuple[FactValue, str, dict[str, float]] | None:
    from oomguard.remedy.modelled import solved_lever

    return solved_lever(start, name)


def _typed(name: str, value: FactValue | None) -> FactValue | None:
    """A rule's value as the setting's own type, None where it cannot be one."""
    kind = setting(name).type
    if value is None or isinstance(value, str) != (kind == "str"):
        return None
    if kind == "bool" or isinstance(value, (bool, str)):
        return value if isinstance(value, bool) == (kind == "bool") else None
    return int(value) if kind == "int" else value


def _patch(fix: Fix, rule: Rule, solution: Solution, incident: Incident, policy: Policy) -> Patch:
    old = _current(fix.setting, incident)
    effect = effect_of(fix.setting, old, solution.value) if solution.value is not None else fix.effect
    patch = Patch(
        setting=fix.setting, old=old, new=solution.value, effect=effect, reason=solution.reason or rule.title, rule=rule.code,
        as_flag=as_flag(fix.setting, solution.value), as_kwarg=as_kwarg(fix.setting, solution.value),
        as_env=as_env(fix.setting, solution.value), predicted_freed_bytes=solution.freed_bytes,
        predicts=solution.predicts, tradeoff=fix.tradeoff,
    )  # fmt: skip
    return replace(patch, blocked_by=policy.blocks(patch, incident))


def _current(name: str, incident: Incident) -> FactValue | None:
    in_force = incident.settings.get(name)
    if in_force is not None and in_force.value is not None:
        return in_force.value
    fact = incident.facts.get(_CURRENT_FACTS.get(name, name))
    if fact is not None:
        return fact.value
    return default_value(name, incident.framework_version)


def next_patch(incident: Incident) -> Patch | None:
    """The patch to apply by itself: the first applicable one of the plan, None where nothing is left."""
    return next((patch for patch in incident.plan if patch.applicable), None)


def next_patches(incident: Incident, carries: Callable[[str], bool]) -> tuple[Patch, ...]:
    """The patches to apply now: the first applicable one that the engine ``carries``, and those that belong with it."""
    for patch in incident.plan:
        group = [p for p in incident.plan if p is patch or (patch.group is not None and p.group == patch.group)]
        if all(p.applicable and carries(p.setting) for p in group):
            return tuple(group)
    return ()
