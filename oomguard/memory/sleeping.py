"""An engine that gave its device memory back and takes it again: what its log says of each sleep, in sentences for the rules."""

from __future__ import annotations

from typing import Final

from oomguard.facts import Fact, format_rounded, number_of
from oomguard.incident import Incident

# Ray's actors that hold a trainer and wake its engine: verl, OpenRLHF and what is built on them.
_TRAINERS: Final = (
    "WorkerDict",
    "ActorModel",
    "PolicyModel",
    "ActorRollout",
    "TrainRayActor",
    "MegatronTrain",
    "FSDPTrain",
)
_UNKNOWN: Final = "The log does not say how much the engine gave back when it went to sleep."


def with_sleep(facts: dict[str, Fact], incident: Incident, phase: str) -> str:
    """Add what the log says of sleeping; return the phase, which is ``wake_up`` if the sleep mode's allocator failed while it slept."""
    if _is(facts, "pool_allocator") and _is(facts, "asleep"):
        phase = "wake_up"
    if phase != "wake_up":
        return phase
    if (incident.location.process or "").startswith(_TRAINERS):
        facts.setdefault("trainer_frames", Fact("trainer_frames", True, "solved"))
    text, used = " ".join(_sentences(facts)) or _UNKNOWN, facts.get("sleep_used_bytes")
    facts.setdefault("sleep_account", Fact("sleep_account", text, "solved", line=None if used is None else used.line))
    return phase


def _sentences(facts: dict[str, Fact]) -> list[str]:
    """Return what was freed, what stayed, and what must have been taken since."""
    sentences: list[str] = []
    freed, used = facts.get("sleep_freed_bytes"), facts.get("sleep_used_bytes")
    needed, each = facts.get("wake_needed_bytes") or freed, facts.get("sleep_used_each")
    if freed is not None and used is not None:
        sentences.append(f"Its last sleep freed {_size(freed)}; {_size(used)} of the device stayed in use.")
    if each is not None and " " in str(each.value):
        sentences.append(f"In use after each sleep: {each.value} GiB.")
    if needed is None:
        return sentences
    if needed is not freed:
        sentences.append(f"It needs {_size(needed)} to wake up.")
    total = number_of(facts, "device_total_bytes")
    if total and used is not None:
        taken = round(total - float(needed.value) - float(used.value))
        if taken > 0:
            slack = needed.slack + used.slack
            sentences.append(f"So at least {format_rounded(taken, slack)} more was taken while it slept.")
    return sentences


def _is(facts: dict[str, Fact], name: str) -> bool:
    return name in facts and facts[name].value is True


def _size(fact: Fact) -> str:
    return format_rounded(float(fact.value), fact.slack)
