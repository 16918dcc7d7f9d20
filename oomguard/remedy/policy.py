"""What the user permits: highest effect, pinned settings, floors, relaunches and a deadline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import Effect, Incident, Patch
from oomguard.settings import SETTINGS, setting

DEFAULT_MAX_RELAUNCHES: Final = 3
DEFAULT_MAX_PER_HOUR: Final = 3
# Why a patch is blocked that raises what the user wrote in bytes: it is an alternative then.
HARD_LIMIT: Final = "a byte count you set"


@dataclass(frozen=True, slots=True)
class Policy:
    """``allow`` None is the default policy: output-preserving always, reduces-capacity only on what the user left alone.

    An explicit ``allow`` permits effects up to it on every setting and forbids the rest; pinned settings and floors
    (``minimum`` by setting) hold in any case. ``deadline_s`` is seconds from the start of the first attempt. ``max_per_hour``
    is for a command: relaunches within any hour.
    """

    allow: Effect | None = None
    pinned: frozenset[str] = frozenset()
    minimum: Mapping[str, FactValue] = field(default_factory=lambda: MappingProxyType({}))
    max_relaunches: int = DEFAULT_MAX_RELAUNCHES
    deadline_s: float | None = None
    max_per_hour: int = DEFAULT_MAX_PER_HOUR

    def blocks(self, patch: Patch, incident: Incident) -> str | None:  # noqa: PLR0911 - one reason a line
        """Why this patch is not permitted, None where it is."""
        knob, in_force = SETTINGS[patch.setting], incident.settings.get(patch.setting)
        left_alone = False if incident.settings_complete else None
        set_by_user = in_force.set_by_user if in_force else left_alone
        if patch.setting in self.pinned:
            return "pinned"
        floor = self.minimum.get(patch.setting)
        if floor is not None and patch.new is not None and _below(patch.new, floor):
            return f"below your floor of {floor}"
        if knob.hard_limit and set_by_user and patch.new is not None and not _below(patch.new, patch.old):
            return HARD_LIMIT
        if self.allow is not None:
            return None if patch.effect <= self.allow else f"--allow {self.allow} forbids what {patch.effect}"
        if patch.effect == Effect.OUTPUT_PRESERVING:
            return None
        if patch.effect == Effect.CHANGES_OUTPUTS:
            return f"changes outputs: --allow {patch.effect} permits it"
        if set_by_user is False:
            return None
        reason = "you set it" if set_by_user else "not known whether you set it"
        return f"{reason}: --allow {patch.effect} permits it"


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
        frozenset(setting(name).name for name in pinned),
        {setting(name).name: value for name, value in (minimum or {}).items()},
        max_relaunches,
        deadline_s,
        max_per_hour,
    )


def _below(a: FactValue | None, b: FactValue | None) -> bool:
    return not isinstance(a, str | None) and not isinstance(b, str | None) and a < b
