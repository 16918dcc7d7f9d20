"""List what to do about a failure in an expert's order: setting changes and actions outside.

The table in rules/actions.toml gives the order and the words, and the plan gives the values. An
action that would make the failure worse according to the table is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from oomguard.core.facts import MIB, Fact, FactValue, format_gib
from oomguard.core.incident import Action, Alternative, Effect, Incident, Patch
from oomguard.core.settings import (
    SETTINGS,
    as_env,
    as_flag,
    as_kwarg,
    engines,
    is_foreign,
    surface,
    value_in_force,
)
from oomguard.core.text import first_known
from oomguard.remedy.policy import is_out_of_question
from oomguard.rules.rule_files import OUTSIDE, ActionTable, Situation

# Another device is an action outside oomguard, because the user must have that device.
_AS_ACTION: Final = {"device": "use_another_device"}
# Without a value the user must find a checkpoint.
_UNSOLVED_AS_ACTION: Final = {"quantization": "smaller_checkpoint"}
# If no engine is known, actions are spelled for Python programs with transformers.
_WITHOUT_ENGINE: Final = "transformers"
# If oomguard measured the call itself, the plan's reason is better than the table's.
_MEASURED: Final = frozenset({"baseline_bytes", "prompt_tokens"})
_NO_VALUE: Final = "The text does not show which value is enough."
_VERBS: Final = {"up": "Raise", "down": "Lower", "on": "Turn on", "off": "Turn off", None: "Set"}


def with_actions(incident: Incident, table: ActionTable) -> Incident:
    """Return the incident with its actions: those of its situation, then the rest of its plan.

    Args:
        incident: a failure with its causes and its plan.
        table: the order and the words of the actions.
    """
    actions: list[Action] = []
    for situation in table.fitting(incident):
        actions = _ordered(situation, incident, table)
        if actions:
            break
    named = {action.id for action in actions}
    for name, patch in _open_patches(incident).items():
        if name not in named:
            direction = _direction(patch, incident.kind)
            offer = _offered(name, direction, patch, incident, table)
            if offer is not None:
                actions.append(offer)
    plan = []
    for patch in incident.plan:
        direction = _direction(patch, incident.kind)
        if patch.new is None or not table.is_harmful(patch.setting, direction, incident):
            plan.append(patch)
    alternatives = []
    for other in incident.alternatives:
        if not _is_no_help(other, incident, table):
            alternatives.append(other)
    return replace(
        incident,
        actions=tuple(actions),
        plan=tuple(plan),
        alternatives=tuple(alternatives),
    )


def _is_no_help(other: Alternative, incident: Incident, table: ActionTable) -> bool:
    """Return whether the table rules an alternative out; without a value it has no direction."""
    if other.new is None:
        direction = _usual_direction(other.setting)
    else:
        direction = None
    return table.is_harmful(other.setting, direction, incident)


def _open_patches(incident: Incident) -> dict[str, Patch]:
    """Return the patches that the user has not ruled out, by the name of their action."""
    patches = {}
    for patch in incident.plan:
        if not is_out_of_question(patch):
            patches[_name(patch)] = patch
    return patches


def _ordered(situation: Situation, incident: Incident, table: ActionTable) -> list[Action]:
    """Return a situation's actions that apply to this failure, with the plan's values."""
    patches = _open_patches(incident)
    ruled_out = {_name(patch) for patch in incident.plan} - patches.keys()
    found: dict[str, Action] = {}
    for name, wanted in situation.actions:
        if name in ruled_out or name in found:
            continue
        patch = patches.get(name)
        if patch is None:
            direction = wanted
        else:
            direction = _direction(patch, incident.kind) or wanted
        if wanted is not None and direction != wanted:
            continue  # the plan changes it in the other direction, and is listed later
        if patch is None and _does_nothing(name, direction, incident, table):
            continue
        action = _offered(name, direction, patch, incident, table)
        if action is not None:
            found[name] = action
    actions = list(found.values())
    if not any(one.id in SETTINGS and one.new is not None for one in actions):
        actions = _with_sure(actions, incident, table)
    return _solved_first(actions)


def _with_sure(actions: list[Action], incident: Incident, table: ActionTable) -> list[Action]:
    """Put the solved patches of the likeliest cause before the first setting.

    The table does not list every rule's setting.
    """
    if incident.causes:
        rule = incident.causes[0].rule
    else:
        rule = ""
    sure = {}
    for name, patch in _open_patches(incident).items():
        if patch.new is None or patch.rule != rule:
            continue
        if _does_nothing(patch.setting, None, incident, table):
            continue
        offer = _offered(name, _direction(patch, incident.kind), patch, incident, table)
        if offer is not None:
            sure[offer.id] = offer
    at = len(actions)
    for place, one in enumerate(actions):
        if one.id in SETTINGS:
            at = place
            break
    in_order = [*actions[:at], *sure.values()]
    for one in actions[at:]:
        if one.id not in sure:
            in_order.append(one)
    return in_order


def _solved_first(actions: list[Action]) -> list[Action]:
    """Put settings with a value before those without; other actions keep their positions."""
    settings = []
    for one in actions:
        if one.id in SETTINGS:
            settings.append(one)
    in_order = iter(sorted(settings, key=lambda one: one.new is None))
    return [next(in_order) if one.id in SETTINGS else one for one in actions]


def _name(patch: Patch) -> str:
    """Return the name of a patch's action."""
    if patch.new is None:
        unsolved = _UNSOLVED_AS_ACTION
    else:
        unsolved = {}
    return _AS_ACTION.get(patch.setting) or unsolved.get(patch.setting) or patch.setting


def _offered(
    name: str, direction: str | None, patch: Patch | None, incident: Incident, table: ActionTable
) -> Action | None:
    """Return one action; None if it would make the failure worse."""
    action = _action(name, direction, patch, incident, table)
    if table.is_harmful(action.id, action.direction, incident):
        return None
    return action


def _action(
    name: str, direction: str | None, patch: Patch | None, incident: Incident, table: ActionTable
) -> Action:
    """Return one action in the table's words; ``patch`` None: the plan does not change it."""
    if name not in SETTINGS:
        direction = None
    elif direction is None and (patch is None or patch.new is None):
        direction = _usual_direction(name)
    if patch:
        old = patch.old
    else:
        old = None
    if (
        old is None
        and name in SETTINGS
        and (known := value_in_force(name, incident.settings, incident.facts))
    ):
        old = known[0]
    if patch:
        new = patch.new
    elif direction == "on" and _is_switch(name):
        new = True
    else:
        new = None
    wording = table.wording(name, direction, incident)
    values = {"from": old, "to": new}
    facts = dict(incident.facts)
    for key, value in values.items():
        if value is not None:
            facts[key] = Fact(key, _text(name, value))
    titles, whys, commands = (
        (wording.titles, wording.whys, wording.commands) if wording else ((), (), ())
    )
    why = first_known(whys, facts)
    if patch is not None and (new is not None or not why or _MEASURED & incident.facts.keys()):
        why = patch.reason
    if not why and name in SETTINGS:
        why = _NO_VALUE
    action = Action(
        id=name,
        title=first_known(titles, facts) or _title(name, direction, old, new, incident),
        direction=direction,
        old=old,
        new=new,
        effect=_effect(name, direction, patch),
        applicability=_applicability(name, new, patch),
        command=_command(name, new, patch, incident) or first_known(commands, facts) or None,
        why=why,
        frees_bytes=patch.predicted_freed_bytes if patch else None,
        rule=patch.rule if patch else "",
        cost=patch.tradeoff if patch else "",
        blocked_by=patch.blocked_by if patch and new is not None else None,
    )
    if name in OUTSIDE and new is None:
        return replace(action, applicability="manual")
    return action


def _does_nothing(name: str, direction: str | None, incident: Incident, table: ActionTable) -> bool:
    """Return whether a setting has no effect: not in this engine, or overridden."""
    if name not in SETTINGS:
        return False
    if SETTINGS[name].is_moot(incident.kind, incident.facts):
        return True
    if incident.framework in engines():
        engine = incident.framework
    else:
        engine = _WITHOUT_ENGINE
    if not is_foreign(name, engine):
        return False
    wording = table.wording(name, direction, incident)
    return wording is None or incident.framework not in wording.where.frameworks


def _direction(patch: Patch, kind: str) -> str | None:
    """Return the direction of a patch; None if neither its values nor its effect show it."""
    if isinstance(patch.new, bool):
        if patch.new:
            return "on"
        return "off"
    knob = SETTINGS[patch.setting]
    if knob.type == "str":
        if patch.setting in _LISTS:
            return "down"
        return "on"
    if not isinstance(patch.new, str | None):
        return _way(patch, patch.new, kind)
    if knob.raised != knob.lowered:
        if patch.effect == knob.raised:
            return "up"
        return "down"
    return _usual_direction(patch.setting)


def _way(patch: Patch, new: float, kind: str) -> str | None:
    """Return the direction of a number; if its old value is unknown, that of this kind."""
    if not isinstance(patch.old, str | None):
        if patch.old == new:
            return None
        if new > patch.old:
            return "up"
        return "down"
    knob = SETTINGS[patch.setting]
    if knob.raised == knob.lowered:
        return _usual_direction(patch.setting)
    if kind in _EITHER_WAY:
        return None
    if kind in _LACKS_CACHE:
        return "up"
    return "down"


# If the old share is unknown, it is raised for a KV cache without memory and lowered otherwise.
_LACKS_CACHE: Final = frozenset(
    {"kv_cache_none_left", "kv_cache_too_small_for_max_len", "kv_slots_exhausted"}
)
_EITHER_WAY: Final = frozenset({"cpu_node_memory"})
# Numbers that give more memory when raised; all others are lowered when memory runs out.
_RAISED: Final = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "cpu_offload_bytes",
    }
)
# Texts that list memory users: fewer entries need less memory.
_LISTS: Final = frozenset({"cudagraph_capture_sizes", "limit_mm_per_prompt", "mm_processor_kwargs"})
_SWITCHED_OFF: Final = frozenset(
    {"enable_prefix_caching", "enable_lora", "prompt_logprobs", "speculative_config"}
)


def _usual_direction(name: str) -> str | None:
    """Return the direction in which a setting is changed when memory runs out."""
    if name in _SWITCHED_OFF:
        return "off"
    if name in _LISTS:
        return "down"
    if SETTINGS[name].type in {"bool", "str"}:
        return "on"
    if name in _RAISED:
        return "up"
    return "down"


def _is_switch(name: str) -> bool:
    return name in SETTINGS and SETTINGS[name].type == "bool"


def _text(name: str, value: FactValue) -> str:
    if name.endswith("_bytes") and not isinstance(value, str):
        return format_gib(value)
    return str(value)


def _title(
    name: str,
    direction: str | None,
    old: FactValue | None,
    new: FactValue | None,
    incident: Incident,
) -> str:
    verb = _VERBS[direction]
    if direction in {"on", "off"} and _is_switch(name):
        return f"{verb} {name}"
    if name in SETTINGS:
        flags = surface(name, incident.framework, incident.framework_version).flags
    else:
        flags = ()
    if flags:
        flag = flags[0]
    else:
        flag = ""
    is_own = not flag or flag.removeprefix("--").replace("-", "_") == name
    shown = name if is_own else flag  # the name that the engine uses
    if new is not None:
        if old is None:
            start = ""
        else:
            start = f" from {_text(name, old)}"
        return f"{'Set' if direction == 'on' else verb} {shown}{start} to {_text(name, new)}"
    if flag and is_own:
        spelled = f" ({flag})"
    else:
        spelled = ""
    if old is None:
        return f"{verb} {shown}{spelled}"
    halved = (
        direction == "down"
        and SETTINGS[name].type == "int"
        and not isinstance(old, str)
        and old > 1
    )
    if halved:
        tried = f": try {_text(name, int(old) // 2)}"
    else:
        tried = ""
    return f"{verb} {shown}{spelled}, now {_text(name, old)}{tried}"


def _effect(name: str, direction: str | None, patch: Patch | None) -> Effect | None:
    if patch is not None:
        return patch.effect
    if name not in SETTINGS:
        return None
    knob = SETTINGS[name]
    if direction in {"down", "off"}:
        return knob.lowered
    return knob.raised


def _applicability(name: str, new: FactValue | None, patch: Patch | None) -> str:
    if name in SETTINGS and new is None:
        return "needs-value"
    if patch is not None and patch.applicable:
        return "automatic"
    if name in SETTINGS or patch is not None:
        return "needs-permission"
    return "manual"


def _command(
    name: str, new: FactValue | None, patch: Patch | None, incident: Incident
) -> str | None:
    """Return the text to paste for a setting: a flag, an argument or a variable."""
    if new is None or name not in SETTINGS:
        return None
    if patch is not None:
        return patch.as_flag or patch.as_kwarg or patch.as_env
    engine = incident.framework
    version = incident.framework_version
    return (
        as_flag(name, new, engine, version)
        or as_kwarg(name, new, engine, version)
        or as_env(name, new)
    )


# The words for an action and for a change are the same in a report and in an exception's note.


def amount(name: str, value: FactValue | None) -> str:
    """Format a setting's value; a byte count is followed by its size."""
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and name.endswith("_bytes")
        and abs(value) >= MIB
    ):
        return f"{value} ({format_gib(value)})"
    return str(value)


def action_why(action: Action) -> str:
    """Return why an action helps and the bytes that it should free."""
    freed = action.frees_bytes or 0
    return action.why + (f" (frees {format_gib(freed)})" if freed > 0 else "")


def ruled_out_changes(incident: Incident) -> list[str]:
    """Return helpful changes that the user ruled out, each with the reason."""
    offered = {action.id for action in incident.actions}
    changes = []
    for patch in incident.plan:
        if not patch.blocked_by or patch.setting in offered or not is_out_of_question(patch):
            continue
        change = patch.setting
        if patch.new is not None:
            change += f" {amount(patch.setting, patch.new)}"
        changes.append(f"{change}: {patch.blocked_by}")
    return changes
