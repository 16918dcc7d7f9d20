"""The flow in one place: what was observed becomes a diagnosis with causes and a plan (the same for every way in)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO

from oomguard.facts import Fact
from oomguard.incident import DRAWINGS, Diagnosis, Incident, SettingInForce
from oomguard.memory.derive import budget_of_start, derive
from oomguard.observe.anchors import finder
from oomguard.observe.exceptions import exception_lines
from oomguard.observe.scan import scan
from oomguard.observe.skim import Gap, skim
from oomguard.observe.source import Line, damage_of, open_log, read_lines
from oomguard.remedy.planner import Tried, plan
from oomguard.remedy.policy import Policy
from oomguard.rules.load import RuleSet, load_rules
from oomguard.rules.match import explain


@cache
def default_rules() -> RuleSet:
    """The rules that come with oomguard, loaded once."""
    return load_rules()


def assess(
    incident: Incident,
    rules: RuleSet,
    policy: Policy,
    tried: Tried = (),
    *,
    given: Mapping[str, Fact] | None = None,
    local_models: bool = False,
    model: str | None = None,
) -> Incident:
    """One observed incident, explained and planned for; ``given`` facts fill what was not printed.

    ``local_models`` lets the memory model read the folder that the log names, ``model`` one that the user names.
    """
    facts = {**(given or {}), **incident.facts}
    derived = derive(replace(incident, facts=facts), local_models=local_models or model is not None, model=model)
    start = None
    if local_models or model is not None:
        from oomguard.memory.in_force import start_in_force  # loads the whole memory model

        start = start_in_force(derived, model)
    return plan(explain(derived, rules), rules, policy, tried, start)


def assess_all(
    diagnosis: Diagnosis,
    rules: RuleSet,
    policy: Policy,
    tried: Tried = (),
    *,
    given: Mapping[str, Fact] | None = None,
    local_models: bool = False,
    model: str | None = None,
) -> Diagnosis:
    """Every incident of a scan, explained and planned for."""
    incidents = tuple(
        assess(i, rules, policy, tried, given=given, local_models=local_models, model=model)
        for i in diagnosis.incidents
    )
    starts = tuple(replace(start, budget=budget_of_start(start.facts)) for start in diagnosis.starts)
    return replace(diagnosis, incidents=incidents, starts=starts)


def diagnose_lines(
    lines: Iterable[Line | Gap],
    source: str = "",
    *,
    rules: RuleSet | None = None,
    policy: Policy | None = None,
    given: Mapping[str, Fact] | None = None,
    settings: Mapping[str, SettingInForce] | None = None,
    model: str | None = None,
) -> Diagnosis:
    """Diagnose a stream of lines; ``given`` facts and ``settings`` fill what the log leaves out.

    ``model``, a folder or a hub name, lets the memory model solve what the log's own numbers do not.
    """
    rules = rules or default_rules()
    found = scan(lines, rules, source, given=settings)
    return assess_all(found, rules, policy or Policy(), given=given, model=model)


def diagnose_stream(
    stream: IO[bytes],
    source: str = "",
    *,
    rules: RuleSet | None = None,
    policy: Policy | None = None,
    given: Mapping[str, Fact] | None = None,
    settings: Mapping[str, SettingInForce] | None = None,
    model: str | None = None,
) -> Diagnosis:
    """Diagnose a stream of bytes of any size in constant memory, see ``diagnose_lines``.

    A compressed stream that is damaged is read as far as it goes, and a note says so.
    """
    rules = rules or default_rules()
    anchors = rules.anchors
    lines = skim(stream, lambda: finder(anchors))
    diagnosis = diagnose_lines(lines, source, rules=rules, policy=policy, given=given, settings=settings, model=model)
    damage = damage_of(stream)
    return diagnosis if damage is None else replace(diagnosis, notes=(*diagnosis.notes, damage))


def diagnose(
    source: str | Path | BaseException,
    *,
    policy: Policy | None = None,
    rules: RuleSet | None = None,
    given: Mapping[str, Fact] | None = None,
) -> Diagnosis:
    """Say why memory ran out, from a log's text, the path of a log, or an exception.

    A string is a path where a file of that name exists, else the text itself. Raises InputError for a path that
    cannot be read. The diagnosis of something that is no memory failure has no incidents.
    """
    if isinstance(source, BaseException):
        return diagnose_lines(exception_lines(source), type(source).__name__, rules=rules, policy=policy, given=given)
    if isinstance(source, Path) or _names_a_file(source):
        with open_log(str(source)) as stream:
            return diagnose_stream(stream, str(source), rules=rules, policy=policy, given=given)
    text = io.BytesIO(source.encode("utf-8", "surrogatepass"))
    return diagnose_lines(read_lines(text), rules=rules, policy=policy, given=given)


def _as_html(diagnosis: Diagnosis) -> str:
    from oomguard.report.notebook import notebook_html

    return notebook_html(diagnosis)


DRAWINGS["html"] = _as_html


def _names_a_file(text: str) -> bool:
    try:
        return "\n" not in text and len(text) < 1024 and Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or a null byte
        return False
