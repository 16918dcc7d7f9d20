"""A solved value, or the reason why none was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from oomguard.core.facts import FactValue
from oomguard.core.incident import Effect


@dataclass(frozen=True, slots=True)
class Solution:
    """A value that is predicted to fit, or None with the reason that names what is missing.

    ``predicts`` maps facts to what the next attempt should show; ``blocked_by`` says why the value
    cannot be applied whatever the policy permits. ``effect`` is what the value costs here; None:
    what it costs anywhere.
    """

    value: FactValue | None
    reason: str
    freed_bytes: int | None = None
    unknown: tuple[str, ...] = ()
    predicts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    blocked_by: str | None = None
    effect: Effect | None = None
