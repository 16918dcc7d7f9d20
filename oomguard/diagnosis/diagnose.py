"""The flow in one place, the same for every way in: what was observed becomes a diagnosis with
causes and a plan.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Final

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import Fact, FactValue, number_of, parse_size
from oomguard.core.incident import EMPTY, Cause, Diagnosis, Incident, Patch, SettingInForce
from oomguard.core.settings import parse_value, setting
from oomguard.estimate.budget import budget_of_start
from oomguard.estimate.printed_budget import derive
from oomguard.remedy.actions import with_actions
from oomguard.remedy.from_estimate import FailureModel
from oomguard.remedy.planner import Tried, plan
from oomguard.remedy.policy import Policy
from oomguard.rules.match import explain
from oomguard.rules.rule_files import ENGINE_ENDS, RuleSet, load_rules, what_is_missing
from oomguard.scan.anchors import finder
from oomguard.scan.exceptions import exception_lines
from oomguard.scan.incidents import with_labels
from oomguard.scan.non_logs import (
    HEAD_BYTES,
    is_foreign,
    is_named_pickle,
    is_other_pickle,
    no_failure_in_text,
    refuse_archive,
    refuse_foreign,
)
from oomguard.scan.safe_pickle import is_pickle
from oomguard.scan.scan import scan
from oomguard.scan.skim import Gap, skim
from oomguard.scan.source import Line, damage_of, looked_into, open_log, read_lines
from oomguard.scan.split_lines import begun_before, joined, lines_behind, log_before

# Which model's files a diagnosis reads: those that the user gives, else the folder that the log
# names.

# Whose models the memory model reads.
_READ: Final = "vllm"
_CONFIG: Final = "config.json"


def named_folder(incident: Incident) -> str | None:
    """Return the model's folder that the log names, if it is here and can be read; a name on the
    hub is never looked up.
    """
    named = _named(incident)
    try:
        if named is not None and Path(named).is_absolute() and (Path(named) / _CONFIG).is_file():
            return named
    except (OSError, ValueError):  # a name too long, or a folder of another user
        return None
    return None


def note_on_model(incident: Incident, model: str | None) -> str | None:
    """Return a note on the model that was read: the log's folder, or one of another name than the
    log's; None for neither.
    """
    named = _named(incident)
    if model is None:
        if named_folder(incident) is None:
            return None
        return f"the model was read from the folder that the log names: {named}"
    if named is None or _last(named) == _last(model):
        return None
    return f"the model that you gave was read, {model}; the log names another one, {named}"


def _named(incident: Incident) -> str | None:
    fact = incident.facts.get("model")
    if fact is not None and incident.framework == _READ:
        return str(fact.value)
    return None


def _last(name: str) -> str:
    """Return the last part of a model's name or folder, as the hub and a cache of it write it."""
    return (
        name.rstrip("/").removesuffix(f"/{_CONFIG}").rpartition("/")[2].rpartition("--")[2].lower()
    )


# The requests in the step that an engine died in, named for who has to find the one that killed it.

_REQUEST: Final = re.compile(r"([^\s,:{}]+): (\d+)")
_MOST_NAMED: Final = 5


def step_requests(facts: Mapping[str, Fact]) -> dict[str, int]:
    """Return the requests of the step that failed with their tokens, the largest first; empty where
    none were printed.

    Of very many only the first are read; then the last of these may be cut, and is left out.
    """
    told = facts.get("step_requests")
    if told is not None:
        rows = _REQUEST.findall(str(told.value))
    else:
        rows = []
    found = {name: int(tokens) for name, tokens in (rows if "step_tokens" in facts else rows[:-1])}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def failed_step(facts: Mapping[str, Fact]) -> str | None:
    """Return in words which requests were in the step that failed; None where that was not printed.

    A request that takes far more tokens than the others was being read; one token each is the next
    word of an answer.
    """
    requests = step_requests(facts)
    if not requests:
        return None
    named = ", ".join(f"{name} ({tokens})" for name, tokens in list(requests.items())[:_MOST_NAMED])
    more = len(requests) - _MOST_NAMED
    total = number_of(facts, "step_tokens")
    if len(requests) == 1:
        count = "1 request"
    else:
        count = f"{len(requests)} requests"
    if total is None:
        size = f"at least {count}"
    else:
        size = f"{count} of {int(total)} tokens"
    return f"in the step that failed: {size}, {named}{f' and {more} more' if more > 0 else ''}"


# The size of this machine's GPUs, for an engine that failed here and did not print it.

# NVML counts what the driver keeps for itself and torch does not: 0.6 % of an H100, 2 % of an L4.
_DRIVERS_RATIO: Final = 0.02
_TOTAL: Final = "device_total_bytes"


def own_device_total(incident: Incident) -> Mapping[str, Fact]:
    """Return the total of this machine's GPUs as a fact; empty where it was printed, is unknown, or
    differs between them.

    vLLM prints it for some failures only; "No available memory for the cache blocks" is not one of
    them, and how far the utilization has to rise depends on it. A part of a GPU (MIG) has a size
    that NVML's device does not tell.

    Args:
        incident: what failed, on this machine, just now.
    """
    if incident.framework != "vllm" or _TOTAL in incident.facts or "on_cpu" in incident.facts:
        return {}
    if "MIG" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return {}
    from oomguard.probe.nvml import devices

    totals = {device.total_bytes for device in devices() or ()}
    if len(totals) != 1 or not (total := totals.pop()):
        return {}
    return {_TOTAL: Fact(_TOTAL, total, "measured", _DRIVERS_RATIO * total)}


_UNRECOGNIZED = (
    "No signature has its wording, so nothing is changed because of it. To add a signature: "
    "--rules DIR."
)
_PATH_CHARS = 1024
# Words without white space that have a separator of folders, or the suffix of a log or of a
# snapshot.
_IS_PATH = re.compile(
    r"[\w.~:@%+=,-]*[/\\][\w.~:@%+=,/\\-]*|[\w.~:@%+=,-]+\.(?:log|txt|out|err|jsonl?|pickle|pkl)(?:\.\d{1,4})?(?:\.(?:gz|xz|bz2|zst))?"
)
PASSED_OVER = "passed over: a pickle by its name or content, and no allocation snapshot"
_NOT_ACTED_ON = "its wording is new: reported, not acted on"


@cache
def default_rules() -> RuleSet:
    """Return the shipped rules, loaded once."""
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
    behind: FailureModel | None = None,
) -> Incident:
    """Explain one observed incident and plan for it.

    Args:
        incident: what was observed.
        rules: the rules in force.
        policy: what the user permits.
        tried: settings and values that failed, which are not proposed again.
        given: facts that the user gives; they yield to what was printed, and outrank this machine's
            GPU.
        local_models: whether it failed on this machine, just now: the memory model may read the
            folder that the log names, and the size of this machine's GPUs counts where the log does
            not print one.
        model: a folder or hub name that the user gives for the memory model; None: the folder that
            the log names, if it is here.
        behind: the model behind the failure, if the caller has it.
    """
    own: Mapping[str, Fact] = {}
    if local_models:
        own = own_device_total(incident)
    facts = {**own, **(given or {}), **incident.facts}
    derived = derive(replace(incident, facts=facts))
    if model is None and not local_models:
        model = named_folder(derived)
    if "tried_bytes" in facts and derived.framework == "vllm":
        from oomguard.estimate.start.failed_allocation import with_allocation

        derived = with_allocation(derived, model, local=local_models)
    if local_models or model is not None:
        from oomguard.estimate.start.failed_start import with_exact_weights
        from oomguard.estimate.start.kv_shortfall import with_exact_need
        from oomguard.remedy.from_estimate import failure_model

        derived = with_exact_need(with_exact_weights(derived, model), model)
        behind = behind or failure_model(derived, model)
    planned = plan(explain(derived, rules), rules, policy, tried, behind)
    planned = replace(
        planned,
        missing=what_is_missing(planned, rules.missing, heard=local_models or behind is not None),
    )
    if planned.certainty_ratio is not None:
        told = tuple(
            replace(patch, blocked_by=patch.blocked_by or _NOT_ACTED_ON) for patch in planned.plan
        )
        planned = replace(planned, plan=told, unknown=(_UNRECOGNIZED, *planned.unknown))
    return with_actions(planned, rules.actions)


def _with_each_cause_once(incident: Incident) -> Incident:
    """Return the incident with one entry for each cause, by its surest rule: the others' fixes are
    in the plan by now.
    """
    surest: dict[str, Cause] = {}
    for cause in incident.causes:
        surest.setdefault(cause.id, cause)
    return replace(incident, causes=tuple(surest.values()))


def replanned(incident: Incident, plan: tuple[Patch, ...]) -> Incident:
    """Return an incident with another plan, and the actions that follow from it."""
    return with_actions(replace(incident, plan=plan), default_rules().actions)


def assess_all(
    diagnosis: Diagnosis,
    rules: RuleSet,
    policy: Policy,
    tried: Tried = (),
    *,
    given: Mapping[str, Fact] | None = None,
    local_models: bool = False,
    model: str | None = None,
    behind: FailureModel | None = None,
) -> Diagnosis:
    """Explain every incident of a scan and plan for it; the arguments are those of ``assess``."""
    incidents = tuple(
        _with_each_cause_once(
            assess(
                i,
                rules,
                policy,
                tried,
                given=given,
                local_models=local_models,
                model=model,
                behind=behind,
            )
        )
        for i in diagnosis.incidents
    )
    starts = tuple(
        replace(start, budget=budget_of_start(start.facts)) for start in diagnosis.starts
    )
    steps = dict.fromkeys(
        step for incident in incidents if (step := failed_step(incident.facts)) is not None
    )
    if not local_models:
        steps |= dict.fromkeys(
            note for one in incidents if (note := note_on_model(one, model)) is not None
        )
    notes = (*diagnosis.notes, *(step for step in steps if step not in diagnosis.notes))
    return replace(diagnosis, incidents=incidents, notes=notes, starts=starts)


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
    """Diagnose a stream of lines.

    Args:
        lines: the lines, with gaps where lines were left out.
        source: the path as the user gave it.
        rules: the rules in force; None takes the shipped ones.
        policy: what the user permits; None takes the default.
        given: facts that the log leaves out.
        settings: settings in force that the log leaves out.
        model: a folder or hub name; the memory model then solves what the log's own numbers leave
            open.
    """
    rules = rules or default_rules()
    found = scan(lines, rules, source, given=settings, unrecognized=True)
    return assess_all(with_labels(found), rules, policy or Policy(), given=given, model=model)


def diagnose_stream(
    stream: IO[bytes],
    source: str = "",
    *,
    rules: RuleSet | None = None,
    policy: Policy | None = None,
    given: Mapping[str, Fact] | None = None,
    settings: Mapping[str, SettingInForce] | None = None,
    model: str | None = None,
    is_named: bool = True,
) -> Diagnosis:
    """Diagnose a stream of bytes of any size in constant memory; the other arguments are those of
    ``diagnose_lines``.

    An allocation snapshot of torch, told by its content, is read instead, within the limits of
    ``snapshots.pickled``. A damaged compressed stream is read as far as it goes, and a note says
    so. ``is_named`` says that the user named this input: of the files that were met in a folder, a
    pickle that is no snapshot is passed over.

    Raises:
        InputError: a pickle that is no snapshot, is damaged, or wants to run something; a snapshot
            beside which the given size of the device is too small; what is named as a pickle and is
            an archive, a page, damaged, or a text without a failure.
    """
    rules = rules or default_rules()
    head, whole = looked_into(stream, HEAD_BYTES)
    if not is_named and (is_other_pickle(head) or (is_named_pickle(source) and is_foreign(head))):
        return Diagnosis(source, notes=(PASSED_OVER,))
    if is_named:
        refuse_archive(head, source)
        refuse_foreign(head, source)
    if not head:
        return Diagnosis(source, notes=(EMPTY,))
    if is_pickle(head):
        from oomguard.scan.snapshot import read_snapshot

        return assess_all(
            read_snapshot(whole, source, rules, given),
            rules,
            policy or Policy(),
            given=given,
            model=model,
        )
    lines = joined(
        skim(whole, lambda: finder(rules.anchors)), begun_before(source), lines_behind(source)
    )
    diagnosis = diagnose_lines(
        lines, source, rules=rules, policy=policy, given=given, settings=settings, model=model
    )
    diagnosis = _without_told_before(_without_cut_end(diagnosis), rules)
    if is_named and is_named_pickle(source) and not diagnosis.incidents:
        raise no_failure_in_text(source)
    damage = damage_of(stream)
    if damage is None:
        return diagnosis
    return replace(diagnosis, notes=(*diagnosis.notes, damage))


def _without_cut_end(diagnosis: Diagnosis) -> Diagnosis:
    """Return a diagnosis without an engine's end whose traceback a rotation cut: the log behind has
    the exception.
    """
    cut = [
        one
        for one in diagnosis.incidents
        if one.message.startswith(ENGINE_ENDS) and "engine_error" not in one.facts
    ]
    if not cut or next(lines_behind(diagnosis.source), None) is None:
        return diagnosis
    return replace(diagnosis, incidents=tuple(one for one in diagnosis.incidents if one not in cut))


def _without_told_before(diagnosis: Diagnosis, rules: RuleSet) -> Diagnosis:
    """Return a diagnosis without the death of an engine whose cause a rotation left in the log
    before: that log tells it.
    """
    dead = [one for one in diagnosis.incidents if one.kind == "engine_dead"]
    if (
        not dead
        or len(dead) < len(diagnosis.incidents)
        or (before := log_before(diagnosis.source)) is None
    ):
        return diagnosis
    path, lines = before
    if not any(
        one.is_oom for one in scan(joined(lines, behind=lines_behind(str(path))), rules).incidents
    ):
        return diagnosis
    note = (
        f"the cause of the engine's death at line {dead[0].location.line} is in the log before: "
        f"{path.name}"
    )
    return replace(diagnosis, incidents=(), notes=(*diagnosis.notes, note))


def diagnose(
    source: str | Path | BaseException,
    *,
    policy: Policy | None = None,
    settings: Mapping[str, FactValue] | None = None,
    gpu_memory: int | str | None = None,
    model: str | None = None,
) -> Diagnosis:
    """Say why memory ran out and what to change.

    Args:
        source: a log's text, the path of a log or of an allocation snapshot, or an exception. A
            string is a path if a file of that name exists, or if it has no white space and is
            written as a path: ``logs/run``, ``error.log``.
        policy: what a patch may change and how far; the default permits what ``oomguard run`` does
            by itself.
        settings: settings in force that the source leaves out, by name, as ``--set`` takes them.
        gpu_memory: the device's total memory if the source leaves it out: bytes, or a size such as
            ``"24GiB"``.
        model: the model's folder, ``config.json`` or hub name; solves what the source's own numbers
            leave open.

    Returns:
        One incident for each failure, in the order of time; no incident for a source without a
        memory failure. A snapshot is summed up in ``snapshot``, whether an allocation failed in it
        or not.

    Raises:
        UsageError: the source is not one of the three, a path cannot be read (InputError), or a
            setting is unknown or cannot take its value (SettingError).
    """
    if not isinstance(source, (str, Path, BaseException)):
        expected = "a log's text, the path of a log or an exception"
        raise UsageError(
            f"diagnose takes {expected}, not {_described(source)}",
            hint="pass an open log's text: log.read()",
        )
    given = given_device(gpu_memory)
    in_force = given_settings(settings)
    if isinstance(source, Path) or (isinstance(source, str) and _names_a_file(source)):
        with open_log(str(source)) as stream:
            return diagnose_stream(
                stream, str(source), policy=policy, given=given, settings=in_force, model=model
            )
    if isinstance(source, str):
        lines = joined(read_lines(io.BytesIO(source.encode("utf-8", "surrogatepass"))))
        name = ""
    else:
        lines = exception_lines(source)
        name = type(source).__name__
    return diagnose_lines(lines, name, policy=policy, given=given, settings=in_force, model=model)


def given_device(gpu_memory: int | str | None) -> dict[str, Fact]:
    """Return the fact of a device whose total memory the user gives: bytes, or a text such as
    ``24GiB``.

    Raises SettingError for a size that no device has.
    """
    if gpu_memory is None:
        return {}
    size_bytes = parse_size(str(gpu_memory)).bytes
    if size_bytes <= 0:
        raise SettingError(
            f"the device's memory is {gpu_memory}", hint="give its total memory, for example 24GiB"
        )
    return {"device_total_bytes": Fact("device_total_bytes", size_bytes, "given")}


def given_settings(settings: Mapping[str, FactValue] | None) -> dict[str, SettingInForce]:
    """Return settings that the user says were in force, by canonical name; a text is read as
    ``--set`` reads it.

    Raises SettingError for an unknown setting or a value that it cannot take.
    """
    known = {
        setting(name).name: parse_value(name, str(value))
        for name, value in (settings or {}).items()
    }
    return {name: SettingInForce(name, value, None, "given") for name, value in known.items()}


def _described(value: object) -> str:
    import reprlib  # a bounded text, also of an endless object or one whose own repr fails

    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{reprlib.repr(value):.60} ({type(value).__name__})"


def _names_a_file(text: str) -> bool:
    """Return whether a text is a path: that of a file, or written as one, so that a mistyped name
    is an error.
    """
    if "\n" in text or len(text) >= _PATH_CHARS:
        return False
    if _IS_PATH.fullmatch(text):
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or a null byte
        return False
