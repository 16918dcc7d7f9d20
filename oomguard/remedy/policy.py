"""What the user permits: highest effect, pinned settings, minimums, attempts and a deadline."""

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
from oomguard.core.settings import (
    SETTINGS,
    default_value,
    setting,
    surface,
    unmanaged_arguments,
    value_in_force,
)

DEFAULT_MAX_ATTEMPTS: Final = 4
DEFAULT_MAX_PER_HOUR: Final = 3
# Why a patch that exceeds the user's byte count is blocked; it becomes an alternative.
HARD_LIMIT: Final = "a byte count you set"


# Beginnings of reasons that no permission can lift.
_NEVER: Final = ("pinned", "below ")
YOU_SET_IT: Final = "you set it; --allow {} permits it"
_FORBIDS: Final = "--allow {} does not permit {}"
_FORBIDDEN: Final = re.compile(re.escape(_FORBIDS).replace(r"\{\}", "[a-z-]+"))


@dataclass(frozen=True, slots=True)
class LeastValue:
    """The least value with which the user's requests work, and the reason.

    ``inf``: the value that it had.
    """

    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user permits.

        Policy(allow=Effect.REDUCES_CAPACITY, pinned=frozenset({"max_model_len"}))

    Attributes:
        allow: the highest permitted effect for every setting. None is the default: keep outputs the
            same; reduce capacity only for settings that the user did not set.
        pinned: settings that are never changed.
        minimum: the lowest permitted value by setting.
        max_attempts: the largest number of attempts, including the first.
        deadline_s: seconds from the start of the first attempt; None: no deadline.
        max_per_hour: relaunches of a command within any hour.
        needed: what the command's own requests need, by setting.
    """

    allow: Effect | None = None
    pinned: frozenset[str] = frozenset()
    minimum: Mapping[str, FactValue] = field(default_factory=lambda: MappingProxyType({}))
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    deadline_s: float | None = None
    max_per_hour: int = DEFAULT_MAX_PER_HOUR
    needed: Mapping[str, LeastValue] = field(default_factory=lambda: MappingProxyType({}))

    def blocks(self, patch: Patch, incident: Incident) -> str | None:
        """Return why this patch is not permitted; None if it is."""
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
            allowance = YOU_SET_IT
        else:
            allowance = "you may have set it; --allow {} permits it"
        return allowance.format(patch.effect)

    def permission(self, patch: Patch) -> str:
        """Return what permits a patch that is not blocked: the default, or an option."""
        if patch.effect == Effect.OUTPUT_PRESERVING:
            return "default"
        if self.allow is None:
            return "default: you did not set it"
        return f"--allow {self.allow}"

    def forbids(self, patch: Patch) -> str | None:
        """Return how an explicit ``allow`` forbids a patch; None if it does not."""
        is_over = self.allow is not None and patch.effect > self.allow
        if is_over:
            return _FORBIDS.format(self.allow, patch.effect)
        return None

    def holds(self, patch: Patch) -> str | None:
        """Return what forbids a patch with any permission: a pin, a minimum, or the command's need.

        None if nothing does.
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
            if math.isinf(need.value):
                least = "what"
            else:
                least = f"the {need.value:.0f} that"
            return f"below {least} {need.why}"
        return None


def set_by_user(name: str, incident: Incident) -> bool | None:
    """Return whether the user set a setting of the failed run; None if it is unknown.

    A printed value that is not any version's default was set by the user.
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
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    deadline_s: float | None = None,
    max_per_hour: int = DEFAULT_MAX_PER_HOUR,
) -> Policy:
    """Make a policy from the user's words.

        make_policy("reduces-capacity", pinned=["dtype"], minimum={"max_model_len": 8192})

    Raises:
        SettingError: the effect or a setting is unknown.
    """
    names = [str(effect) for effect in Effect]
    if allow is not None and allow not in names:
        raise SettingError(
            f"allow={allow!r} is not an effect", hint=f"Use one of {', '.join(names)}."
        )
    return Policy(
        None if allow is None else Effect.parse(allow),
        frozenset(pinned_name(name) for name in pinned),
        {setting(name).name: value for name, value in (minimum or {}).items()},
        max_attempts,
        deadline_s,
        max_per_hour,
    )


def pinned_name(name: str) -> str:
    """Return the name of a setting, or of an engine argument that oomguard never changes.

    Raises:
        SettingError: the name is neither.
    """
    canonical = name.lstrip("-").replace("-", "_")
    if canonical not in SETTINGS and canonical in unmanaged_arguments():
        return canonical
    return setting(name).name


def with_needed(policy: Policy, needed: Mapping[str, LeastValue]) -> Policy:
    """Return the policy with a command's needs; the higher of two needs counts."""
    joined = dict(policy.needed)
    for name, need in needed.items():
        known = joined.get(name)
        if known is None or need.value > known.value:
            joined[name] = need
        else:
            joined[name] = known
    return replace(policy, needed=MappingProxyType(joined))


def is_out_of_question(patch: Patch) -> bool:
    """Return whether no permission can lead to a patch: it is pinned, or below a minimum."""
    return patch.blocked_by is not None and patch.blocked_by.startswith(_NEVER)


def is_refused(patch: Patch) -> bool:
    """Return whether the user rules a patch out, by a pin, a minimum or a forbidden effect."""
    return is_out_of_question(patch) or _FORBIDDEN.match(patch.blocked_by or "") is not None


def _value(old: FactValue | None) -> float:
    if old is None or isinstance(old, str):
        return math.inf
    return old


def _below(a: FactValue | None, b: FactValue | None) -> bool:
    return not isinstance(a, str | None) and not isinstance(b, str | None) and a < b


# A patch applies automatically only if the present value is known and the policy permits it.

_ONE_GROUP: Final = 1


def present_value(name: str, incident: Incident) -> FactValue | None:
    """Return the setting's effective value; None if only the engine's default may be assumed."""
    known = value_in_force(name, incident.settings, incident.facts)
    if known is not None:
        return known[0]
    if incident.settings_complete:
        return default_value(name, incident.framework, incident.framework_version)
    return None


def why_blocked(patch: Patch, incident: Incident, policy: Policy) -> str | None:
    """Return why this patch is not applied automatically; None if it may be."""
    return assumed(patch.setting, incident) or policy.blocks(patch, incident)


def assumed(name: str, incident: Incident) -> str | None:
    """Return why the present value is only assumed; None if it is known or does not matter.

    If the settings are complete, an unlisted one has its default. A launch's number is changed
    relative to its present value, so that must be known. A switch is simply set, and a call's needs
    are measured.
    """
    of_a_launch = bool(surface(name, incident.framework).flags)
    if incident.settings_complete or not of_a_launch or SETTINGS[name].type not in {"int", "float"}:
        return None
    if present_value(name, incident) is not None:
        return None
    default = default_value(name, incident.framework, incident.framework_version)
    if default is None:
        return "its present value is not shown"
    return f"its present value is not shown ({default}, the default, is assumed)"


def grouped(patches: Sequence[Patch], incident: Incident, policy: Policy) -> tuple[Patch, ...]:
    """Return patches as one group, in which one blocked patch blocks all."""
    blocked = None
    for patch in patches:
        blocked = why_blocked(patch, incident, policy)
        if blocked:
            break
    if len(patches) > 1:
        group = _ONE_GROUP
    else:
        group = None
    return tuple(replace(patch, blocked_by=blocked, group=group) for patch in patches)
