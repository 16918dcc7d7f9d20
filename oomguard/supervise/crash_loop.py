"""A crash loop: starts that fail alike one after the other, though a change took effect in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.incident import Attempt, Incident, Patch
from oomguard.supervise.pauses import QUICK_S

# So many starts are a loop: two changes were tried, and the failure is the same.
LOOP_STARTS: Final = 3
# A figure that is smaller by no more than this is the same: what an engine holds varies a little from start to start.
SAME_RATIO: Final = 0.01
# What was needed, and what was there for it, as failures print it.
_NEEDED_AND_THERE: Final = (
    ("tried_bytes", "device_free_bytes"),
    ("desired_bytes", "device_free_bytes"),
    ("kv_cache_requested_bytes", "device_free_bytes"),
    ("kv_cache_needed_bytes", "kv_cache_available_bytes"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt; ``began_s`` and ``ended_s`` are of one clock."""

    incident: Incident
    patches: tuple[Patch, ...]
    began_s: float
    ended_s: float

    @property
    def cause(self) -> tuple[str, str, str]:
        """What it failed of: kind, rule, phase."""
        return self.incident.kind, self.incident.causes[0].rule, self.incident.phase

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended_s - self.began_s


class CrashLoop:
    """The last failures of a run that are alike, each after a change that took effect."""

    def __init__(self) -> None:
        self._alike: list[Failure] = []

    def add(self, attempt: Attempt, began_s: float, *, took_effect: bool) -> None:
        """Take note of the attempt that failed last.

        Args:
            attempt: has an incident with a cause.
            began_s: when it began.
            took_effect: whether what it changed reached the engine.
        """
        if attempt.incident is None:  # a request refused by our own change: no failure of memory, and it is taken back
            return
        failure = Failure(attempt.incident, attempt.patches, began_s, began_s + attempt.seconds)
        goes_on = bool(self._alike) and took_effect and failure.cause == self._alike[-1].cause
        kept = self._alike if goes_on and failure.seconds < QUICK_S else []
        self._alike = [*kept, failure] if failure.seconds < QUICK_S else []

    @property
    def said(self) -> str | None:
        """Describe the loop, with its times; None without a loop."""
        if len(self._alike) < LOOP_STARTS:
            return None
        first, last = self._alike[0], self._alike[-1]
        kind, rule, phase = last.cause
        where = ", ".join(word for word in (rule, phase) if word and word != "unknown")
        of = f"{kind} ({where})" if where else kind
        return f"{len(self._alike)} starts in {_shown_s(last.ended_s - first.began_s)}, each failed of {of}"

    @property
    def times(self) -> str:
        """How long each of its starts ran."""
        return ", ".join(_shown_s(failure.seconds) for failure in self._alike)

    def is_another_step(self, patches: Sequence[Patch]) -> bool:
        """Return whether these patches only go on with changes that did not help, in a loop.

        A change did not help where the failure after it prints the same need and the same shortage; where it prints
        neither, nothing is concluded. A value that was solved to a predicted figure may be tried in any case.
        """
        if self.said is None or any(patch.predicts for patch in patches):
            return False
        helped: dict[str, bool] = {}
        for before, after in zip(self._alike, self._alike[1:], strict=False):
            shrank = need_shrank(before.incident, after.incident)
            helped |= {patch.setting: shrank is not False for patch in after.patches}
        return all(helped.get(patch.setting, True) is False for patch in patches)


def need_shrank(before: Incident, after: Incident) -> bool | None:
    """Return whether less was needed, or less was missing, in the later of two failures; None where neither tells."""
    answers = []
    for needed, there in _NEEDED_AND_THERE:
        was, now = _figures(before, needed, there), _figures(after, needed, there)
        answers += [now[name][0] < value - tolerance for name, (value, tolerance) in was.items() if name in now]
    return any(answers) if answers else None


def _figures(incident: Incident, needed: str, there: str) -> dict[str, tuple[float, float]]:
    """Return what is smaller where a change helped, each with what it may vary by.

    They are the need, and what is missing; of a KV cache that nothing is left for only what is missing is printed.
    """
    need, room = incident.number(needed), incident.number(there)
    if need is None:
        if room is None or there == "device_free_bytes":  # what is free says nothing without what was asked for
            return {}
        return {"left": (-room, max(SAME_RATIO * abs(room), incident.slack(there)))}
    tolerance = max(SAME_RATIO * need, incident.slack(needed))
    figures = {"need": (need, tolerance)}
    if room is not None:
        figures["missing"] = (need - room, max(tolerance, incident.slack(there)))
    return figures


def _shown_s(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
