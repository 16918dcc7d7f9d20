"""Turn causes into a plan: solve each fix, apply the policy, and sort by cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Alternative, Cause, Effect, Incident, Patch
from oomguard.core.settings import as_env, as_flag, as_kwarg, effect_of, is_foreign, setting
from oomguard.remedy.from_log import SOLVERS, allocator_variable, contradiction
from oomguard.remedy.policy import (
    HARD_LIMIT,
    Policy,
    is_out_of_question,
    present_value,
    why_blocked,
)
from oomguard.remedy.solution import (
    MODELLED,
    FailureModel,
    Solution,
    as_sentences,
    in_words,
    not_shown,
)
from oomguard.rules.rule_files import Fix, Rule, RuleSet

# A cause whose confidence is lower by this much is not acted on before the first one.
MUCH_SURER: Final = 0.3

Tried = Collection[tuple[str, FactValue]]


def plan(
    incident: Incident,
    rules: RuleSet,
    policy: Policy,
    tried: Tried = (),
    model: FailureModel | None = None,
) -> Incident:
    """Return the incident with its plan: one patch per setting.

    Applicable patches come first, then blocked ones, then unsolved ones. Patches that only a much
    less certain cause suggests come last. A value that contradicts known figures becomes an
    alternative.

    Args:
        incident: a failure with its causes.
        rules: the rules that named them, with their fixes.
        policy: what the user permits.
        tried: (setting, value) pairs that failed; none is planned again.
        model: the model behind the failure, which solves what printed numbers cannot; None without
            one.

    Raises:
        SettingError: a rule names an unknown setting or solver.
    """
    patches: dict[str, Patch] = {}
    alternatives: dict[str, Alternative] = {}
    instead: dict[str, Patch] = {}
    unknown: dict[str, None] = dict.fromkeys(incident.unknown)
    for cause in incident.causes:
        if not cause.rule:
            continue
        rule = rules.rule(cause.rule)
        for fix in rule.fixes:
            # An unknown name is a mistake in the rule, reported before anything is solved.
            knob = setting(fix.setting)
            is_foreign_here = is_foreign(knob.name, incident.framework)
            if (
                fix.setting in patches
                or is_foreign_here
                or knob.is_moot(incident.kind, incident.facts)
            ):
                continue
            missing = _missing(fix, incident)
            if missing is None:
                continue
            solution = _solve(fix, incident, missing, model)
            patch = _patch(fix, rule, solution, incident, policy)
            if missing and patch.new is not None and patch.blocked_by is None:
                patch = replace(patch, blocked_by=f"not known: {', '.join(map(in_words, missing))}")
            unknown.update(dict.fromkeys(solution.unknown))
            refused = _contradicted(patch, incident, model)
            if refused is not None:
                alternatives.setdefault(patch.setting, refused)
                continue
            if patch.new is not None and (
                (patch.setting, patch.new) in tried or patch.new == patch.old
            ):
                continue
            if fix.alternative or patch.blocked_by == HARD_LIMIT:
                alternatives.setdefault(patch.setting, _alternative(patch))
                instead.setdefault(patch.setting, patch)
                continue
            patches[patch.setting] = patch
    _take_what_is_left(patches, instead, alternatives)
    applicable = list(filter(_is_applicable, patches.values()))
    if model is not None and not applicable:
        _add_modelled(incident, model, policy, tried, patches, alternatives)
    elif model is not None and all(patch.effect > Effect.OUTPUT_PRESERVING for patch in applicable):
        _keep_more(incident, model, policy, tried, patches)
    has_device = incident.kind not in {"engine_dead", "host_oom"}
    if has_device and "device_total_bytes" not in incident.facts:
        unknown.setdefault("device total: not printed")
    return replace(
        incident,
        plan=_ordered(patches.values(), incident.causes),
        alternatives=tuple(alternatives.values()),
        unknown=as_sentences(unknown),
    )


def _is_applicable(patch: Patch) -> bool:
    return patch.applicable


def _ordered(patches: Iterable[Patch], causes: Sequence[Cause]) -> tuple[Patch, ...]:
    """Return the patches in the plan's order: certain causes, then applicable ones, then cost."""
    shown = []
    for patch in patches:
        # The user ruled it out, so there is no text to paste.
        if is_out_of_question(patch):
            shown.append(replace(patch, as_flag=None, as_kwarg=None, as_env=None))
        else:
            shown.append(patch)
    ranks = {cause.rule: rank for rank, cause in enumerate(causes)}
    weak = set()
    for cause in causes:
        if cause.confidence < causes[0].confidence - MUCH_SURER:
            weak.add(cause.rule)

    def key(patch: Patch) -> tuple[bool, bool, bool, int, Effect]:
        # Unsolved patches cost nothing yet, so the most certain cause's come first.
        if patch.new is None:
            rank = ranks.get(patch.rule, 0)
        else:
            rank = 0
        return patch.rule in weak, not patch.applicable, patch.new is None, rank, patch.effect

    return tuple(sorted(shown, key=key))


def _take_what_is_left(
    patches: dict[str, Patch], instead: dict[str, Patch], alternatives: dict[str, Alternative]
) -> None:
    """Turn applicable alternatives into patches if the user has ruled out everything better."""
    if patches and all(is_out_of_question(patch) for patch in patches.values()):
        for name, patch in instead.items():
            if patch.applicable:
                patches[name] = patch
                del alternatives[name]


def _alternative(patch: Patch) -> Alternative:
    why = patch.blocked_by or patch.reason
    return Alternative(patch.setting, patch.new, why, patch.as_flag, patch.as_kwarg, patch.tradeoff)


def _add_modelled(
    incident: Incident,
    model: FailureModel,
    policy: Policy,
    tried: Tried,
    patches: dict[str, Patch],
    alternatives: dict[str, Alternative],
) -> None:
    """Add the model's values if no printed number leads to an applicable patch."""
    together = model.solve_together(incident, policy)
    if together and not any((patch.setting, patch.new) in tried for patch in together):
        # An applicable patch replaces a blocked one, but a blocked one must not hide a value that
        # the engine printed.
        keeps_more = _keeps_more(together, patches)
        for patch in together:
            if patch.blocked_by == HARD_LIMIT:
                alternatives.setdefault(patch.setting, _alternative(patch))
                continue
            known = patches.get(patch.setting)
            if patch.applicable or keeps_more or known is None or known.new is None:
                patches[patch.setting] = patch
    elif not together:
        for other in model.smallest_that_fits(incident):
            planned = patches.get(other.setting)
            if planned is None or planned.new is None or other.new is None:
                alternatives.setdefault(other.setting, other)
            else:  # the model's files are better than its weights alone
                patches[other.setting] = replace(
                    planned,
                    new=other.new,
                    reason=other.why_not,
                    as_flag=other.as_flag,
                    as_kwarg=other.as_kwarg,
                )


def _keep_more(
    incident: Incident, model: FailureModel, policy: Policy, tried: Tried, patches: dict[str, Patch]
) -> None:
    """Replace a patch by a group if the group keeps more of the patch's setting."""
    together = model.solve_together(incident, policy)
    if any((patch.setting, patch.new) in tried or not patch.applicable for patch in together):
        return
    if _keeps_more(together, patches):
        patches.update({patch.setting: patch for patch in together})


def _keeps_more(together: Iterable[Patch], patches: Mapping[str, Patch]) -> bool:
    """Return whether a group keeps more of a setting than the single patch for it."""
    for patch in together:
        if patch.setting in patches and _exceeds(patch.new, patches[patch.setting].new):
            return True
    return False


def _exceeds(one: FactValue | None, other: FactValue | None) -> bool:
    return isinstance(one, (int, float)) and isinstance(other, (int, float)) and one > other


def _missing(fix: Fix, incident: Incident) -> list[str] | None:
    """Return the unknown facts in the fix's conditions; None if a condition is false."""
    missing: list[str] = []
    for condition in fix.when:
        held = condition.evaluate(incident.facts)
        if held is False:
            return None
        if held is None:
            missing += condition.missing(incident.facts)
    return missing


def _solve(
    fix: Fix, incident: Incident, missing: list[str], model: FailureModel | None
) -> Solution:
    """Solve the fix's value.

    It may be unknown what the user set; any other missing fact leaves the value unsolved.
    """
    needed = []
    for name in missing:
        if not name.endswith("_set"):
            needed.append(name)
    if needed:
        return Solution(None, not_shown(needed), unknown=tuple(f"{n}: not known" for n in needed))
    if fix.value is not None:
        value = _typed(fix.setting, fix.value.evaluate(incident.facts))
        if value is None:
            names = fix.value.missing(incident.facts)
            reason = f"the rule's value does not fit {fix.setting}"
            if names:
                reason = not_shown(names)
            return Solution(None, reason)
        return Solution(value, "")
    if model and (fix.lever or fix.solve in MODELLED):
        modelled = model.solve(fix.setting, incident)
    else:
        modelled = None
    if modelled is not None:
        if fix.lever:
            return replace(modelled, reason=f"{fix.lever}; {modelled.reason}")
        return modelled
    if fix.lever:
        return Solution(
            None, f"{fix.lever}; by how much is not known ({fix.missing})", unknown=(fix.missing,)
        )
    solver = SOLVERS.get(fix.solve or "")
    if solver is None:
        raise SettingError(
            f"no solver named {fix.solve!r}", hint=f"known solvers: {', '.join(SOLVERS)}"
        )
    return solver(incident)


def _contradicted(
    patch: Patch, incident: Incident, model: FailureModel | None
) -> Alternative | None:
    """Return the alternative that replaces a patch whose value contradicts known figures.

    None if nothing contradicts it.
    """
    if patch.new is None:
        return None
    against = contradiction(patch.setting, patch.new, incident, by_model=model is not None)
    if against is None or (patch.blocked_by == HARD_LIMIT and not against.is_proved):
        return None
    if against.is_proved:
        return Alternative(patch.setting, None, against.why)
    return _alternative(replace(patch, blocked_by=against.why))


def _typed(name: str, value: FactValue | None) -> FactValue | None:
    """Return a rule's value in the setting's type; None if it has another type."""
    kind = setting(name).type
    if value is None or isinstance(value, str) != (kind == "str"):
        return None
    if kind == "bool" or isinstance(value, (bool, str)):
        if isinstance(value, bool) == (kind == "bool"):
            return value
        return None
    if kind == "int":
        return int(value)
    return value


def _patch(fix: Fix, rule: Rule, solution: Solution, incident: Incident, policy: Policy) -> Patch:
    old = present_value(fix.setting, incident)
    if solution.value is not None:
        effect = effect_of(fix.setting, old, solution.value, incident.facts)
    else:
        effect = fix.effect
    value = solution.value
    engine = incident.framework
    version = incident.framework_version
    if fix.setting == "allocator_options":
        variable = allocator_variable(incident)
    else:
        variable = None
    patch = Patch(
        setting=fix.setting,
        old=old,
        new=value,
        effect=solution.effect or effect,
        reason=solution.reason or rule.title,
        rule=rule.code,
        as_flag=as_flag(fix.setting, value, engine, version),
        as_kwarg=as_kwarg(fix.setting, value, engine, version),
        as_env=as_env(fix.setting, value, variable),
        predicted_freed_bytes=solution.freed_bytes,
        predicts=solution.predicts,
        tradeoff=fix.tradeoff,
    )
    return replace(patch, blocked_by=solution.blocked_by or why_blocked(patch, incident, policy))


def next_patches(
    incident: Incident, carries: Callable[[str], bool], tried: Tried = ()
) -> tuple[Patch, ...]:
    """Return the patches to apply now: the first applicable one, with its group.

    Args:
        incident: a failure with its plan.
        carries: returns whether a setting of the next attempt can be changed.
        tried: (setting, value) pairs that failed; no group with one of them is returned.
    """

    def may_apply(patch: Patch) -> bool:
        if not patch.applicable or not carries(patch.setting):
            return False
        return (patch.setting, patch.new) not in tried

    for patch in incident.plan:
        group = []
        for other in incident.plan:
            if other is patch or (patch.group is not None and other.group == patch.group):
                group.append(other)
        # A group is solved for all its changes at once, so one of them alone may not fit.
        if all(may_apply(other) for other in group):
            return tuple(group)
    return ()
