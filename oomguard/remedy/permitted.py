"""Whether a patch may be applied by itself: what the value is now must be known, and the policy must permit the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from oomguard.facts import FactValue
from oomguard.incident import Incident, Patch
from oomguard.remedy.policy import Policy
from oomguard.settings import SETTINGS, value_in_force
from oomguard.surfaces import default_value, surface

_ONE_GROUP: Final = 1


def present_value(name: str, incident: Incident) -> FactValue | None:
    """Return the setting's value in force; None where nobody says it and the engine's default is only assumed."""
    known = value_in_force(name, incident.settings, incident.facts)
    if known is not None:
        return known[0]
    return default_value(name, incident.framework, incident.framework_version) if incident.settings_complete else None


def why_blocked(patch: Patch, incident: Incident, policy: Policy) -> str | None:
    """Return why this patch is not applied by itself, None where it may be."""
    return assumed(patch.setting, incident) or policy.blocks(patch, incident)


def assumed(name: str, incident: Incident) -> str | None:
    """Return why the present value is only assumed, None where it is known or does not matter.

    Where the settings are all listed, one that is not listed has its default. A number of a launch is moved from where it
    stands, so where it stands must be known; a switch is set, and what a call takes is measured, not assumed.
    """
    of_a_launch = bool(surface(name, incident.framework).flags)
    if incident.settings_complete or not of_a_launch or SETTINGS[name].type not in {"int", "float"}:
        return None
    if present_value(name, incident) is not None:
        return None
    default = default_value(name, incident.framework, incident.framework_version)
    return "its present value is not shown" + ("" if default is None else f" ({default}, the default, is assumed)")


def grouped(patches: Sequence[Patch], incident: Incident, policy: Policy) -> tuple[Patch, ...]:
    """Return patches that are applied together, and one alone as it is: what blocks one of them blocks all."""
    blocked = next((why for patch in patches if (why := why_blocked(patch, incident, policy))), None)
    group = _ONE_GROUP if len(patches) > 1 else None
    return tuple(replace(patch, blocked_by=blocked, group=group) for patch in patches)
