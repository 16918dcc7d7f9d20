"""Explain a stop for the host's memory: the supervisor's record becomes a failure with facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from oomguard.analyst.outcome import TerminationReason
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.incident import Diagnosis, Evidence, Incident

_KIND: Final = "host_oom"
_LIMIT: Final = "limit"
# The curve shows these seconds before the stop.
_SHOWN_S: Final = (60, 30, 10, 5, 2, 1)


def reason_of(record: Mapping[str, Any] | None) -> TerminationReason | None:
    """Return why the supervisor stopped the command; None if it did not."""
    if record is None:
        return None
    return TerminationReason(_sentence(record), is_hang=False, host=record)


def with_host_stop(found: Diagnosis, record: Mapping[str, Any]) -> Diagnosis:
    """Return the diagnosis with the stop as its first failure.

    The engine's own last words are left out unless memory ran out in it, because the stop caused
    them.

    Args:
        found: the diagnosis of the command's output.
        record: the supervisor's record of the stop.
    """
    figures = _figures(record)
    figures["engine_in_host_memory"] = bool(found.starts) and (
        record["is_unified"] or "on_cpu" in found.starts[-1].facts
    )
    facts = {name: Fact(name, value, "measured") for name, value in figures.items()}
    curve = _curve(record["curve"])
    lines = (_sentence(record), curve, _killed(record["killed"]))
    evidence = tuple(Evidence(line) for line in lines if line)
    incident = Incident(
        _KIND,
        evidence[0].text,
        framework="host",
        facts=MappingProxyType(facts),
        evidence=evidence,
    )
    if found.starts:
        start = found.starts[-1]
        incident = replace(
            incident,
            framework=start.framework,
            framework_version=start.framework_version,
            facts=MappingProxyType({**start.facts, **facts}),
            settings=start.settings,
            settings_complete=start.settings_complete,
            start=start.number,
        )
    others = tuple(other for other in found.incidents if other.is_oom)
    notes = (curve, *(note for note in found.notes if note != evidence[0].text))
    return replace(found, incidents=(incident, *others), notes=notes)


def _figures(record: Mapping[str, Any]) -> dict[str, FactValue]:
    total = record["total_bytes"]
    figures: dict[str, FactValue] = {
        "host_scope": record["scope"],
        "host_available_bytes": record["available_bytes"],
        "host_reserve_bytes": record["reserve_bytes"],
        "host_room_bytes": max(0, record["begin_bytes"] - record["reserve_bytes"]),
        "host_growth_bytes": record["growth_bytes"],
        "host_machine_bytes": record["machine_bytes"],
    }
    if record["scope"] == _LIMIT:
        figures["host_limit_bytes"] = total
    else:
        figures["host_total_bytes"] = total
    if record["holder"]:
        figures["host_holder"] = f"{record['holder']} (pid {record['holder_pid']})"
        figures["host_holder_bytes"] = record["holder_bytes"]
    return figures


def _sentence(record: Mapping[str, Any]) -> str:
    where = {True: "below the memory limit of", False: "of"}[record["scope"] == _LIMIT]
    return (
        f"oomguard stopped the command: {format_gib(record['available_bytes'])} was left {where} "
        f"{format_gib(record['total_bytes'])}, and the host reserve is "
        f"{format_gib(record['reserve_bytes'])}"
    )


def _curve(curve: Sequence[Sequence[float]]) -> str:
    """Return what was left in the last minute, as one line."""
    shown = []
    for seconds in _SHOWN_S:
        earlier = [left for at_s, left in curve if at_s <= -seconds]
        if earlier:
            shown.append(f"{format_gib(earlier[-1])} {seconds} s before")
    shown.append(f"{format_gib(curve[-1][1])} at the stop")
    return f"Memory left: {', '.join(shown)}"


def _killed(killed: Sequence[Sequence[Any]]) -> str:
    """Return the processes that did not stop in time, as one line; "" without any."""
    names = [f"{name} (pid {pid}, {format_gib(size)})" for pid, name, size in killed]
    if not names:
        return ""
    return f"oomguard killed {', '.join(names)}, because SIGTERM did not stop the command in time"
