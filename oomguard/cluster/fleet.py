"""Summarize failures over many logs: which process wrote each, and what failed most."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from oomguard.core.errors import InputError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Diagnosis, Incident, Patch
from oomguard.core.presentable import drawn, masked
from oomguard.core.records import Record
from oomguard.remedy.policy import is_refused
from oomguard.report.history import moment
from oomguard.report.json import SCHEMA, json_line, plain_value
from oomguard.scan.inputs import Writer, is_url, writer_of
from oomguard.scan.source import HEAD_BYTES, decompress, format_of

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.cli.inputs import RenderOptions
    from oomguard.core.incident import Diagnosis
    from oomguard.scan.inputs import Input

# Extract from one incident what a summary counts: cause, model, setting, version, time, fix.

# Read when a line was printed. A time without a year or a zone is completed from the file's own
# time.

# A full timestamp, at the start of a line or inside a collector's object: CRI, Docker, kubectl
# --timestamps, journald, Python's logging, SGLang.
_FULL: Final = re.compile(
    r"(?<!\d)(?P<day>\d{4}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?P<part>[.,]\d{1,9})?"
    r"\s?(?P<zone>Z|[+-]\d\d:?\d\d)?(?!\d)"
)
# journalctl -o json and -o export: microseconds since 1970 (systemd.journal-fields(7)).
_JOURNALD: Final = re.compile(
    r"__REALTIME_TIMESTAMP(?:\"\s*:\s*\"?|=)(?P<microseconds>\d{15,17})(?!\d)"
)
# Timestamps without a year: vLLM's logger, glog (NCCL, Ray's raylet before 2.0), syslog.
_SHORT: Final = (
    re.compile(
        r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):? "
        r"(?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)"
    ),
    re.compile(r"(?:^|[\s\[])[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)\.\d+"),
    re.compile(r"(?:^|\s)(?P<name>[A-Z][a-z]{2}) (?P<day>[ \d]\d) (?P<time>\d\d:\d\d:\d\d) \S"),
)
_MONTHS: Final = (
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
)
# The clock of a log may be ahead of the file's clock by this much. A timestamp without a year that
# is later than that is from last year.
_AHEAD_S: Final = 36 * 3600


def moment_of(line: str, modified_at: float | None) -> float | None:
    """Return when a line was printed, in Unix seconds, or None without a readable timestamp.

    A timestamp without a zone is in local time. One without a year gets the latest year that is not
    after ``modified_at``.

    Args:
        line: the line.
        modified_at: when the file last changed, in Unix seconds. None: ignore timestamps without a
            year.
    """
    if journald := _JOURNALD.search(line):
        return int(journald["microseconds"]) / 1e6
    if full := _FULL.search(line):
        fraction = (full["part"] or "").replace(",", ".")[:7]
        return _unix_s(f"{full['day']}T{full['time']}{fraction}{full['zone'] or ''}")
    for pattern in _SHORT:
        if modified_at is not None and (found := pattern.search(line)):
            return _of_year(found.groupdict(), modified_at)
    return None


def last_moment(lines: Iterable[str], modified_at: float | None) -> float | None:
    """Return the timestamp of the last line that has one, or None."""
    for line in reversed(list(lines)):
        at = moment_of(line, modified_at)
        if at is not None:
            return at
    return None


def _of_year(stamp: Mapping[str, str | None], modified_at: float) -> float | None:
    name = stamp.get("name")
    if name is not None and name not in _MONTHS:
        return None
    if name:
        month = _MONTHS.index(name) + 1
    else:
        month = int(stamp["month"] or 0)
    year = datetime.datetime.fromtimestamp(modified_at).astimezone().year
    for candidate in (year + 1, year, year - 1):
        at = _unix_s(f"{candidate}-{month:02d}-{int(stamp['day'] or 0):02d}T{stamp['time']}")
        if at is not None and at <= modified_at + _AHEAD_S:
            return at
    return None


def _unix_s(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (
        ValueError,
        OverflowError,
        OSError,
    ):
        # An impossible date or year.
        return None


# Read when a collector received a line, from the JSON object that it made (Loki, Google Cloud,
# Vector, CloudWatch, fluent-bit, Docker). The object is one line, or an element of an array over
# several lines. A timestamp inside the message itself, such as vLLM's, is the engine's.

# The time fields of collectors and loggers, the most reliable first.
_FIELDS: Final = (
    "__REALTIME_TIMESTAMP",
    "@timestamp",
    "timestamp",
    "_time",
    "time",
    "ts",
    "date",
    "asctime",
)
_MEMBER: Final = re.compile(
    r'(?P<indent>\s+)"(?P<name>[\w@]+)"\s*:\s*(?P<value>"[^"]*"|\d+(?:\.\d+)?)\s*,?\s*$'
)
_INDENT: Final = re.compile(r'(?P<indent>\s+)"[\w@]+"\s*:')
# Times since 1970 in nanoseconds (Loki), microseconds (journald), milliseconds (CloudWatch) and
# seconds differ in size.
_SCALES: Final = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (5e8, 1.0))


def time_of_object(line: str) -> float | None:
    """Return the time in a line's JSON object, in Unix seconds, or None without one."""
    try:
        if line.lstrip().startswith("{"):
            record = json.loads(line)
        else:
            record = None
    except (ValueError, RecursionError):
        # Any log line may begin with a brace.
        return None
    if not isinstance(record, dict):
        return None
    # The object's own fields come before those of an object inside it.
    for part in (record, *record.values()):
        if isinstance(part, dict) and (at := _time_in(part)) is not None:
            return at
    return None


def time_of_multiline_object(lines: Sequence[str], at: int) -> float | None:
    """Return the time in an object written over several lines, in Unix seconds.

    None if ``lines[at]`` is not a field of such an object, or the object has no time.
    """
    own = _INDENT.match(lines[at])
    if own is None:
        return None
    indent = own["indent"]
    fields: dict[str, Any] = {}
    for some in (reversed(lines[:at]), lines[at + 1 :]):
        fields |= _members(some, indent)
    return _time_in(fields)


def _members(lines: Iterable[str], indent: str) -> dict[str, Any]:
    """Return the plain fields with this indent, up to the end of the object."""
    found: dict[str, Any] = {}
    for line in lines:
        if not line.startswith(indent):
            break
        member = _MEMBER.match(line)
        if member is not None and member["indent"] == indent:
            if "\\" not in member["value"]:
                found[member["name"]] = json.loads(member["value"])
            else:
                found[member["name"]] = None
    return found


def _time_in(record: Mapping[str, Any]) -> float | None:
    for name in _FIELDS:
        at = _collected_unix_s(record.get(name))
        if at is not None:
            return at
    return None


def _collected_unix_s(value: Any) -> float | None:
    try:
        if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
            return datetime.datetime.fromisoformat(value.strip().replace(",", ".")).timestamp()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            number = float(value)
        else:
            number = 0.0
    except (ValueError, OverflowError, OSError):
        return None
    for least, scale in _SCALES:
        if least <= number < least * 1e3:
            return number / scale
    return None


# Search this many bytes before a failure for a timestamp, because traceback lines have none.
_BEFORE_BYTES: Final = 64 << 10
# The evidence lacks the other fields of the collector's object, so the line is read again.
_LINE_BYTES: Final = 64 << 10
# ray/_private/worker.py, print_to_stdstream, Ray 2.60: Ray's log monitor reads the job from this
# text.
_RAY_JOB: Final = re.compile(rb":job_id:(?!f+\s)(?P<job>[0-9a-f]{8,})\s")
# The line is shorter than this, and the log may be large.
_JOB_BYTES: Final = 80
# The process of a line that srun labelled.
_LABELLED: Final = re.compile(r"rank (\d+)(?:$|: )")
Clock = Literal["line", "file"]


@dataclass(frozen=True, slots=True, repr=False)
class SettingChange(Record):
    """Describe one setting of a patch: old value, new value and flag.

    ``refused_as`` is the reason why the user does not permit it, or None.
    """

    setting: str
    old: FactValue | None
    new: FactValue
    as_flag: str | None
    effect: str
    refused_as: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class IncidentSummary(Record):
    """Summarize one incident of one input.

    Attributes:
        at: when it was printed, in Unix seconds, or None if unknown.
        clock: whether ``at`` comes from the line or from the file's last change.
        changes: the patches that would have been applied first, together. Empty if none was solved.
            A refused patch is listed only if the user refused all solved patches.
    """

    source: str
    line: int | None
    process: str | None
    writer: Writer
    kind: str
    is_oom: bool
    cause: str
    title: str
    framework: str
    version: str | None
    model: str | None
    at: float | None
    clock: Clock | None
    changes: tuple[SettingChange, ...]
    message: str = ""
    told_again: tuple[tuple[str, int | None], ...] = ()

    @property
    def refused(self) -> tuple[str, str] | None:
        """The first change that the user does not permit, with the reason, or None."""
        for change in self.changes:
            if change.refused_as is not None:
                return change.setting, change.refused_as
        return None


def findings_of(diagnosis: Diagnosis, modified_at: float | None) -> tuple[IncidentSummary, ...]:
    """Return the summaries of the incidents in one input.

    ``modified_at`` is when the input was last written, in Unix seconds, or None.
    """
    if not diagnosis.incidents:
        return ()
    writer = writer_of(diagnosis.source)
    if writer.layout == "ray" and writer.job is None and writer.pid is not None:
        writer = replace(writer, job=_job_of_worker(diagnosis.source))
    findings = []
    for incident in diagnosis.incidents:
        findings.append(_finding(diagnosis.source, writer, incident, modified_at))
    return tuple(findings)


def modified_at(source: str) -> float | None:
    """Return when an input was last written, in Unix seconds, or None if unknown."""
    if is_url(source):
        from oomguard.scan.inputs import modified_at as object_modified_at

        return object_modified_at(source)
    try:
        if source != "-":
            return Path(source).stat().st_mtime
        return None
    except (OSError, ValueError):
        # The file may have been removed since it was read. Its failures then have no time.
        return None


def _finding(
    source: str, writer: Writer, incident: Incident, modified_at: float | None
) -> IncidentSummary:
    at = _printed_at(source, incident, modified_at)
    clock: Clock | None = None
    if at is not None:
        clock = "line"
    elif modified_at is not None:
        clock = "file"
    if incident.causes:
        cause = incident.causes[0]
    else:
        cause = None
    model = incident.facts.get("model")
    rank = _LABELLED.match(incident.location.process or "")
    if rank is not None and writer.rank is None:
        writer = replace(writer, rank=rank[1])
    return IncidentSummary(
        source,
        incident.location.line,
        incident.location.process,
        writer,
        incident.kind,
        incident.is_oom,
        cause.id if cause else "unknown",
        cause.title if cause else "",
        incident.framework,
        incident.framework_version,
        str(model.value) if model else None,
        modified_at if at is None else at,
        clock,
        tuple(map(_change, _first_patches(incident))),
        incident.message,
    )


def _job_of_worker(source: str) -> str | None:
    """Return the job of a Ray worker from the first line of its log, or None."""
    with (
        contextlib.suppress(OSError, ValueError, InputError),
        contextlib.closing(_opened(source)) as stream,
    ):
        found = _RAY_JOB.match(decompress(stream, source, None).read(_JOB_BYTES))
        if found:
            return found["job"].decode()
        return None
    return None


def _first_patches(incident: Incident) -> tuple[Patch, ...]:
    """Return the first solved patch with its group; a patch that the user refused comes last."""
    refused: tuple[Patch, ...] = ()
    for patch in incident.plan:
        group = _group_of(patch, incident.plan)
        if None in [other.new for other in group]:
            continue
        if not any(map(is_refused, group)):
            return group
        refused = refused or group
    return refused


def _group_of(patch: Patch, plan: Sequence[Patch]) -> tuple[Patch, ...]:
    """Return the patches that are applied together with ``patch``, itself included."""
    members = []
    for other in plan:
        if other is patch or (patch.group and other.group == patch.group):
            members.append(other)
    return tuple(members)


def _change(patch: Patch) -> SettingChange:
    assert patch.new is not None  # noqa: S101 - only solved ones are taken
    return SettingChange(
        patch.setting,
        patch.old,
        patch.new,
        patch.as_flag,
        str(patch.effect),
        patch.blocked_by if is_refused(patch) else None,
    )


def _printed_at(source: str, incident: Incident, modified_at: float | None) -> float | None:
    if incident.evidence:
        own = incident.evidence[0].text.lstrip()
    else:
        own = ""
    if (
        own.startswith(("{", '"'))
        and (at := _collected_at(source, incident.location.byte)) is not None
    ):
        return at
    lines = list(incident.evidence)
    for cause in incident.causes:
        lines += cause.evidence
    for evidence in lines:
        if evidence.line is not None and (at := moment_of(evidence.text, modified_at)) is not None:
            return at
    before, line, _ = _around(source, incident.location.byte)
    return last_moment((*before, line), modified_at)


def _collected_at(source: str, byte: int | None) -> float | None:
    """Return when a collector received the line of a failure, or None without one."""
    before, line, behind = _around(source, byte)
    at = time_of_object(line)
    if at is not None:
        return at
    return time_of_multiline_object((*before, line, *behind), len(before))


def _around(source: str, byte: int | None) -> tuple[list[str], str, list[str]]:
    """Return the lines before a byte offset, the line at it, and the lines after it.

    All are empty for a compressed log, because its offsets differ.
    """
    if byte is None or source in ("", "-"):
        return [], "", []
    start = max(0, byte - _BEFORE_BYTES)
    with (
        # The time is optional, so a file that changed since is no error.
        contextlib.suppress(OSError, ValueError, InputError),
        contextlib.closing(_opened(source)) as stream,
    ):
        if format_of(stream.read(HEAD_BYTES)) is not None:
            return [], "", []
        stream.seek(start)
        before = stream.read(byte - start)
        behind = stream.read(_LINE_BYTES)
        lines = (before + behind).decode("utf-8", "replace").split("\n")
        at = before.count(b"\n")
        return lines[:at], lines[at], lines[at + 1 :]
    return [], "", []


def _opened(source: str) -> IO[bytes]:
    if is_url(source):
        from oomguard.scan.inputs import open_object

        return open_object(source)
    return Path(source).open("rb")


# Group incidents of many inputs, and find the patch that would have fixed most of them.

# Several logs may show the same failure. A process has an output and an error log. In a Ray
# session, the worker, its driver and Ray's own processes have logs. A driver repeats its workers'
# output behind ``(NAME pid=N)``, and prints the error of a task again. raylet and GCS log why an
# actor died. An error log may show that an engine died, while the output log has the cause. Such a
# failure counts once, for the log closest to it; the other logs are listed as repetitions.

# If no worker's own log has a failure, the program's log is best, then those of Ray's processes.
_NEAREST: Final = (
    "job-driver-",
    "replica_",
    "python-core-worker",
    "python-core-driver",
    "raylet",
    "gcs_server",
)
# The kind and framework of a worker that Ray's memory monitor killed.
_KILL: Final = ("host_oom", "ray")
_DEAD: Final = "engine_dead"
# The cause of a crash whose exception is in the log.
_EXPLAINED: Final = "not_memory"
# Ray's and SLURM's NAME.out and NAME.err, and torchrun's stdout.log and stderr.log, maybe
# compressed.
_STREAM: Final = re.compile(r"(?:\.(?:out|err)|(?:(?<=/)|^)std(?:out|err)(?:\.log)?)(?:\.gz)?$")
_PID: Final = re.compile(r"\bpid=(\d+)")
# A log may cut a message or append a hint.
_MESSAGE_CHARS: Final = 160


def merge_repeated(findings: Iterable[IncidentSummary]) -> list[IncidentSummary]:
    """Return the findings without repetitions of the same failure, in the same order.

    Each remaining finding lists the places of its repetitions.
    """
    same: dict[tuple[str, str], list[IncidentSummary]] = {}
    order = list(findings)
    for one in order:
        if one.message:
            same.setdefault((one.kind, " ".join(one.message.split())[:_MESSAGE_CHARS]), []).append(
                one
            )
    # Point to the original, not to another repetition.
    again: dict[int, IncidentSummary] = {}
    for together in same.values():
        if len(together) > 1 and any(one.writer.session for one in together):
            again |= _repeats(together)
    for merge in (_killed, _dead):
        others = []
        for one in order:
            if id(one) not in again:
                others.append(one)
        again |= merge(others)
    places: dict[int, list[tuple[str, int | None]]] = {}
    for one in order:
        if (first := again.get(id(one))) is not None:
            places.setdefault(id(first), []).append((one.source, one.line))
    merged = []
    for one in order:
        if id(one) in again:
            continue
        if id(one) in places:
            merged.append(replace(one, told_again=tuple(places[id(one)])))
        else:
            merged.append(one)
    return merged


def _repeats(together: Sequence[IncidentSummary]) -> dict[int, IncidentSummary]:
    """Return which findings with the same message repeat which."""
    again: dict[int, IncidentSummary] = {}
    by_pid: dict[str | None, IncidentSummary] = {}
    for one in together:
        if one.writer.pid is not None:
            by_pid[one.writer.pid] = one
    sessions = dict.fromkeys(filter(None, (one.writer.session for one in together)))
    for session in sessions:
        own = []
        others = []
        for one in together:
            if one.writer.session != session:
                continue
            if one.writer.pid is not None:
                own.append(one)
            else:
                others.append(one)
        if own:
            nearest = own[0]
        else:
            nearest = min(others, key=_distance)
        for one in others:
            pid = _pid(one)
            if one is not nearest and (not own or pid is None or pid in by_pid):
                again[id(one)] = by_pid.get(pid, nearest)
    # A driver's output in another folder names its workers.
    for one in together:
        if one.writer.session is None and (first := by_pid.get(_pid(one))) is not None:
            again[id(one)] = first
    return again


def _killed(findings: Sequence[IncidentSummary]) -> dict[int, IncidentSummary]:
    """Return the kills in a raylet's log that another log shows with the killed process."""
    kills = []
    for one in findings:
        if one.writer.session and (one.kind, one.framework) == _KILL:
            kills.append(one)
    hit = {}
    for one in reversed(kills):
        if not _is_raylet(one):
            hit[one.writer.session] = one
    again = {}
    for one in kills:
        if _is_raylet(one) and one.writer.session in hit:
            again[id(one)] = hit[one.writer.session]
    return again


def _is_raylet(one: IncidentSummary) -> bool:
    return one.writer.process == "raylet"


def _dead(findings: Sequence[IncidentSummary]) -> dict[int, IncidentSummary]:
    """Return the engine crashes without a cause that another log explains."""
    dead = []
    causes = []
    for one in findings:
        if one.kind == _DEAD and one.cause != _EXPLAINED:
            dead.append(one)
        elif one.is_oom or one.cause == _EXPLAINED:
            causes.append(one)
    by_output: dict[str, IncidentSummary] = {}
    workers: dict[tuple[str | None, str | None], IncidentSummary] = {}
    sessions: dict[str | None, IncidentSummary] = {}
    # Of several causes the first one counts, so it is written last.
    for one in reversed(causes):
        by_output[_both(one.source)] = one
        if one.writer.session:
            workers[one.writer.session, one.writer.pid] = one
            sessions[one.writer.session] = one
    again: dict[int, IncidentSummary] = {}
    for one in dead:
        pid = one.writer.pid or _pid(one)
        cause = by_output.get(_both(one.source)) or workers.get((one.writer.session, pid))
        if cause is None and one.writer.pid is None:
            cause = sessions.get(one.writer.session)
        if cause is not None and cause.source != one.source:
            again[id(one)] = cause
    return again


def _both(source: str) -> str:
    """Return the common part of the names of a process's output and error logs."""
    return _STREAM.sub("", source)


def _pid(one: IncidentSummary) -> str | None:
    found = _PID.search(one.process or "")
    return found and found[1]


def _distance(one: IncidentSummary) -> int:
    name = (one.writer.process or "").rpartition("/")[2]
    for i, beginning in enumerate(_NEAREST):
        if name.startswith(beginning):
            return i
    return len(_NEAREST)


# A table cell names the worst processes; the JSON has all counts.
_MOST_WRITERS: Final = 3


@dataclass(frozen=True, slots=True, repr=False)
class GroupFix(Record):
    """Hold the changes that would have fixed ``fixes`` incidents of a group.

    Each setting has a value that is sufficient for all of these incidents.
    """

    changes: tuple[SettingChange, ...]
    fixes: int


@dataclass(frozen=True, slots=True, repr=False)
class IncidentGroup(Record):
    """Group incidents of the same cause, model, setting and version.

    Attributes:
        setting: the first setting of the plan, or None if no value was solved.
        first_at: the time of the first incident in Unix seconds, or None if unknown.
        last_at: the time of the last incident in Unix seconds, or None if unknown.
        refused: the setting and reason of a change that the user does not permit, with the number
            of incidents that it would have fixed.
        writers: the processes with most incidents, with their numbers of incidents.
        told_again: the input and line of each repetition in another log.
    """

    cause: str
    title: str
    kinds: tuple[str, ...]
    model: str | None
    setting: str | None
    framework: str
    version: str | None
    incidents: int
    inputs: int
    first_at: float | None
    last_at: float | None
    fix: GroupFix | None
    refused: tuple[tuple[str, str, int], ...]
    writers: tuple[tuple[str, int], ...]
    other_writers: int
    example: IncidentSummary
    told_again: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class FleetSummary(Record):
    """Summarize many inputs; the group with most incidents comes first.

    Attributes:
        inputs: the number of inputs that were read.
        failed: the number of inputs with an out-of-memory.
        unread: the number of inputs that could not be read.
        left_out: the number of inputs older than ``--since``.
    """

    inputs: int
    failed: int
    unread: int
    left_out: int
    groups: tuple[IncidentGroup, ...]
    since: float | None = None

    @property
    def incidents(self) -> int:
        """The number of incidents in all groups."""
        return sum(group.incidents for group in self.groups)

    @property
    def best(self) -> IncidentGroup | None:
        """The group whose fix would have fixed most incidents, or None without any fix."""
        fixable = []
        for group in self.groups:
            if group.fix is not None:
                fixable.append(group)
        return max(fixable, key=lambda group: group.fix.fixes if group.fix else 0, default=None)


def summarize_findings(
    findings: Iterable[IncidentSummary],
    *,
    inputs: int,
    failed: int,
    unread: int = 0,
    left_out: int = 0,
    since: float | None = None,
) -> FleetSummary:
    """Return the summary of findings; leave out those that are older than ``since``.

    ``since`` is in Unix seconds. None: keep all.
    """
    found = []
    for one in findings:
        if since is None or one.at is None or one.at >= since:
            found.append(one)
    kept = merge_repeated(found)
    together: dict[tuple[str, ...], list[IncidentSummary]] = {}
    for one in kept:
        if one.changes:
            setting = one.changes[0].setting
        else:
            setting = ""
        key = (one.cause, one.model or "", setting, one.framework, one.version or "")
        together.setdefault(key, []).append(one)
    groups = sorted(map(_group, together.values()), key=_order)
    if since is not None:
        failed_sources = set()
        for one in found:
            if one.is_oom:
                failed_sources.add(one.source)
        failed = len(failed_sources)
    return FleetSummary(inputs, failed, unread, left_out, tuple(groups), since)


def _order(group: IncidentGroup) -> tuple[object, ...]:
    return (
        -group.incidents,
        group.cause,
        group.model or "",
        group.setting or "",
        group.framework,
        group.version or "",
    )


def _group(same: Sequence[IncidentSummary]) -> IncidentGroup:
    first = same[0]
    sources: set[str] = set()
    repetitions: list[tuple[str, int | None]] = []
    times: list[float] = []
    writers: Counter[str] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    kinds: Counter[str] = Counter()
    permitted: list[IncidentSummary] = []
    for one in same:
        sources.update(_sources(one))
        repetitions += one.told_again
        kinds[one.kind] += 1
        if one.at is not None:
            times.append(one.at)
        if one.writer.words:
            writers[one.writer.words] += 1
        if one.refused is not None:
            refused[one.refused] += 1
        else:
            permitted.append(one)
    ordered = sorted(writers.items(), key=lambda item: (-item[1], item[0]))
    return IncidentGroup(
        first.cause,
        first.title,
        tuple(kind for kind, _count in kinds.most_common()),
        first.model,
        first.changes[0].setting if first.changes else None,
        first.framework,
        first.version,
        len(same),
        len(sources),
        min(times, default=None),
        max(times, default=None),
        _fix(permitted),
        tuple((*what, count) for what, count in refused.most_common()),
        tuple(ordered[:_MOST_WRITERS]),
        max(0, len(ordered) - _MOST_WRITERS),
        min(same, key=lambda one: (one.at is None, one.at or 0.0, one.source, one.line or 0)),
        tuple(repetitions),
    )


def _sources(one: IncidentSummary) -> tuple[str, ...]:
    return one.source, *(source for source, _line in one.told_again)


def _fix(same: Sequence[IncidentSummary]) -> GroupFix | None:
    """Return the patch that fixes most incidents.

    It changes the settings that most plans change first, each to a value that is sufficient for all
    of them.
    """
    plans: dict[tuple[str, ...], list[tuple[SettingChange, ...]]] = {}
    for one in same:
        if one.changes:
            names = tuple(change.setting for change in one.changes)
            plans.setdefault(names, []).append(one.changes)
    if not plans:
        return None
    settings = min(plans, key=lambda names: (-len(plans[names]), names))
    chosen = []
    held = plans[settings]
    for i in range(len(settings)):
        change = _enough([changes[i] for changes in held])
        chosen.append(change)
        sufficient = []
        for changes in held:
            if _suffices(change, changes[i]):
                sufficient.append(changes)
        held = sufficient
    return GroupFix(tuple(chosen), len(held))


def _enough(changes: Sequence[SettingChange]) -> SettingChange:
    """Return the largest change in the most common direction, or the most frequent value."""
    directions = Counter(map(_direction, changes))
    direction = max(directions, key=lambda way: (directions[way], way))
    going = []
    for change in changes:
        if _direction(change) == direction:
            going.append(change)
    if direction:
        return max(going, key=lambda change: direction * _number(change.new))
    values = Counter(repr(change.new) for change in going)
    most = max(values, key=lambda value: (values[value], value))
    by_value = {repr(change.new): change for change in reversed(going)}
    return by_value[most]


def _suffices(chosen: SettingChange, needed: SettingChange) -> bool:
    direction = _direction(chosen)
    if not direction or _direction(needed) != direction:
        return chosen.new == needed.new
    return direction * _number(chosen.new) >= direction * _number(needed.new)


def _direction(change: SettingChange) -> int:
    """Return 1 for a raised value, -1 for a lowered one, and 0 for values without an order."""
    numbers = []
    for value in (change.old, change.new):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers.append(value)
    if not numbers or not isinstance(change.new, (int, float)) or isinstance(change.new, bool):
        return 0
    if len(numbers) < 2 or change.new < numbers[0]:
        return -1
    return 1


def _number(value: FactValue) -> float:
    assert isinstance(value, (int, float))  # noqa: S101 - a direction is one of numbers
    return float(value)


# Write the summary for a terminal, as JSON and as Markdown.

HEADINGS: Final = ("incidents", "cause", "model and version", "would have fixed", "seen", "where")
_UNKNOWN: Final = "unknown"
# Below this width, columns would wrap every word.
_NARROW_COLUMNS: Final = 100
# A terminal shows the groups that matter. JSON contains all of them.
_SHOWN_GROUPS: Final = 50


def headline(summary: FleetSummary) -> str:
    """Return one sentence with the number of inputs and failures."""
    failed = f"{summary.failed:,} of {_counted(summary.inputs, 'input')} ran out of memory"
    return (
        f"{failed}: {_counted(summary.incidents, 'incident')} in "
        f"{_counted(len(summary.groups), 'group')}"
    )


def sentences(summary: FleetSummary) -> list[str]:
    """Return the lines below the table: the best patch, what was left out, whose clocks apply."""
    lines = []
    if (best := summary.best) is not None and best.fix is not None:
        flags = " ".join(map(_flag_of, best.fix.changes))
        if best.model:
            whose = f" of {best.model}"
        else:
            whose = ""
        share = f"{best.fix.fixes:,} of {_counted(summary.incidents, 'incident')}"
        lines.append(f"would have fixed most: {flags}{whose} ({share})")
    if summary.left_out:
        lines.append(
            f"left out because they are older than --since: {_counted(summary.left_out, 'input')}"
        )
    if summary.unread:
        lines.append(f"could not be read: {_counted(summary.unread, 'input')}")
    by_file = sum(group.example.clock == "file" for group in summary.groups)
    if by_file:
        lines.append(
            f"the times of {_counted(by_file, 'group')} come from the files, because the lines "
            "have none"
        )
    return drawn(lines)


def rows(summary: FleetSummary) -> list[tuple[str, ...]]:
    """Return the table with headings first; line breaks separate lines within a cell."""
    return [HEADINGS, *map(drawn, map(_row, summary.groups))]


def _row(group: IncidentGroup) -> tuple[str, ...]:
    engine = " ".join(filter(None, (group.framework, group.version)))
    return (
        f"{group.incidents:,}\nin {_counted(group.inputs, 'input')}",
        f"{group.cause}\n{', '.join(group.kinds)}",
        f"{group.model or 'model ' + _UNKNOWN}\n{engine}",
        fix_words(group),
        _seen(group),
        group_sources(group),
    )


def fix_words(group: IncidentGroup) -> str:
    """Return the changes that would have fixed most of a group, one a line, with their number.

    A change that the user does not permit is included with the reason.
    """
    refused = [f"{setting} for {count:,}: {why}" for setting, why, count in group.refused]
    if group.fix is None:
        return "\n".join(
            ["no change that you permit", *refused] if refused else ["no value could be solved"]
        )
    lines = list(map(_flag_of, group.fix.changes))
    if group.fix.fixes == group.incidents:
        count = "all"
    else:
        count = f"{group.fix.fixes:,} of {group.incidents:,}"
    return "\n".join([*lines, f"{count}, {group.fix.changes[0].effect}", *refused])


def _flag_of(change: SettingChange) -> str:
    return change.as_flag or f"{change.setting}={change.new}"


def group_sources(group: IncidentGroup) -> str:
    """Return the writers with most incidents of a group, or the place of one example."""
    lines = []
    for words, times in group.writers:
        lines.append(f"{words} ({times:,})" if times > 1 else words)
    if group.other_writers:
        lines.append(f"and {group.other_writers:,} more")
    if not lines:
        lines = [_place(group.example.source, group.example.line)]
    if group.told_again:
        others = len(group.told_again) - 1
        lines.append(
            f"repeated: {_place(*group.told_again[0])}"
            + (f" and {others:,} more" if others else "")
        )
    return "\n".join(lines)


def _place(source: str, line: int | None) -> str:
    if line is None:
        return source
    return f"{source}:{line}"


def _seen(group: IncidentGroup) -> str:
    if group.first_at is None or group.last_at is None:
        return _UNKNOWN
    first = moment(group.first_at)
    last = moment(group.last_at)
    if first == last:
        return first
    return f"{first}\n{last}"


def _counted(count: int, what: str) -> str:
    if count == 1:
        return f"{count:,} {what}"
    return f"{count:,} {what}s"


def print_summary(console: Console, summary: FleetSummary) -> None:
    """Print the groups, the one with most incidents first, then the best patch."""
    from rich.text import Text

    console.print(Text(headline(summary), style="bold red" if summary.failed else "green"))
    headings, *groups = rows(summary)
    shown = groups[:_SHOWN_GROUPS]
    if shown:
        console.print()
        (_print_below if console.width < _NARROW_COLUMNS else _print_table)(
            console, headings, shown
        )
        console.print()
    if len(groups) > len(shown):
        console.print(
            Text(
                f"{len(groups) - len(shown):,} smaller groups not shown: use --format json or md",
                style="dim",
            )
        )
    for sentence in sentences(summary):
        console.print(Text(sentence), soft_wrap=True)


def _print_table(
    console: Console, headings: tuple[str, ...], groups: list[tuple[str, ...]]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(
            heading, justify="right" if i == 0 else "left", no_wrap=i in {0, 4}, overflow="fold"
        )
    for group in groups:
        cells = list(map(Text, group))
        cells[1].stylize("bold")
        table.add_row(*cells)
    console.print(table)


def _print_below(
    console: Console, headings: tuple[str, ...], groups: list[tuple[str, ...]]
) -> None:
    from rich.text import Text

    for count, cause, *rest in groups:
        number, inputs = count.split("\n")
        if number == "1":
            what = "incident"
        else:
            what = "incidents"
        console.print(
            Text(f"{number} {what} {inputs}", style="bold").append(
                f"  {cause.replace(chr(10), ': ')}"
            )
        )
        for heading, cell in zip(headings[2:], rest, strict=True):
            first, *others = cell.split("\n")
            console.print(
                Text(f"  {heading}: ", style="dim").append(first, style="not dim"), soft_wrap=True
            )
            for line in others:
                console.print(Text(f"    {line}"), soft_wrap=True)


def summary_markdown(summary: FleetSummary) -> str:
    """Return the summary as Markdown: a sentence, a table, and the lines below it."""
    table = rows(summary)
    lines = [f"## {headline(summary)}", ""]
    if summary.groups:
        lines += [
            _markdown_row(table[0]),
            _markdown_row(("---",) * len(HEADINGS)),
            *map(_markdown_row, table[1:]),
            "",
        ]
    lines += [f"- {sentence}" for sentence in sentences(summary)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(cells: tuple[str, ...]) -> str:
    escaped = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def summary_json(summary: FleetSummary) -> str:
    """Return the summary as one line of JSON with masked texts."""
    best = summary.best
    row = {
        "schema": SCHEMA,
        "inputs": summary.inputs,
        "inputs_with_oom": summary.failed,
        "inputs_unread": summary.unread,
        "inputs_left_out": summary.left_out,
        "incidents": summary.incidents,
        "since": _utc(summary.since),
        "groups": list(map(_group_dict, summary.groups)),
        "best": None if best is None else summary.groups.index(best),
    }
    return json_line(row)


def _group_dict(group: IncidentGroup) -> dict[str, Any]:
    shown = masked(group)
    example = shown.example
    refusals = []
    for name, why, count in shown.refused:
        refusals.append({"setting": name, "why": why, "incidents": count})
    row = {
        "cause": shown.cause,
        "title": shown.title,
        "kinds": list(shown.kinds),
        "model": shown.model,
        "setting": shown.setting,
        "framework": shown.framework,
        "framework_version": shown.version,
        "incidents": shown.incidents,
        "inputs": shown.inputs,
        "first_seen": _utc(shown.first_at),
        "last_seen": _utc(shown.last_at),
        "fix": None if shown.fix is None else _fix_dict(shown.fix),
        "refused": refusals,
        "writers": [{"who": words, "incidents": times} for words, times in shown.writers],
        "other_writers": shown.other_writers,
        "told_again": [{"source": source, "line": line} for source, line in group.told_again],
        "example": {
            "source": group.example.source,
            "line": example.line,
            "process": example.process,
            "seen": _utc(example.at),
            "clock": example.clock,
            "layout": example.writer.layout,
            "namespace": example.writer.namespace,
            "pod": example.writer.pod,
            "container": example.writer.container,
            "node": example.writer.node,
            "job": example.writer.job,
            "task": example.writer.task,
            "rank": example.writer.rank,
        },
    }
    answer: dict[str, Any] = plain_value(row)
    return answer


def _fix_dict(fix: GroupFix) -> dict[str, Any]:
    changes = []
    for change in fix.changes:
        changes.append(
            {
                "setting": change.setting,
                "to": change.new,
                "as_flag": change.as_flag,
                "effect": change.effect,
            }
        )
    return {"changes": changes, "fixes": fix.fixes}


def _utc(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")


# Add ``diagnose --summary``, which groups the failures of all inputs.


def findings_in(diagnosis: Diagnosis) -> tuple[IncidentSummary, ...]:
    """Return what a summary needs of one input."""

    return findings_of(diagnosis, modified_at(diagnosis.source))


def summarize(
    inputs: Sequence[Input],
    work: RenderOptions,
    jobs: int,
    on: str,
    write: Callable[[str], None],
    errors: list[InputError],
    *,
    since: float | None,
    left_out: int,
) -> bool:
    """Read all inputs and write their summary; return whether it contains an out-of-memory.

    Args:
        inputs: the inputs.
        work: how to render.
        jobs: the number of processes that read inputs; 0: automatic.
        on: where inputs are read, ``local`` or ``ray``.
        write: takes the text.
        errors: the errors so far, one for each path without an input. New errors are added.
        since: leave out incidents printed before this time, in Unix seconds. None: keep all.
        left_out: the number of inputs that are too old.
    """
    from oomguard.cli.inputs import reading, unmasked_if

    findings: list[IncidentSummary] = []
    failed = unread = 0
    unfound = len(errors)
    with reading(inputs, work, jobs, on, write) as (outcomes, finish):
        for outcome in outcomes:
            finish("")
            findings += outcome.findings
            failed += outcome.found
            if outcome.error:
                errors.append(InputError(outcome.error, hint=outcome.hint))
                unread += not outcome.found and not outcome.findings
    summary = summarize_findings(
        findings,
        inputs=len(inputs) - unread,
        failed=failed,
        unread=unfound + unread,
        left_out=left_out,
        since=since,
    )
    with unmasked_if(not work.masked):
        write(_rendered(summary, work))
    return summary.failed > 0


def _rendered(summary: FleetSummary, work: RenderOptions) -> str:
    if work.quiet and not summary.incidents and work.form != "json":
        return ""
    if work.form == "json":
        return summary_json(summary) + "\n"
    if work.form == "md":
        return summary_markdown(summary)
    from oomguard.cli.inputs import Screen, text_of

    screen = work.screen or Screen(80, terminal=False, colors=None, no_color=True, encoding="utf-8")
    return text_of(screen, lambda console: print_summary(console, summary))
