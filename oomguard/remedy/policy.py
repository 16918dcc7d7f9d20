"""What the user permits: highest effect, pinned settings, floors, relaunches and a deadline."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Effect, Incident, Patch
from oomguard.core.setting_spellings import default_value, surface, unmanaged_arguments
from oomguard.core.settings import SETTINGS, setting, value_in_force

DEFAULT_MAX_RELAUNCHES: Final = 3
DEFAULT_MAX_PER_HOUR: Final = 3
# Why a patch is blocked that raises what the user wrote in bytes: it is an alternative then.
HARD_LIMIT: Final = "a byte count you set"


# How a reason begins by which no permission leads to a patch.
_NEVER: Final = ("pinned", "below ")
YOU_SET_IT: Final = "you set it: --allow {} permits it"
_FORBIDS: Final = "--allow {} forbids what {}"
_FORBIDDEN: Final = re.compile(re.escape(_FORBIDS).replace(r"\{\}", "[a-z-]+"))


@dataclass(frozen=True, slots=True)
class LeastValue:
    """The least value with which what is run can do its work, and what tells so; ``inf``: the value
    it had.
    """

    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Policy:
    """``allow`` None is the default policy: output-preserving always, reduces-capacity only on what
    the user left alone.

    An explicit ``allow`` permits effects up to it on every setting and forbids the rest; pinned
    settings and floors (``minimum`` by setting) hold in any case, and so does what the command
    itself needs (``needed``). ``deadline_s`` is seconds from the start of the first attempt.
    ``max_per_hour`` is for a command: relaunches within any hour.
    """

    allow: Effect | None = None
    pinned: frozenset[str] = frozenset()
    minimum: Mapping[str, FactValue] = field(default_factory=lambda: MappingProxyType({}))
    max_relaunches: int = DEFAULT_MAX_RELAUNCHES
    deadline_s: float | None = None
    max_per_hour: int = DEFAULT_MAX_PER_HOUR
    needed: Mapping[str, LeastValue] = field(default_factory=lambda: MappingProxyType({}))

    # one reason a line
    def blocks(self, patch: Patch, incident: Incident) -> str | None:
        """Why this patch is not permitted, None where it is."""
        if (held := self.holds(patch)) is not None:
            return held
        knob = SETTINGS[patch.setting]
        by_user = set_by_user(patch.setting, incident)
        if (
            knob.hard_limit
            and by_user
            and patch.new is not None
            and not _below(patch.new, patch.old)
        ):
            is_theirs = patch.setting == "kv_cache_memory_bytes" and patch.new == incident.number(
                "overridden_kv_cache_bytes"
            )
            if is_theirs:
                return None
            return HARD_LIMIT
        if self.allow is not None:
            return self.forbids(patch)
        if patch.effect == Effect.OUTPUT_PRESERVING:
            return None
        if patch.effect == Effect.CHANGES_OUTPUTS:
            return f"changes outputs: --allow {patch.effect} permits it"
        if by_user is False:
            return None
        if by_user:
            told = YOU_SET_IT
        else:
            told = "you may have set it; --allow {} permits it"
        return told.format(patch.effect)

    def forbids(self, patch: Patch) -> str | None:
        """Return how an explicit ``allow`` forbids a patch; None where it does not."""
        is_over = self.allow is not None and patch.effect > self.allow
        if is_over:
            return _FORBIDS.format(self.allow, patch.effect)
        return None

    def holds(self, patch: Patch) -> str | None:
        """Return what stands against a patch whatever is allowed: a pin, a floor, what the command
        needs; None: nothing.
        """
        if patch.setting in self.pinned:
            return "pinned"
        floor = self.minimum.get(patch.setting)
        if floor is not None and patch.new is not None and _below(patch.new, floor):
            return f"below your floor of {floor}"
        need = self.needed.get(patch.setting)
        if (
            need is not None
            and patch.new is not None
            and _below(patch.new, min(need.value, _value(patch.old)))
        ):
            return (
                f"below {'what' if math.isinf(need.value) else f'the {need.value:.0f} that'} "
                f"{need.why}"
            )
        return None


def set_by_user(name: str, incident: Incident) -> bool | None:
    """Return whether the user set a setting of the failed run; None if nothing shows it.

    A printed value that is the default of no version was set by somebody.
    """
    in_force = incident.settings.get(name)
    if incident.settings_complete:
        by_default = False
    else:
        by_default = None
    if in_force:
        by_user = in_force.set_by_user
    else:
        by_user = by_default
    if by_user is not None or SETTINGS[name].hard_limit:
        return by_user
    value = incident.number(SETTINGS[name].fact or "")
    defaults = {row["value"] for row in surface(name, incident.framework).defaults}
    if value is not None and defaults and value not in defaults:
        return True
    return None


def make_policy(
    allow: str | None = None,
    pinned: Iterable[str] = (),
    minimum: Mapping[str, FactValue] | None = None,
    *,
    max_relaunches: int = DEFAULT_MAX_RELAUNCHES,
    deadline_s: float | None = None,
    max_per_hour: int = DEFAULT_MAX_PER_HOUR,
) -> Policy:
    """The policy that a user's words say; raises SettingError for an unknown effect or setting."""
    names = [str(effect) for effect in Effect]
    if allow is not None and allow not in names:
        raise SettingError(f"allow={allow!r}", hint=f"one of {', '.join(names)}")
    return Policy(
        None if allow is None else Effect.parse(allow),
        frozenset(pinned_name(name) for name in pinned),
        {setting(name).name: value for name, value in (minimum or {}).items()},
        max_relaunches,
        deadline_s,
        max_per_hour,
    )


def pinned_name(name: str) -> str:
    """Return the name of a setting, or of an engine's argument that nothing here changes; raises
    SettingError for any other.
    """
    canonical = name.lstrip("-").replace("-", "_")
    if canonical not in SETTINGS and canonical in unmanaged_arguments():
        return canonical
    return setting(name).name


def with_needed(policy: Policy, needed: Mapping[str, LeastValue]) -> Policy:
    """Return the policy with what a command needs, beside what was known of that before."""
    joined = dict(policy.needed)
    for name, need in needed.items():
        known = joined.get(name)
        if known is None or need.value > known.value:
            joined[name] = need
        else:
            joined[name] = known
    return replace(policy, needed=MappingProxyType(joined))


def is_out_of_question(patch: Patch) -> bool:
    """Return whether a patch stays undone whatever is allowed: its setting is pinned, or it goes
    below what has to be.
    """
    return patch.blocked_by is not None and patch.blocked_by.startswith(_NEVER)


def is_refused(patch: Patch) -> bool:
    """Return whether the user said no to a patch: as ``is_out_of_question``, and by an effect that
    forbids it.
    """
    return is_out_of_question(patch) or _FORBIDDEN.match(patch.blocked_by or "") is not None


def _value(old: FactValue | None) -> float:
    if old is None or isinstance(old, str):
        return math.inf
    return old


def _below(a: FactValue | None, b: FactValue | None) -> bool:
    return not isinstance(a, str | None) and not isinstance(b, str | None) and a < b


# Whether a patch may be applied by itself: what the value is now must be known, and the policy must
# permit the change.

_ONE_GROUP: Final = 1


def present_value(name: str, incident: Incident) -> FactValue | None:
    """Return the setting's value in force; None where nobody says it and the engine's default is
    only assumed.
    """
    known = value_in_force(name, incident.settings, incident.facts)
    if known is not None:
        return known[0]
    if incident.settings_complete:
        return default_value(name, incident.framework, incident.framework_version)
    return None


def why_blocked(patch: Patch, incident: Incident, policy: Policy) -> str | None:
    """Return why this patch is not applied by itself, None where it may be."""
    return assumed(patch.setting, incident) or policy.blocks(patch, incident)


def assumed(name: str, incident: Incident) -> str | None:
    """Return why the present value is only assumed, None where it is known or does not matter.

    Where the settings are all listed, one that is not listed has its default. A number of a launch
    is moved from where it stands, so where it stands must be known; a switch is set, and what a
    call takes is measured, not assumed.
    """
    of_a_launch = bool(surface(name, incident.framework).flags)
    if incident.settings_complete or not of_a_launch or SETTINGS[name].type not in {"int", "float"}:
        return None
    if present_value(name, incident) is not None:
        return None
    default = default_value(name, incident.framework, incident.framework_version)
    return "its present value is not shown" + (
        "" if default is None else f" ({default}, the default, is assumed)"
    )


def grouped(patches: Sequence[Patch], incident: Incident, policy: Policy) -> tuple[Patch, ...]:
    """Return patches that are applied together, and one alone as it is: what blocks one of them
    blocks all.
    """
    blocked = next(
        (why for patch in patches if (why := why_blocked(patch, incident, policy))), None
    )
    if len(patches) > 1:
        group = _ONE_GROUP
    else:
        group = None
    return tuple(replace(patch, blocked_by=blocked, group=group) for patch in patches)
