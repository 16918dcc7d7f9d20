"""Convert between the journal's JSON columns and records; missing values become None."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from oomguard.core.facts import REGISTRY, Fact, FactValue
from oomguard.core.incident import (
    Action,
    Alternative,
    Budget,
    BudgetPart,
    Cause,
    Effect,
    Evidence,
    Incident,
    Location,
    Missing,
    Patch,
)


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """Hold one attempt as the journal stores it; the caller has masked every text.

    The fields from ``original`` on belong to the run; the first attempt's values apply to all.

    Attributes:
        session: the run's name in the journal.
        number: the attempt's number, from 1.
        command: the command that was started.
        settings: everything that oomguard has changed so far.
        patches: the contract's patches, applied before this attempt.
        incident: the contract's object of the failure; None if there is none.
        predicted: facts and their predicted values; None if nothing was predicted.
        measured: facts and their measured values; None until the end.
        started_at: Unix seconds; 0 means now.
        ended_at: Unix seconds; None while it runs.
        exit_status: as a shell reports it; None while it runs.
        original: the command before any patch; empty if it is ``command``.
        folder: the working directory; None if unknown.
        files: the digest of the files that the command names; None without files.
        hides_secrets_alone: whether masking hid only secrets; None if unknown.
        who: the user's name on the host; None if unknown.
        host: the machine; None if unknown.
    """

    session: str
    number: int
    command: Sequence[str]
    settings: Mapping[str, Any]
    patches: Sequence[Mapping[str, Any]]
    incident: Mapping[str, Any] | None = None
    predicted: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    started_at: float = 0.0
    ended_at: float | None = None
    exit_status: int | None = None
    original: Sequence[str] = ()
    folder: str | None = None
    files: str | None = None
    hides_secrets_alone: bool | None = None
    who: str | None = None
    host: str | None = None

    def after(self, first: AttemptRow | None) -> AttemptRow:
        """Return the attempt with the run's fields of its first attempt.

        Another process may have removed the run in between, so each attempt carries these fields.
        """
        if first is None or first.session != self.session or self.original:
            return self
        of_run = {}
        for name in ("folder", "files", "hides_secrets_alone", "who", "host"):
            of_run[name] = getattr(first, name)
        return replace(self, original=first.original or first.command, **of_run)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Identify what an attempt ran, masked; None if unknown.

    ``device`` is name and size of the GPUs.
    """

    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """Describe how an attempt ended.

    Attributes:
        exit_status: as a shell reports it.
        incident: the contract's object of the failure; None without a failure.
        measured: facts and the values that this attempt measured.
        ran: what ran; None keeps the values of earlier attempts.
        set_by_user: whether the user had set each setting that may change next; None if unknown.
        seconds: how long it ran; None to compute it from ``ended_at``.
        error: why it failed, masked; None if status and incident say it.
        ended_at: Unix seconds.
    """

    exit_status: int
    incident: Mapping[str, Any] | None
    measured: Mapping[str, Any]
    ran: RunIdentity | None = None
    set_by_user: Mapping[str, bool | None] | None = None
    seconds: float | None = None
    error: str | None = None
    ended_at: float = 0.0


_EFFECTS: Final = {str(effect): effect for effect in Effect}
# Evidence with a line number begins with the number.
_LINE: Final = re.compile(r"line (\d+): (.*)", re.DOTALL)


def patch_of(row: Mapping[str, Any]) -> Patch:
    """Convert an object of the contract to a patch."""
    try:
        effect = Effect.parse(str(row.get("effect")))
    except KeyError:
        # Another version wrote this effect, so it counts as the most expensive one.
        effect = Effect.CHANGES_OUTPUTS
    return Patch(
        _text(row.get("setting")),
        _value(row.get("from")),
        _value(row.get("to")),
        effect,
        _text(row.get("reason")),
        _text(row.get("rule")),
        _text(row.get("as_flag")) or None,
        _text(row.get("as_kwarg")) or None,
        _text(row.get("as_env")) or None,
        row.get("predicted_freed_bytes"),
        MappingProxyType(numbers_of(row.get("predicts"))),
        _text(row.get("tradeoff")),
        _text(row.get("blocked_by")) or None,
        row.get("group"),
        _text(row.get("permitted_by")) or None,
    )


def incident_of(row: Mapping[str, Any]) -> Incident:
    """Convert an object of the contract to an incident; its causes contain the evidence."""
    # Only the journal stores the rounding, so that figures keep their printed precision.
    slack = numbers_of(row.get("slack"))
    facts = {}
    for name, value in values_of(row.get("facts")).items():
        if name in REGISTRY:
            facts[name] = Fact(name, value, slack=slack.get(name, 0.0))
    place = _object(row.get("location"))
    return Incident(
        _text(row.get("kind")) or "other",
        _text(row.get("message")),
        _text(row.get("framework")) or "unknown",
        row.get("framework_version"),
        _text(row.get("phase")) or "unknown",
        Location(place.get("line"), place.get("byte"), place.get("process")),
        _count(row.get("repeated")),
        facts=MappingProxyType(facts),
        causes=tuple(_causes(row)),
        plan=tuple(patch_of(each) for each in _objects(row, "plan")),
        actions=tuple(_actions(row)),
        alternatives=tuple(_alternatives(row)),
        budget=_budget(_object(row.get("budget"))),
        unknown=_texts(row.get("unknown")),
        start=_count(row.get("start")),
        also_in=_texts(row.get("also_in")),
        wrappers=_lines(row.get("wrappers")),
        missing=_missing(_object(row.get("missing"))),
    )


def parse_object(text: str | None) -> dict[str, Any]:
    """Return a column as an object; empty if it contains none."""
    if text and text != "{}":
        found = json.loads(text)
    else:
        found = None
    if isinstance(found, dict):
        return found
    return {}


def parse_list(text: str | None) -> list[Any]:
    """Return a column as a list; empty if it contains none."""
    if text and text != "[]":
        found = json.loads(text)
    else:
        found = None
    if isinstance(found, list):
        return found
    return []


def words_of(text: str) -> tuple[str, ...]:
    """Return a column as the words of a command."""
    return tuple(str(word) for word in parse_list(text))


def values_of(row: object) -> dict[str, FactValue]:
    """Return the values of an object that a fact or a setting can have."""
    pairs = row.items() if isinstance(row, dict) else ()
    found = {}
    for name, value in pairs:
        if isinstance(value, (bool, int, float, str)):
            found[str(name)] = value
    return found


def numbers_of(row: object) -> dict[str, float]:
    """Return the numbers of an object."""
    found = {}
    for name, value in values_of(row).items():
        if not isinstance(value, (bool, str)):
            found[name] = value
    return found


def _causes(row: Mapping[str, Any]) -> Iterator[Cause]:
    for each in _objects(row, "causes"):
        evidence = _lines(each.get("evidence"))
        names = _text(each.get("id")) or "unknown", _text(each.get("rule"))
        texts = _text(each.get("explanation")), _text(each.get("title")), _text(each.get("confirm"))
        yield Cause(*names, numbers_of(each).get("confidence", 0.0), evidence, *texts)


def _actions(row: Mapping[str, Any]) -> Iterator[Action]:
    for each in _objects(row, "actions"):
        effect = each.get("effect")
        frees = each.get("frees_bytes")
        yield Action(
            id=_text(each.get("id")),
            title=_text(each.get("title")),
            direction=_text(each.get("direction")) or None,
            old=_value(each.get("from")),
            new=_value(each.get("to")),
            effect=_EFFECTS.get(_text(effect)),
            applicability=_text(each.get("applicability")) or "manual",
            command=_text(each.get("command")) or None,
            why=_text(each.get("why")),
            frees_bytes=frees if isinstance(frees, int) else None,
            rule=_text(each.get("rule")),
            cost=_text(each.get("cost")),
            blocked_by=_text(each.get("blocked_by")) or None,
        )


def _alternatives(row: Mapping[str, Any]) -> Iterator[Alternative]:
    for each in _objects(row, "alternatives"):
        name = _text(each.get("setting"))
        new = _value(each.get("to"))
        why_not = _text(each.get("why_not"))
        yield Alternative(name, new, why_not, each.get("as_flag"), each.get("as_kwarg"))


def _missing(row: Mapping[str, Any]) -> Missing | None:
    if row:
        return Missing(_text(row.get("what")), _text(row.get("command")))
    return None


def _budget(row: Mapping[str, Any]) -> Budget:
    parts = []
    for each in _objects(row, "parts"):
        if isinstance(each.get("bytes"), int):
            part = BudgetPart(_text(each.get("name")), each["bytes"], _text(each.get("source")))
            parts.append(part)
    return Budget(row.get("device_total_bytes"), tuple(parts), _text(row.get("conflict")) or None)


def _objects(row: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    rows = row.get(key)
    if isinstance(rows, list):
        for each in rows:
            if isinstance(each, dict):
                yield each


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return {}


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(map(str, value))
    return ()


def _lines(value: object) -> tuple[Evidence, ...]:
    found = []
    for text in _texts(value):
        line = _LINE.fullmatch(text)
        if line:
            found.append(Evidence(line[2], int(line[1])))
        else:
            found.append(Evidence(text))
    return tuple(found)


def _count(value: object) -> int:
    if isinstance(value, int) and value > 0:
        return value
    return 1


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return ""


def _value(value: object) -> FactValue | None:
    if isinstance(value, (bool, int, float, str)):
        return value
    return None
