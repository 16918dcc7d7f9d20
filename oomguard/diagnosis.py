"""Diagnose a failure: from any input to facts, ranked causes, budget and actions.

The last part runs the tests in rule files, which diagnose small logs.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from oomguard.core.errors import OomguardError, SettingError, UsageError
from oomguard.core.facts import REGISTRY, Fact, FactValue, number_of, parse_size
from oomguard.core.incident import EMPTY, Cause, Diagnosis, Effect, Incident, Patch, SettingInForce
from oomguard.core.settings import SETTINGS, parse_value, setting
from oomguard.estimate.budget import budget_of_start
from oomguard.estimate.printed_budget import derive
from oomguard.remedy.actions import with_actions
from oomguard.remedy.from_log import SOLVERS
from oomguard.remedy.planner import Tried, plan
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import FailureModel
from oomguard.rules.rule_files import (
    ENGINE_ENDS,
    Rule,
    RuleSet,
    effects_of,
    explain,
    find_missing,
    load_rules,
    matches,
)
from oomguard.rules.signature import Quotation, Signature
from oomguard.scan.anchors import finder, skim
from oomguard.scan.incidents import with_labels
from oomguard.scan.inputs import (
    NON_LOG_HEAD_BYTES,
    is_foreign,
    is_named_pickle,
    is_other_pickle,
    is_pickle,
    no_failure_in_text,
    refuse_archive,
    refuse_foreign,
)
from oomguard.scan.lines import begun_before, join_pieces, lines_behind, log_before
from oomguard.scan.scan import scan
from oomguard.scan.source import Gap, Line, damage_of, open_log, peek, read_lines

if TYPE_CHECKING:
    from oomguard.remedy.failed_call import CallModel

# A diagnosis reads the files of the user's model, or else of the folder in the log.

# The estimator covers this engine's models.
_READ: Final = "vllm"
_CONFIG: Final = "config.json"


def named_folder(incident: Incident) -> str | None:
    """Return the local model folder that the log names, or None; never query the hub."""
    named = _named(incident)
    try:
        if named is not None and Path(named).is_absolute() and (Path(named) / _CONFIG).is_file():
            return named
    except (OSError, ValueError):
        # An impossible name, or another user's folder.
        return None
    return None


def note_on_model(incident: Incident, model: str | None) -> str | None:
    """Return a note on which model oomguard read.

    It names the log's folder, or the user's model if the log names another one. Returns None if
    neither applies.
    """
    named = _named(incident)
    if model is None:
        if named_folder(incident) is None:
            return None
        return f"oomguard read the model from the folder that the log names: {named}"
    if named is None or _last(named) == _last(model):
        return None
    return f"oomguard read the model that you gave, {model}, but the log names another one, {named}"


def _named(incident: Incident) -> str | None:
    fact = incident.facts.get("model")
    if fact is not None and incident.framework == _READ:
        return str(fact.value)
    return None


def _last(name: str) -> str:
    """Return the last part of a model's name or folder, as the hub and its cache write it."""
    return (
        name.rstrip("/").removesuffix(f"/{_CONFIG}").rpartition("/")[2].rpartition("--")[2].lower()
    )


# The requests of the failed step, so that a user can find the one that ended the engine.

_REQUEST: Final = r"([^\s,:{}]+): (\d+)"
_MOST_NAMED: Final = 5


def step_requests(facts: Mapping[str, Fact]) -> dict[str, int]:
    """Return the requests of the failed step with their tokens, the largest first.

    Returns an empty dict if none were printed. With very many it reads only the first ones and
    omits the last of these, which may be cut.
    """
    printed = facts.get("step_requests")
    if printed is not None:
        rows = re.findall(_REQUEST, str(printed.value))
    else:
        rows = []
    found = {name: int(tokens) for name, tokens in (rows if "step_tokens" in facts else rows[:-1])}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def failed_step(facts: Mapping[str, Fact]) -> str | None:
    """Describe the requests of the failed step, or return None if unknown.

    A request with far more tokens than the others was in its prefill; one token each is decoding.
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


# The size of this machine's GPUs, if an engine failed here without printing it.

# NVML includes memory that the driver reserves and torch does not see: 0.6 % of an H100, 2 % of an
# L4.
_DRIVERS_RATIO: Final = 0.02
_TOTAL: Final = "device_total_bytes"


def own_device_total(incident: Incident) -> Mapping[str, Fact]:
    """Return the total of this machine's GPUs as a fact, or nothing.

    It is empty if the log has the total, if it is unknown, or if the GPUs differ. vLLM prints it
    only for some failures. "No available memory for the cache blocks" has none, though the solution
    for the utilization depends on it. NVML's total is not the size of a part of a GPU (MIG).

    Args:
        incident: the failure, on this machine just now.
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
    "No signature matches its wording, so oomguard changes nothing because of it. To add "
    "a signature: --rules DIR."
)
_PATH_CHARS = 1024
# Words without white space that have a path separator, or the suffix of a log or snapshot.
_IS_PATH: Final = (
    r"[\w.~:@%+=,-]*[/\\][\w.~:@%+=,/\\-]*"
    r"|[\w.~:@%+=,-]+\.(?:log|txt|out|err|jsonl?|pickle|pkl)(?:\.\d{1,4})?(?:\.(?:gz|xz|bz2|zst))?"
)
PASSED_OVER = "skipped: a pickle by name or content, but not an allocation snapshot"
_NOT_ACTED_ON = "its wording is new, so oomguard reports it but changes nothing"


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
    memory_model: FailureModel | None = None,
) -> Incident:
    """Explain one observed incident and plan for it.

    Args:
        incident: the observed incident.
        rules: the rules to apply.
        policy: what the user permits.
        tried: settings and values that already failed, not to propose again.
        given: the user's facts. Printed facts override them, and they override this machine's GPU.
        local_models: whether it failed on this machine just now. The estimator may then read the
            log's folder, and this machine's GPU size counts if the log has none.
        model: the user's folder or hub name for the estimator; None uses the log's folder if it is
            here.
        memory_model: the model of the failed call or start, if the caller has it; None otherwise.
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
        from oomguard.estimate.start.failed_start import with_exact_need, with_exact_weights
        from oomguard.remedy.from_estimate import failure_model

        derived = with_exact_need(with_exact_weights(derived, model), model)
        memory_model = memory_model or failure_model(derived, model)
    planned = plan(explain(derived, rules), rules, policy, tried, memory_model)
    planned = replace(
        planned,
        missing=find_missing(
            planned, rules.missing, is_live=local_models or memory_model is not None
        ),
    )
    if planned.certainty_ratio is not None:
        patches = []
        for patch in planned.plan:
            patches.append(replace(patch, blocked_by=patch.blocked_by or _NOT_ACTED_ON))
        planned = replace(planned, plan=tuple(patches), unknown=(_UNRECOGNIZED, *planned.unknown))
    return with_actions(planned, rules.actions)


def _with_each_cause_once(incident: Incident) -> Incident:
    """Keep one entry per cause, from its most confident rule; the plan has all fixes already."""
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
    memory_model: FailureModel | None = None,
) -> Diagnosis:
    """Explain every incident of a scan and plan for it.

    The arguments are the same as for ``assess``.
    """
    incidents = []
    for observed in diagnosis.incidents:
        assessed = assess(
            observed,
            rules,
            policy,
            tried,
            given=given,
            local_models=local_models,
            model=model,
            memory_model=memory_model,
        )
        incidents.append(_with_each_cause_once(assessed))
    starts = []
    for start in diagnosis.starts:
        starts.append(replace(start, budget=budget_of_start(start.facts)))
    notes = list(diagnosis.notes)
    notes += [failed_step(incident.facts) or "" for incident in incidents]
    # On this machine the model is the user's own, so there is nothing to say about it.
    if not local_models:
        notes += [note_on_model(incident, model) or "" for incident in incidents]
    return replace(
        diagnosis,
        incidents=tuple(incidents),
        notes=tuple(dict.fromkeys(filter(None, notes))),
        starts=tuple(starts),
    )


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
        lines: the lines, with markers for omitted lines.
        source: the path as the user gave it.
        rules: the rules; None uses the shipped ones.
        policy: what the user permits; None uses the default.
        given: facts that the log does not have; None for none.
        settings: effective settings that the log does not have; None for none.
        model: a folder or hub name, with which the estimator fills in missing numbers; None for
            none.
    """
    rules = rules or default_rules()
    command = ShownCommand()
    found = scan(command.watch(lines), rules, source, given=settings, unrecognized=True)
    found = replace(found, command=command.text)
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
    """Diagnose a stream of bytes of any size in constant memory.

    oomguard recognizes a torch allocation snapshot by its content and reads it within the limits of
    ``snapshot``. It reads a damaged compressed stream as far as possible and adds a note.
    ``is_named`` means that the user named this input; without it a pickle that is not a snapshot is
    skipped. The other arguments are the same as for ``diagnose_lines``.

    Raises:
        InputError: a pickle is damaged, unsafe or not a snapshot; the given device is smaller than
            a snapshot; or a file named like a pickle has other content without a failure.
    """
    rules = rules or default_rules()
    head, whole = peek(stream, NON_LOG_HEAD_BYTES)
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
    lines = join_pieces(
        skim(whole, lambda: finder(rules.anchors)), begun_before(source), lines_behind(source)
    )
    diagnosis = diagnose_lines(
        lines, source, rules=rules, policy=policy, given=given, settings=settings, model=model
    )
    diagnosis = _without_earlier_cause(_without_cut_end(diagnosis), rules)
    if is_named and is_named_pickle(source) and not diagnosis.incidents:
        raise no_failure_in_text(source)
    damage = damage_of(stream)
    if damage is None:
        return diagnosis
    return replace(diagnosis, notes=(*diagnosis.notes, damage))


def _without_cut_end(diagnosis: Diagnosis) -> Diagnosis:
    """Drop an engine's end whose traceback a log rotation cut; the next log has the exception."""
    whole = []
    for one in diagnosis.incidents:
        is_cut = one.message.startswith(ENGINE_ENDS) and "engine_error" not in one.facts
        if not is_cut:
            whole.append(one)
    is_any_cut = len(whole) < len(diagnosis.incidents)
    if is_any_cut and next(lines_behind(diagnosis.source), None) is not None:
        return replace(diagnosis, incidents=tuple(whole))
    return diagnosis


def _without_earlier_cause(diagnosis: Diagnosis, rules: RuleSet) -> Diagnosis:
    """Drop an engine's death whose cause is in the log before the rotation."""
    dead = []
    for one in diagnosis.incidents:
        if one.kind == "engine_dead":
            dead.append(one)
    if (
        not dead
        or len(dead) < len(diagnosis.incidents)
        or (before := log_before(diagnosis.source)) is None
    ):
        return diagnosis
    path, lines = before
    earlier = scan(join_pieces(lines, behind=lines_behind(str(path))), rules)
    if not any(one.is_oom for one in earlier.incidents):
        return diagnosis
    note = (
        f"the cause of the engine's death at line {dead[0].location.line} is in the "
        f"previous log: {path.name}"
    )
    return replace(diagnosis, incidents=(), notes=(*diagnosis.notes, note))


def diagnose(
    source: str | Path | BaseException | None = None,
    *,
    text: str | None = None,
    path: str | Path | None = None,
    policy: Policy | None = None,
    settings: Mapping[str, FactValue] | None = None,
    gpu_memory: int | str | None = None,
    model: str | None = None,
) -> Diagnosis:
    """Explain why memory ran out and what to change.

        diagnosis = oomguard.diagnose(path="error.log")
        print(diagnosis)
        for incident in diagnosis.incidents: ...

    Args:
        source: an exception, a log's text, or the path of a log or an allocation snapshot. A string
            is a path if a file has that name, or if it has no white space and looks like a path:
            ``logs/run``, ``error.log``. None if ``text`` or ``path`` is given.
        text: a log's text. None: see ``source``.
        path: the path of a log or an allocation snapshot. None: see ``source``.
        policy: what a patch may change; None permits the automatic changes of ``oomguard run``.
        settings: effective settings that the source does not have, by name, as in ``--set``.
        gpu_memory: the device's total memory if the source does not have it: bytes, or a size such
            as ``"24GiB"``; None if unknown.
        model: the model's folder, ``config.json`` or hub name, to fill in missing numbers; None for
            none.

    Returns:
        One incident per failure, in order of time; none if no memory failure is found. For a
        snapshot, ``snapshot`` has its summary, even without a failed allocation.

    Raises:
        UsageError: the source has another type, not exactly one source is given, a path is
            unreadable (InputError), or a setting is unknown or invalid (SettingError).
    """
    file, log, error = _source_of(source, text, path)
    given = device_fact(gpu_memory)
    in_force = user_settings(settings)
    if file is not None:
        with open_log(file) as stream:
            return diagnose_stream(
                stream, file, policy=policy, given=given, settings=in_force, model=model
            )
    lines: Iterable[Line | Gap]
    if error is not None:
        from oomguard.scan.exceptions import exception_lines

        lines = exception_lines(error)
        name = type(error).__name__
    else:
        lines = join_pieces(read_lines(io.BytesIO(log.encode("utf-8", "surrogatepass"))))
        name = ""
    return diagnose_lines(lines, name, policy=policy, given=given, settings=in_force, model=model)


_SOURCES: Final = "a log's text, the path of a log or an exception"


def _source_of(
    source: object, text: object, path: object
) -> tuple[str | None, str, BaseException | None]:
    """Return the path, the text and the exception of a source; only one of them is set.

    Raises:
        UsageError: the source has another type, or not exactly one is given.
    """
    given = []
    for one in (source, text, path):
        if one is not None:
            given.append(one)
    if len(given) > 1 or (source is None and not given):
        raise UsageError(
            f"diagnose takes {_SOURCES}, and exactly one of them, not {len(given)}",
            hint='for example: oomguard.diagnose(path="error.log")',
        )
    if text is not None:
        _check_type(text, str, "text", "a log's text")
        return None, str(text), None
    if path is not None:
        _check_type(path, (str, Path), "path", "the path of a log")
        return str(path), "", None
    if isinstance(source, BaseException):
        return None, "", source
    _check_type(source, (str, Path), "", _SOURCES)
    if isinstance(source, Path) or _names_a_file(str(source)):
        return str(source), "", None
    return None, str(source), None


def _check_type(
    value: object, types: type | tuple[type, ...], argument: str, expected: str
) -> None:
    if not isinstance(value, types):
        for_argument = f" for {argument}" if argument else ""
        raise UsageError(
            f"diagnose takes {expected}{for_argument}, not {_described(value)}",
            hint="pass the text of an open log: log.read()",
        )


def device_fact(gpu_memory: int | str | None) -> dict[str, Fact]:
    """Return the fact for the user's device size: bytes, or a text such as ``24GiB``.

    Raises:
        SettingError: the size is impossible.
    """
    if gpu_memory is None:
        return {}
    size_bytes = parse_size(str(gpu_memory)).bytes
    if size_bytes <= 0:
        raise SettingError(
            f"the device's memory must be a size above zero, got {gpu_memory}",
            hint="give its total memory, for example 24GiB",
        )
    return {"device_total_bytes": Fact("device_total_bytes", size_bytes, "given")}


def user_settings(settings: Mapping[str, FactValue] | None) -> dict[str, SettingInForce]:
    """Return the user's effective settings by canonical name; texts are parsed like ``--set``.

    Raises:
        SettingError: a setting is unknown or its value is invalid.
    """
    known = {}
    for name, value in (settings or {}).items():
        known[setting(name).name] = parse_value(name, str(value))
    return {name: SettingInForce(name, value, None, "given") for name, value in known.items()}


def _described(value: object) -> str:
    # A bounded text, even for endless objects or a failing repr.
    import reprlib

    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{reprlib.repr(value):.60} ({type(value).__name__})"


def _names_a_file(text: str) -> bool:
    """Return whether a text is a path: an existing file, or written like one.

    A mistyped path is then an error.
    """
    if "\n" in text or len(text) >= _PATH_CHARS:
        return False
    if re.fullmatch(_IS_PATH, text):
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        # Too long for a name, or a null byte.
        return False


# Find the command that started the engine, if the log shows it, and change a flag of it.


# A shell's prompt, or the mark of `set -x`, before the command.
_PROMPT: Final = re.compile(r"(?:\S{0,60}[$#] |\+ )?(?=[\w./~])")
_FLAG: Final = " --"
_MOST_CHARS: Final = 4000


class ShownCommand:
    """Watch the lines of a log for the last command that starts an engine.

    Attributes:
        text: the command; "" if no line shows one.
    """

    def __init__(self) -> None:
        self.text = ""

    def watch(self, lines: Iterable[Line | Gap]) -> Iterator[Line | Gap]:
        """Yield the lines as they are."""
        for line in lines:
            if isinstance(line, Line) and _FLAG in line.text:
                self._read(line.text)
            yield line

    def _read(self, text: str) -> None:
        prompt = _PROMPT.match(text)
        if prompt is None or len(text) > _MOST_CHARS:
            return
        # This import loads the tables of all engines.
        from oomguard.engines.registry import launchers

        command = text[prompt.end() :].strip()
        words = _words(command)
        if words and any(engine.is_own_command(words) for engine in launchers()):
            self.text = command


def changed_command(
    command: str, settings: Mapping[str, FactValue], engine: str, version: str | None
) -> str | None:
    """Return a command with other values of some settings; None if it cannot be changed.

    Args:
        command: a line for a shell.
        settings: the new values by canonical name.
        engine: the engine's name.
        version: its version; None if unknown.
    """
    from oomguard.engines.command import Launch, with_flag

    words = _words(command)
    if not words:
        return None
    launch = Launch(words, engine_version=version)
    try:
        for name, value in settings.items():
            launch = with_flag(launch, name, value, engine)
    except KeyError:
        return None
    return shlex.join(launch.argv)


def _words(command: str) -> tuple[str, ...]:
    """Return a command's words; empty for a line that a shell would read as more than one."""
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        return ()
    if any(set(word) & set("|;&<>") for word in words) or command.endswith("\\"):
        return ()
    return words


# Run the tests in rule files, for ``oomguard rules test`` and pytest. A problem is one line of text
# with the file and the mistake; an empty list is a pass.

# The numbers of a failed call that a rule's test may set besides facts.
_CALL_FIGURES: Final = frozenset({"row_bytes", "seen_row_bytes", "attempts_left"})


def problems(rules: RuleSet) -> list[str]:
    """Return every problem of every signature, rule and quotation."""
    found: list[str] = []
    for signature in rules.signatures:
        found += [f"{signature.path}: {text}" for text in _signature_problems(signature, rules)]
    for rule in rules.rules:
        found += [f"{rule.path}: {text}" for text in _rule_problems(rule, rules)]
    for quotation in rules.quotations:
        for text in _quotation_problems(quotation, rules):
            found.append(f"quotation {quotation.name!r}: {text}")
    return found


def _lines(log: str) -> Iterator[Line]:
    return (Line(number, 0, text) for number, text in enumerate(log.splitlines(), 1))


def _signature_problems(signature: Signature, rules: RuleSet) -> Iterator[str]:
    alone = RuleSet((signature,), ())
    ends = []
    for other in rules.signatures:
        if other.kind == "engine_dead":
            ends.append(other)
    hit: set[str] = set()
    negatives = 0
    for i, test in enumerate(signature.tests):
        text = " ".join(test["log"].split())
        matched = []
        for w in signature.wordings:
            if w.anchor in text and w.pattern.search(test["log"]):
                matched.append(w)
        hit |= {w.pattern.pattern for w in matched}
        if test.get("expect_no_match"):
            negatives += 1
            if matched:
                yield f"test[{i}] matches, but should not"
            continue
        if not matched:
            yield f"test[{i}] does not match"
            continue
        probe = test["log"]
        # Only a following incident shows the facts of a context line.
        if signature.kind is None:
            probe += "\nRuntimeError: Engine core initialization failed. See root cause above."
            alone = RuleSet((signature, *ends), ())
        incidents = scan(_lines(probe), alone).incidents
        wanted = (
            "none" if any(wording.ends == "told" for wording in matched) else "one"
        )  # a later death does not count
        if len(incidents) != (wanted == "one"):
            yield f"test[{i}] gives {len(incidents)} incidents, expected {wanted}"
            continue
        for name, value in test.get("expect", {}).items():
            fact = incidents[0].facts.get(name)
            if fact is None or not _equal(fact.value, value):
                yield (
                    f"test[{i}]: {name} is {fact.value if fact else 'missing'}, expected {value}"
                )
        owners = {i.kind for i in scan(_lines(test["log"]), rules).incidents} - {None}
        own = {signature.kind, *signature.becomes.values()}
        own |= {wording.kind for wording in matched}
        if signature.kind is not None and not (len(owners) == 1 and owners <= own):
            yield (
                f"test[{i}] is claimed by "
                f"{', '.join(sorted(map(str, owners))) or 'no signature'}, expected only "
                f"{signature.kind}"
            )
    if len(hit) < len({w.pattern.pattern for w in signature.wordings}):
        yield "a wording has no test"
    if not negatives:
        yield "no near miss: add one test with expect_no_match = true"


def _quotation_problems(quotation: Quotation, rules: RuleSet) -> Iterator[str]:
    alone = RuleSet(rules.signatures, (), (quotation,))
    vetoed = 0
    for i, text in enumerate(quotation.quoted):
        if scan(_lines(text), alone).incidents:
            yield f"quoted[{i}] is reported anyway"
        else:
            vetoed += bool(scan(_lines(text), RuleSet(rules.signatures, ())).incidents)
    if not vetoed:
        yield "no quoted text that would be reported without it"
    for i, text in enumerate(quotation.real):
        if not scan(_lines(text), rules).incidents:
            yield f"real[{i}] is not reported"


def _equal(found: Any, expected: Any) -> bool:
    if (
        not isinstance(expected, str)
        and not isinstance(found, str)
        and float in {type(expected), type(found)}
    ):
        return abs(float(found) - float(expected)) <= 1e-6 * max(1.0, abs(float(expected)))
    return bool(found == expected)


def incident_from(kind: str, values: Mapping[str, Any]) -> Incident:
    """Build an incident from the facts of a rule's test; ``…_set`` facts also become settings."""
    facts = {name: Fact(name, value, "given") for name, value in values.items()}
    settings = {}
    for name, value in values.items():
        setting = name.removesuffix("_set")
        if name.endswith("_set") and setting in SETTINGS:
            settings[setting] = SettingInForce(setting, values.get(setting), value, "given")
    return Incident(
        kind=kind,
        message="",
        facts=facts,
        settings=settings,
        phase=str(values.get("phase", "unknown")),
        framework=str(values.get("framework", "unknown")),
    )


def model_from(test: Mapping[str, Any]) -> CallModel | None:
    """Return the failed call of a rule's test, or None without ``call``.

    Its rows are the test's ``batch_size``.

    Raises:
        SettingError: a number is impossible.
    """
    if "call" not in test:
        return None
    # Only a rule's test has a failed call; a log has none.
    from oomguard.remedy.failed_call import CallModel

    figures = dict(test["call"])
    facts = test["facts"]
    rows = facts.get("batch_size", 1)
    base = facts.get("baseline_bytes")
    numbers = (rows, *figures.values(), *(() if base is None else (base,)))
    are_possible = all(type(number) is int and 0 < number < 2**63 for number in numbers)
    if not are_possible or not set(figures) <= _CALL_FIGURES:
        raise SettingError(
            "call: numbers must be above zero",
            hint=f"one or more of {', '.join(sorted(_CALL_FIGURES))}",
        )
    return CallModel(rows, base, **figures)


# one check after another
def _rule_problems(rule: Rule, rules: RuleSet) -> Iterator[str]:
    covered: set[str] = set()
    negatives = 0
    for i, test in enumerate(rule.tests):
        strangers = []
        for name in test["facts"]:
            if name not in REGISTRY:
                strangers.append(name)
        if strangers:
            yield f"test[{i}]: unknown facts: {', '.join(strangers)}"
            continue
        try:
            observed = incident_from(test["kind"], test["facts"])
            incident = assess(observed, rules, Policy(), memory_model=model_from(test))
        except OomguardError as error:
            yield f"test[{i}]: {error}"
            continue
        if test.get("expect_no_match"):
            negatives += 1
            if matches(rule, incident):
                yield f"test[{i}] matches, but should not"
            continue
        cause = None
        for c in incident.causes:
            if c.rule == rule.code:
                cause = c
                break
        if cause is None:
            yield f"test[{i}] does not match"
            continue
        expect = test.get("expect", {})
        if expect.get("cause", cause.id) != cause.id:
            yield f"test[{i}]: the cause is {cause.id}, expected {expect['cause']}"
        if expect.get("text", "") not in cause.explanation:
            yield f"test[{i}]: the text is {cause.explanation!r}"
        planned = {p.setting: (p.new, p.reason) for p in incident.plan}
        planned |= {a.setting: (a.new, a.why_not) for a in incident.alternatives}
        for row in [*expect.get("plan", []), *expect.get("alternatives", [])]:
            covered.add(row["setting"])
            value, reason = planned.get(row["setting"], ("absent", ""))
            if row["to"] == "unsolved":
                wanted = None
            else:
                wanted = row["to"]
            if not (value is wanted if wanted is None or value is None else _equal(value, wanted)):
                yield f"test[{i}]: {row['setting']} is {value}, expected {wanted} ({reason})"
            if row.get("reason", "") not in reason:
                yield f"test[{i}]: the reason for {row['setting']} is {reason!r}"
    for fix in rule.fixes:
        if fix.setting not in SETTINGS:
            yield f"no setting named {fix.setting}"
        elif fix.effect not in effects_of(SETTINGS[fix.setting], None):
            yield f"{fix.setting} is never {fix.effect}"
        if fix.solve is not None and fix.solve not in SOLVERS:
            yield f"no solver named {fix.solve}"
        if fix.effect == Effect.CHANGES_OUTPUTS and not fix.tradeoff:
            yield f"{fix.setting} changes outputs but has no tradeoff"
        if fix.setting not in covered and not fix.lever:
            yield f"the fix {fix.setting} has no test"
    if not negatives:
        yield "no negative test: add one with expect_no_match = true"
    if not rule.references:
        yield "no reference"
