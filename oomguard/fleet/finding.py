"""One incident of one input as the summary of many counts it: cause, model, setting, version, when, where, and what would have fixed it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Literal

from oomguard.errors import InputError
from oomguard.facts import FactValue
from oomguard.fleet.collected import time_beside, time_of_object
from oomguard.fleet.inputs import is_url
from oomguard.fleet.layouts import Writer, writer_of
from oomguard.fleet.moments import last_moment, moment_of
from oomguard.incident import Diagnosis, Incident, Patch
from oomguard.observe.compressed import HEAD_BYTES, format_of
from oomguard.observe.source import unpacked
from oomguard.records import Record
from oomguard.remedy.policy import is_refused

# A stamped line stands within so many bytes before a failure; a traceback's own lines have no stamp.
_BEFORE_BYTES: Final = 64 << 10
# The evidence has an object's text without what its collector put beside it: the line is read again.
_LINE_BYTES: Final = 64 << 10
# ray/_private/worker.py, print_to_stdstream, 2.60: what the log monitor reads of whose log it is.
_RAY_JOB: Final = re.compile(rb":job_id:(?!f+\s)(?P<job>[0-9a-f]{8,})\s")
_JOB_BYTES: Final = 80
# The process of a line that srun labelled (observe/rank_labels.py).
_LABELLED: Final = re.compile(r"rank (\d+)(?:$|: )")
Clock = Literal["line", "file"]


@dataclass(frozen=True, slots=True, repr=False)
class Change(Record):
    """One setting of a patch: what it was, what it has to be, how the engine is told; ``refused_as``: why the user does not permit it."""

    setting: str
    old: FactValue | None
    new: FactValue
    as_flag: str | None
    effect: str
    refused_as: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Record):
    """One incident of one input.

    ``at`` is when it was printed, in Unix seconds, by the clock that stamped it: ``clock`` tells the line's from the file's last change.
    ``changes`` are the patches that would have been applied first, together; empty: none could be solved. Only where the user said no
    to all that were solved is one of these told.
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
    changes: tuple[Change, ...]
    message: str = ""
    told_again: tuple[tuple[str, int | None], ...] = ()

    @property
    def refused(self) -> tuple[str, str] | None:
        """The setting that the user does not permit to be changed so, and why."""
        return next(((each.setting, each.refused_as) for each in self.changes if each.refused_as is not None), None)


def findings_of(diagnosis: Diagnosis, modified_at: float | None) -> tuple[Finding, ...]:
    """Return what the incidents of one input are in a summary; ``modified_at`` is when the input was last written."""
    if not diagnosis.incidents:
        return ()
    writer = writer_of(diagnosis.source)
    if writer.layout == "ray" and writer.job is None and writer.pid is not None:
        writer = replace(writer, job=_job_of_worker(diagnosis.source))
    return tuple(_finding(diagnosis.source, writer, incident, modified_at) for incident in diagnosis.incidents)


def modified_at(source: str) -> float | None:
    """Return when an input was last written, in Unix seconds; None where nothing tells."""
    if is_url(source):
        from oomguard.fleet.remote import modified_at as object_modified_at

        return object_modified_at(source)
    try:
        return Path(source).stat().st_mtime if source != "-" else None
    except (OSError, ValueError):
        return None


def _finding(source: str, writer: Writer, incident: Incident, modified_at: float | None) -> Finding:
    at = _printed_at(source, incident, modified_at)
    clock: Clock | None = "line" if at is not None else "file" if modified_at is not None else None
    cause = incident.causes[0] if incident.causes else None
    model = incident.facts.get("model")
    rank = _LABELLED.match(incident.location.process or "")
    if rank is not None and writer.rank is None:
        writer = replace(writer, rank=rank[1])
    return Finding(
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
    """Return the job that a Ray worker was given, as the first line of its log says; None where it does not."""
    with contextlib.suppress(OSError, ValueError, InputError), contextlib.closing(_opened(source)) as stream:
        found = _RAY_JOB.match(unpacked(stream, source, None).read(_JOB_BYTES))
        return found["job"].decode() if found else None
    return None


def _first_patches(incident: Incident) -> tuple[Patch, ...]:
    """Return the first patch of the plan whose value is solved, with those that belong with it; one that the user refused comes last."""
    refused: tuple[Patch, ...] = ()
    for patch in incident.plan:
        group = tuple(
            other for other in incident.plan if other is patch or (patch.group and other.group == patch.group)
        )
        if all(other.new is not None for other in group):
            if not any(is_refused(other) for other in group):
                return group
            refused = refused or group
    return refused


def _change(patch: Patch) -> Change:
    assert patch.new is not None  # noqa: S101 - only solved ones are taken
    return Change(
        patch.setting,
        patch.old,
        patch.new,
        patch.as_flag,
        str(patch.effect),
        patch.blocked_by if is_refused(patch) else None,
    )


def _printed_at(source: str, incident: Incident, modified_at: float | None) -> float | None:
    own = incident.evidence[0].text.lstrip() if incident.evidence else ""
    if own.startswith(("{", '"')) and (at := _collected_at(source, incident.location.byte)) is not None:
        return at
    for evidence in (*incident.evidence, *(line for cause in incident.causes for line in cause.evidence)):
        if evidence.line is not None and (at := moment_of(evidence.text, modified_at)) is not None:
            return at
    before, line, _ = _around(source, incident.location.byte)
    return last_moment((*before, line), modified_at)


def _collected_at(source: str, byte: int | None) -> float | None:
    """Return when a collector took the line of a failure, as its object says; None where the line is in none."""
    before, line, behind = _around(source, byte)
    at = time_of_object(line)
    return at if at is not None else time_beside((*before, line, *behind), len(before))


def _around(source: str, byte: int | None) -> tuple[list[str], str, list[str]]:
    """Return the lines before the one at a byte, that line, and those behind it; empty for a packed log: its bytes lie elsewhere."""
    if byte is None or source in ("", "-"):
        return [], "", []
    start = max(0, byte - _BEFORE_BYTES)
    with contextlib.suppress(OSError, ValueError, InputError), contextlib.closing(_opened(source)) as stream:
        if format_of(stream.read(HEAD_BYTES)) is not None:
            return [], "", []
        stream.seek(start)
        before, behind = stream.read(byte - start), stream.read(_LINE_BYTES)
        lines = (before + behind).decode("utf-8", "replace").split("\n")
        at = before.count(b"\n")
        return lines[:at], lines[at], lines[at + 1 :]
    return [], "", []


def _opened(source: str) -> IO[bytes]:
    if is_url(source):
        from oomguard.fleet.remote import open_object

        return open_object(source)
    return Path(source).open("rb")
