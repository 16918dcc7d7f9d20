"""Extract from one incident what a summary counts: cause, model, setting, version, time, fix."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Literal

from oomguard.core.errors import InputError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Diagnosis, Incident, Patch
from oomguard.core.records import Record
from oomguard.remedy.policy import is_refused
from oomguard.scan.inputs import Writer, is_url, writer_of
from oomguard.scan.source import HEAD_BYTES, decompress, format_of

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
    found = (moment_of(line, modified_at) for line in reversed(list(lines)))
    return next((at for at in found if at is not None), None)


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
        return None
    if not isinstance(record, dict):
        return None
    within = (value for value in record.values() if isinstance(value, dict))
    return next((at for each in (record, *within) if (at := _time_in(each)) is not None), None)


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
    return next(
        (at for name in _FIELDS if (at := _collected_unix_s(record.get(name))) is not None), None
    )


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
    return next((number / scale for least, scale in _SCALES if least <= number < least * 1e3), None)


# Search this many bytes before a failure for a timestamp, because traceback lines have none.
_BEFORE_BYTES: Final = 64 << 10
# The evidence lacks the other fields of the collector's object, so the line is read again.
_LINE_BYTES: Final = 64 << 10
# ray/_private/worker.py, print_to_stdstream, Ray 2.60: Ray's log monitor reads the job from this
# text.
_RAY_JOB: Final = re.compile(rb":job_id:(?!f+\s)(?P<job>[0-9a-f]{8,})\s")
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
        return next(
            (
                (each.setting, each.refused_as)
                for each in self.changes
                if each.refused_as is not None
            ),
            None,
        )


def findings_of(diagnosis: Diagnosis, modified_at: float | None) -> tuple[IncidentSummary, ...]:
    """Return the summaries of the incidents in one input.

    ``modified_at`` is when the input was last written, in Unix seconds, or None.
    """
    if not diagnosis.incidents:
        return ()
    writer = writer_of(diagnosis.source)
    if writer.layout == "ray" and writer.job is None and writer.pid is not None:
        writer = replace(writer, job=_job_of_worker(diagnosis.source))
    return tuple(
        _finding(diagnosis.source, writer, incident, modified_at)
        for incident in diagnosis.incidents
    )


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
        tuple(_change(patch) for patch in _first_patches(incident)),
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
        group = tuple(
            other
            for other in incident.plan
            if other is patch or (patch.group and other.group == patch.group)
        )
        if all(other.new is not None for other in group):
            if not any(is_refused(other) for other in group):
                return group
            refused = refused or group
    return refused


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
