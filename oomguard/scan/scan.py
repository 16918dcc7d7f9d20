"""Find incidents in a stream of lines: anchors first, then patterns on a short window.

The scanner reads line by line with a limited state, so the same code reads a saved log and a
running child.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from typing import Final

from oomguard.core.facts import Fact
from oomguard.core.incident import (
    KINDS,
    Diagnosis,
    EngineStart,
    Evidence,
    Incident,
    Location,
    SettingInForce,
)
from oomguard.core.text import strip_escapes
from oomguard.rules.rule_files import ENGINE_ENDS, RuleSet
from oomguard.rules.signature import Quotation
from oomguard.scan.anchors import Finder, anchor_index, finder
from oomguard.scan.context import (
    ECHO_ANCHOR,
    NEAR_AFTER_LINES,
    NEAR_BEFORE_LINES,
    NO_ENGINE,
    Context,
    Near,
    UserFrames,
    merged_settings,
    nearest_phase,
    with_requested_share,
    without_contradicted,
)
from oomguard.scan.engine_errors import EngineErrors
from oomguard.scan.incidents import ScannedIncident, ScannedIncidents, Unrecognized
from oomguard.scan.lines import TRACEBACK, PlainLine, excludes_failure, peel, words_of
from oomguard.scan.pattern_search import (
    Candidate,
    Hit,
    SearchTime,
    Window,
    best_of,
    match,
    open_window,
    quoted,
)
from oomguard.scan.source import Gap, Line

# The kernel's report of an out-of-memory kill lists processes and the host's memory on separate
# lines.
#
# Linux mm/oom_kill.c dump_tasks, 2.6 to 6.12: the columns between ``rss`` and the name differ by
# version.

_HEADS: Final = ("Tasks state (memory values in pages)", "tgid total_vm")
_PAGE_BYTES: Final = 4096
# The columns are pid, uid, tgid, total_vm, rss, two to eight numbers, and the name.
_ROW: Final = (
    r"\[ *\d{1,10}\] +\d{1,10} +\d{1,10} +\d{1,15} +(\d{1,15})(?: +-?\d{1,15}){2,8} +(\S.{0,60})$"
)
# The distance from the table to the kernel's line about the killed process.
_NEAR_LINES: Final = 400
_BEGIN: Final = "invoked oom-killer"
# The report lists the host's zones and nodes before its table of processes.
_REPORT_LINES: Final = 200
_RAM: Final = r"\b(\d{3,15}) pages RAM\b"


@dataclass(slots=True, eq=False, repr=False)
class HostTasks:
    """Track the largest process of each table and the host's memory, by line."""

    found: list[tuple[int, int, int, str]] = field(default_factory=list)
    totals: list[tuple[int, int]] = field(default_factory=list)
    _in_table: bool = False
    _lines_left: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether a report continues, so that a line without anchor may belong to it."""
        return self._in_table or self._lines_left > 0

    def see(self, text: str, line: int) -> None:
        """Add a line that begins a report or a table, or may belong to an open one."""
        if any(head in text for head in _HEADS):
            if not self._in_table:
                self.found.append((line, line, 0, ""))
            self._in_table = True
            self._lines_left = 0
            return
        if _BEGIN in text:
            self._lines_left = _REPORT_LINES
        elif self._lines_left:
            self._lines_left -= 1
            if ram := re.search(_RAM, text):
                self.totals.append((line, int(ram.group(1)) * _PAGE_BYTES))
        if self._in_table:
            row = re.search(_ROW, text)
        else:
            row = None
        if row is None:
            self._in_table = False
            return
        first, _, most, name = self.found[-1]
        size = int(row.group(1)) * _PAGE_BYTES
        if size > most:
            self.found[-1] = (first, line, size, row.group(2).strip())
        else:
            self.found[-1] = (first, line, most, name)

    def facts(self, first_line: int, last_line: int) -> dict[str, Fact]:
        """Return the largest process and the host's memory from the report near a failure."""
        facts = {}
        for line, total in self.totals:
            if first_line <= line <= last_line + _NEAR_LINES:
                facts["host_total_bytes"] = Fact("host_total_bytes", total, line=line)
        for first, last, size, name in self.found:
            if size and first_line - _NEAR_LINES <= last and first <= last_line + _NEAR_LINES:
                facts["host_holder"] = Fact("host_holder", name, line=first)
                facts["host_holder_bytes"] = Fact("host_holder_bytes", size, line=first)
                break
        return facts


# A log may contain oomguard's own output. Its panels, events and notes describe failures that are
# not the log's own.
#
# The form of a line decides, never its position, so other programs' lines in between still count.
# The forms are a panel by its first line, headings and margin, an event by its name, an exception's
# note by its lines, and the JSON, Markdown and HTML of commands. Earlier versions drew panels as
# boxes.

_EVENT: Final = "oomguard: "
_PANEL: Final = "oomguard["
_SUMMARY: Final = re.compile(
    r"oomguard: \d+ failures, the (?:one to act on first|first cause on top)"
)
# A heading, the log's quoted line, or a margin of two columns, which no frame of a traceback has. A
# launcher may have put its rank before the line.
_PANEL_LINE: Final = re.compile(
    r"(?:\d{1,4}: )?(?:(?:Do this|Why|Or|Other options|Decide by|Unknown|To find the cause|More):"
    r"|\s*\d* ?\| |  (?! |File \"))"
)
_PANEL_END: Final = "More: "
_MOST_PANEL_LINES: Final = 80
_EVENT_AS_JSON: Final = '"logger": "oomguard"'
_OBJECT: Final = '{"schema": 1, "'
_OBJECTS: Final = ('"verdict": "', '"attempts": [', '"groups": [')
# The single line of a diagnosis without failure, or of a plan.
_NONE_FOUND: Final = ": no memory failure found"
_NO_FIT: Final = "does not fit: "
_TABLE: Final = "What oomguard did"
_PAGE: Final = '<main class="oomguard">'
_EVIDENCE: Final = "<details><summary>Evidence ("
_PAGE_ENDS = "</main>"
_EVIDENCE_ENDS = "</details>"
_BEGINS: Final = (_EVENT, _PANEL, "{", "\u256d\u2500 ", "+- ", "<", _TABLE, _NO_FIT)
# rich draws these boxes, round or in ASCII. Other programs' boxes (a traceback, an error of a
# command line) have other titles.
_TOP: Final = r"(?:\u256d\u2500|\+-) (?P<title>[^\u2500]+?) ?[\u2500-]*[\u256e+]\s*\Z"
_SIDE: Final = r"[\u2502|].*[\u2502|]\s*\Z"
_BOTTOM: Final = r"(?:\u2570\u2500+\u256f|\+-{8,}\+)\s*\Z"
_START: Final = r"start \d+\b"
_LEAST_CUT_CHARS: Final = 6
# A box without a visible end ends after this many lines.
_MOST_LINES: Final = 200
_NOTED: Final = (
    r"  (?:why|where|budget|tried|change|do first|then|not changed|unknown|to decide|note): "
)
_QUOTED: Final = r"line \d+: "
_LONG_KINDS: Final = sorted({*KINDS} - {"other"}, key=len, reverse=True)
_KIND: Final = rf"(?:\bkind=|\"kind\": \")({'|'.join(sorted(KINDS))})\b"


@dataclass(slots=True, eq=False, repr=False)
class _Writer:
    """Track one process's open boxes, innermost last, each with its first line.

    ``panel`` is the line of an open panel, or 0.
    """

    boxes: list[tuple[bool, int]] = field(default_factory=list)
    panel: int = 0
    is_own: bool = False
    is_note: bool = False
    is_table: bool = False
    ends: str = ""


class OwnReports:
    """Recognize oomguard's own lines in an input.

    Attributes:
        mentions: the failures that they mention, by kind if named, each with its first line.
    """

    def __init__(self) -> None:
        self._writers: dict[tuple[str, str | None], _Writer] = {}
        self.mentions: dict[str, int] = {}

    def takes(self, line: Line, plain: PlainLine, stream: str) -> bool:
        """Return whether the next line of a stream is oomguard's own."""
        writer = self._writers.get((stream, plain.process))
        if writer is None:
            begins = plain.text.startswith(_BEGINS) or plain.text.endswith(_NONE_FOUND)
            if not begins and _EVENT_AS_JSON not in line.text:
                return False
            writer = self._writers[stream, plain.process] = _Writer()
        # A segment of a long line has the same source as the first one.
        if not line.continued:
            writer.is_own = self._is_own(writer, line, plain.text)
        return writer.is_own

    @property
    def note(self) -> tuple[str, ...]:
        """Return a note for an input whose only failures are in oomguard's own lines."""
        if not self.mentions:
            return ()
        mentions = ", ".join(f"{what} (line {number})" for what, number in self.mentions.items())
        return (
            (
                f"this is oomguard's own report, not a failure of its own: {mentions}; read "
                "the original log"
            ),
        )

    def _is_own(self, writer: _Writer, line: Line, text: str) -> bool:
        if self._is_of_panel(writer, line, text):
            return True
        if self._is_line(text) or _EVENT_AS_JSON in line.text:
            writer.is_note = text.startswith(_EVENT)
            self._names(re.search(_KIND, line.text), line)
            return True
        if (writer.is_note and re.match(_NOTED, text)) or (
            writer.is_table and text[:1] in {"", " "}
        ):
            return True
        writer.is_note, writer.is_table = False, text.startswith(_TABLE)
        return (
            writer.is_table
            or self._is_of_page(writer, line, text)
            or self._is_of_box(writer, line, text)
        )

    def _is_of_panel(self, writer: _Writer, line: Line, text: str) -> bool:
        if text.startswith(_PANEL) or _SUMMARY.match(text):
            writer.panel = line.number
            return True
        if not writer.panel or line.number - writer.panel > _MOST_PANEL_LINES:
            return False
        is_own = _PANEL_LINE.match(text) is not None
        if is_own:
            kind = next(filter(text.__contains__, _LONG_KINDS), None)
            if text.startswith(_PANEL_END):
                self.mentions.setdefault(kind or "a failure", writer.panel)
        return is_own

    @staticmethod
    def _is_line(text: str) -> bool:
        if text.startswith((_EVENT, _NO_FIT)) or text.endswith(_NONE_FOUND):
            return True
        return text.startswith(_OBJECT) and any(key in text for key in _OBJECTS)

    def _is_of_page(self, writer: _Writer, line: Line, text: str) -> bool:
        """Return whether a line belongs to an HTML page or is quoted in a Markdown report."""
        if writer.ends:
            is_own = writer.ends == _PAGE_ENDS or re.match(_QUOTED, text) is not None
            if text.startswith(writer.ends) or (writer.ends == _PAGE_ENDS and _PAGE_ENDS in text):
                writer.ends = ""
            return is_own
        if text.startswith((_PAGE, _EVIDENCE)):
            whole = _PAGE_ENDS in text
            self.mentions.setdefault("a failure", line.number)
            if text.startswith(_EVIDENCE):
                writer.ends = _EVIDENCE_ENDS
            elif whole:
                writer.ends = ""
            else:
                writer.ends = _PAGE_ENDS
            return True
        return False

    def _is_of_box(self, writer: _Writer, line: Line, text: str) -> bool:
        if top := re.match(_TOP, text):
            kind = _kind_of(top["title"])
            is_own = kind is not None or re.match(_START, top["title"]) is not None
            if is_own or text.startswith("\u256d"):
                writer.boxes.append((is_own, line.number))
            if kind is not None:
                self.mentions.setdefault(kind, line.number)
            return is_own
        if writer.boxes and line.number - writer.boxes[-1][1] > _MOST_LINES:
            writer.boxes.clear()
        if not writer.boxes:
            return False
        if re.match(_BOTTOM, text):
            return writer.boxes.pop()[0]
        return writer.boxes[-1][0] and re.match(_SIDE, text) is not None

    def _names(self, found: re.Match[str] | None, line: Line) -> None:
        if found is not None:
            self.mentions.setdefault(found[1], line.number)


def _kind_of(title: str) -> str | None:
    """Return the kind in a box's title, which a narrow box cuts."""
    if title in KINDS:
        return title
    for kind in KINDS:
        if len(title) >= _LEAST_CUT_CHARS and kind.startswith(title):
            return kind
    return None


# A log of several containers (``docker compose logs``, ``kubectl logs --prefix``, collectors) has
# the service or pod on each line.
#
# Containers reuse the same process numbers, so lines of different engines must stay separate.

# A collector's own word, not a table column.
_NAMED = ("pod/", "container/")
# A logger's column, not a container's.
_LEVELS = frozenset(
    {"TRACE", "DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "SUCCESS"}
)


class Services:
    """Track the services of one stream.

    A first column is a service if a process, a logger or a clock follows, or if two lines in a row
    have the same one, unlike a table's row. A line without the column continues the service of the
    line before.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._current: str | None = None
        self._before: str | None = None

    def of(self, line: PlainLine) -> str | None:
        """Return the service of the next line, or None before the first one."""
        name = line.service
        if name is not None and name.upper() not in _LEVELS and not name.isdigit():
            if name.startswith(_NAMED) or line.is_record or name == self._before:
                self._known.add(name)
            if name in self._known:
                self._current = name
        self._before = name
        return self._current


# A text may name one model by its size, if nothing says that only a part of it is on the device.

# The patterns of rare texts compile on first use.
_SIZED: Final = r"[\w./-]{0,80}(?<![\w.])(\d{1,3}(?:\.\d{1,2})?)[bB](?![A-Za-z0-9])[\w.-]{0,40}"
# Fewer bits, adapters, or parts on the host or other devices mean that the device does not have the
# whole model at 16 bits.
_IN_PART: Final = (
    r"(?i)\b[2-8]-?bits?\b|int[48]\b|\bawq|gptq|gguf|ggml|exl2|\bq\d_|nf4|fp[48]|quanti[sz]|load_in|bitsandbytes|\bbnb"
    r"|offload|device_map|tensor[ _-]?parallel|-tp\b|\blora\b|qlora|peft|deepspeed|fsdp|\bzero-?\d|\branks?\d|a\d+b\b"
    r"|\b(?:[2-9]|\d\d|two|three|four|eight|multiple|several|multi)[ -]?[x*\u00d7]? ?(?:[\w-]+ ){0,2}"
    r"(?:GPUs|cards|[AHV]\d00|[345]0[6-9]0|T4|L40?S?|A40)"
)


def named_model(text: str) -> str | None:
    """Return the one model with a size in a text ("Qwen2.5-7B-Instruct"), or None.

    It is None for no model, for two, and for a part of one.
    """
    found = list(re.finditer(_SIZED, text))
    sizes = {float(match.group(1)) for match in found}
    if len(sizes) != 1 or min(sizes) < 1 or re.search(_IN_PART, text):
        return None
    return max((match.group().strip("./-_") for match in found), key=len)


# Complete each incident and start with what the engine printed around it.

_RANK: Final = re.compile(r"(?<![A-Za-z])TP(\d{1,3})\b")
_OF_HOST: Final = "host_"
_BLOCKS_OF_OVERRIDE: Final = frozenset({"num_gpu_blocks_override", "kv_cache_fitting_blocks"})
# Only an engine's start prints these numbers, so a text with one is the log of a start.
_START_FACTS: Final = frozenset(
    {
        "model_weights_bytes",
        "kv_cache_available_bytes",
        "kv_cache_capacity_tokens",
        "framework_version",
    }
)

_START_CHECK: Final = "startup_free_memory_below_utilization"
# Phases that serve requests, and the phase of a text without one.
_OF_REQUESTS: Final = frozenset({"generate", "prefill", "decode", "unknown"})
# vLLM's logger begins a record with "ERROR 02-14 11:08:20 worker.py:242]", in brackets since V1.
_VLLM_RECORD: Final = re.compile(
    r"\b[A-Z]{4,8} \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[\w/.-]+\.py:\d+\]"
)


def complete_incident(
    scanned: ScannedIncident,
    given: Mapping[str, SettingInForce] | None,
    tasks: HostTasks | None = None,
    *,
    alone: bool = False,
    names_service: bool = False,
) -> Incident:
    """Return an incident with the effective settings, facts, phase and frames around its message.

    Args:
        scanned: the incident from the scan.
        given: the caller's settings; they take precedence over the engine's list.
        tasks: the kernel's tables of processes.
        alone: whether there is no other failure. Frames far after its message are then its own,
            because a reporter puts the message first.
        names_service: whether the log has several services or pods; the process then includes its
            own.
    """
    incident = scanned.incident
    context = scanned.context
    near = scanned.near
    if alone and not near:
        line = incident.location.line or 0
        near = context.near_frames(
            line, scanned.last_line, scanned.process, 0, behind=NEAR_BEFORE_LINES
        )
    if "tensor_parallel_size" not in incident.facts and (ranks := _ranks_seen(scanned)) > 1:
        seen = Fact("tensor_parallel_size", ranks, "solved")
        incident = replace(incident, facts={**incident.facts, seen.name: seen})
    if incident.kind == "host_oom":
        if tasks is None:
            holder = {}
        else:
            holder = tasks.facts(incident.location.line or 0, scanned.last_line)
        scope = incident.facts.get("host_scope")
        if scope is not None and scope.value == "limit":
            holder.pop(
                "host_total_bytes", None
            )  # the limit was reached, so the host's total does not matter
        incident = replace(incident, facts={**holder, **incident.facts})
    elif incident.kind != "engine_dead":
        # The host's limits and processes do not describe a device.
        near = [frame for frame in near if not _is_of_host(frame)]
    if incident.kind == _START_CHECK and context.sleeper_bytes:
        sleeper = Fact("sleeper_bytes", context.sleeper_bytes, "solved")
        incident = replace(incident, facts={**incident.facts, sleeper.name: sleeper})
    settings, complete = merged_settings(
        context.settings, given or {}, echo_complete=context.settings_complete
    )
    # The message's own numbers take precedence, then the caller's settings, the engine's list, and
    # loose text last.
    loose = {**context.later_for(scanned.process), **incident.facts}
    for frame in near:
        loose.update(frame.facts)
    settings, stated = without_contradicted(settings, {**loose, **scanned.own}, complete=complete)
    facts = with_requested_share(_without_profiling_blocks({**loose, **stated, **scanned.own}))
    if scanned.phase_is_known:
        phase = incident.phase
    else:
        phase = nearest_phase(near) or incident.phase
    if "start_frames" in facts and phase in _OF_REQUESTS:
        # The engine or its compiler runs the model to measure it.
        phase = "profile_run"
    version = facts.get("framework_version")
    evidence = incident.evidence
    for frame in near:
        if (frame.phase or frame.facts) and frame.evidence not in evidence:
            evidence = (*evidence, frame.evidence)
    if "model" in facts:
        named = None
    else:
        named = named_model("\n".join(line.text for line in evidence))
    if named is not None:
        facts["stated_model"] = Fact("stated_model", named)
    location = incident.location
    if names_service and context.service is not None:
        location = replace(
            location, process=": ".join(filter(None, (context.service, location.process)))
        )
    return replace(
        incident,
        location=location,
        kind=scanned.becomes.get(phase, incident.kind),
        phase=phase,
        framework=_host(scanned, near),
        facts=MappingProxyType(facts),
        evidence=evidence,
        settings=MappingProxyType(dict(settings)),
        settings_complete=complete,
        framework_version=str(version.value) if version else incident.framework_version,
    )


def _ranks_seen(scanned: ScannedIncident) -> int:
    """Return the number of tensor-parallel ranks by process names, rounded up to a power of two."""
    names = (*scanned.context.by_process, scanned.process, *scanned.incident.also_in)
    seen = set()
    for name in names:
        if name and (found := _RANK.search(name)):
            seen.add(int(found.group(1)))
    if len(seen) > 1:
        return 1 << max(seen).bit_length()
    return 1


def _is_of_host(frame: Near) -> bool:
    """Return whether a line has facts of the host only."""
    return bool(frame.facts) and all(name.startswith(_OF_HOST) for name in frame.facts)


def drop_recovered(found: list[ScannedIncident]) -> list[ScannedIncident]:
    """Drop failures that the engine survived, and wrappers whose cause is present."""
    standing = []
    causes = set()
    for one in found:
        if one.is_recovered:
            continue
        if one.incident.kind != "engine_dead":
            causes.add(one.context.number)
        elif one.context.ending.was_stop_requested_before(one.last_line):
            continue
        standing.append(one)
    # An engine's end only wraps a failure of the same start.
    kept = []
    for one in standing:
        is_wrapper = one.incident.kind == "engine_dead" and one.context.number in causes
        if not is_wrapper:
            kept.append(one)
    return kept


def complete_start(
    context: Context, given: Mapping[str, SettingInForce] | None
) -> EngineStart | None:
    """Return what a start printed, or None if the text shows no start.

    ``given`` as in ``concluded_incident``.
    """
    facts = context.all_facts()
    if not context.announced and not facts.keys() & _START_FACTS:
        return None
    settings, complete = merged_settings(
        context.settings, given or {}, echo_complete=context.settings_complete
    )
    settings, stated = without_contradicted(settings, facts, complete=complete)
    facts = with_requested_share(_without_profiling_blocks({**facts, **stated}))
    version = facts.get("framework_version")
    return EngineStart(
        number=context.number,
        framework=next(iter(context.frameworks.values()), "unknown"),
        framework_version=str(version.value) if version else None,
        line=context.first_line,
        facts=MappingProxyType(facts),
        settings=MappingProxyType(dict(settings)),
        settings_complete=complete,
    )


def _without_profiling_blocks(facts: dict[str, Fact]) -> dict[str, Fact]:
    """Drop a number of KV blocks that the user did not set: the engine profiled with it."""
    is_set = facts.get("num_gpu_blocks_override_set")
    if is_set is None or is_set.value:
        return facts
    found = {}
    for name, fact in facts.items():
        if name not in _BLOCKS_OF_OVERRIDE:
            found[name] = fact
    return found


def _host(scanned: ScannedIncident, near: list[Near]) -> str:
    """Return the engine around the failed code.

    A message of torch, the driver or numpy does not name it.
    """
    named = scanned.incident.framework
    if named not in {*NO_ENGINE, "unknown"} and not (
        named == "host" and "array_shape" in scanned.own
    ):
        return named
    own = None
    for frame in near:
        own = own or frame.framework
    own = own or scanned.context.framework_for(scanned.process)
    if own in {None, *NO_ENGINE}:
        for line in scanned.incident.evidence:
            if _VLLM_RECORD.search(line.text):
                return "vllm"
    return own or named


LOOK_BACK_LINES: Final = 6
SEAM_LINES: Final = 2
SEAM_CHARS: Final = 120
MAX_EVIDENCE_CHARS: Final = 400
MAX_STARTS: Final = 100
MAX_OPEN: Final = 200
# Lines until the search for all anchors pays off.
_FINDER_AFTER: Final = 4000
_OUT_OF_TIME: Final = "exceeded its time limit, so oomguard skipped it"
__all__ = ["MAX_EVIDENCE_CHARS", "Scanner", "scan"]


@dataclass(slots=True, eq=False, repr=False)
class _Stream:
    """Hold the state of one service's lines on one stream.

    ``last`` are its last lines, ``taken`` the lines of each process's messages. ``raising`` is the
    process whose record ended with a traceback, which unnamed lines continue.
    """

    name: str
    service: str | None
    last: deque[tuple[int, Line, PlainLine]] = field(
        default_factory=lambda: deque(maxlen=LOOK_BACK_LINES)
    )
    taken: dict[str | None, tuple[int, int, ScannedIncident | None]] = field(default_factory=dict)
    order: int = 0
    raising: str | None = None

    def attributed(self, plain: PlainLine) -> PlainLine:
        """Return a line with the process whose record it continues.

        SGLang names a rank once for a whole traceback.
        """
        if plain.process is not None or plain.is_record:
            if plain.text.rstrip().endswith(f"{TRACEBACK}:"):
                self.raising = plain.process
            else:
                self.raising = None
        if self.raising is None:
            return plain
        return replace(plain, process=self.raising)


def _quote(line: Line) -> Evidence:
    return Evidence(strip_escapes(line.text).strip()[:MAX_EVIDENCE_CHARS], line.number)


class Scanner:
    """Scan lines from ``push``; ``diagnosis`` closes the streams and returns all incidents.

    Args:
        rules: the signatures to search for.
        clock: returns the time of the last line, like ``time.monotonic`` for live lines.
        unrecognized: whether to report a failure without a signature if nothing else is found.
    """

    def __init__(
        self,
        rules: RuleSet,
        clock: Callable[[], float] = time.monotonic,
        *,
        unrecognized: bool = False,
    ) -> None:
        self._rules = rules
        self._anchors = rules.wordings_by_anchor
        self._inside = anchor_index(rules.anchors).inside
        self._quotations = rules.quotations
        self._streams: dict[tuple[str, str | None], _Stream] = {}
        self._services: dict[str, Services] = {}
        self._open: list[tuple[_Stream, Window]] = []
        self.found = ScannedIncidents(clock)
        # All starts, in order of time.
        self._contexts = [Context(1)]
        self._latest: dict[str | None, Context] = {
            None: self._contexts[0]
        }  # the last start of each service
        self._own = OwnReports()
        self._tasks = HostTasks()
        self._frames = UserFrames()
        self._errors = EngineErrors()
        self._clock = clock
        self._finder: Finder | None = None
        self._unrecognized = Unrecognized()
        self._is_unrecognized_taken = unrecognized
        self._looked = self._repeats = 0
        self._time = SearchTime()
        self._left_out: dict[
            tuple[str, ...], str
            # The note on each pattern that exceeded its time.
        ] = {}

    def _context_of(self, service: str | None) -> Context:
        """Return the last start of a service.

        Lines before the first named service belong to the first one.
        """
        if service not in self._latest:
            is_first = len(self._latest) == 1
            if not is_first and len(self._contexts) < MAX_STARTS:
                self._contexts.append(Context(len(self._contexts) + 1))
            if is_first:
                self._latest[service] = self._latest[None]
            else:
                self._latest[service] = self._contexts[-1]
            self._latest[service].service = service
        return self._latest[service]

    def push(self, line: Line | Gap, stream: str = "") -> None:
        """Add the next line of a stream.

        Args:
            line: the line, or a ``Gap`` for omitted lines: the next line does not continue the last
                one.
            stream: the name of its stream; standard output and error may take turns.
        """
        if isinstance(line, Gap):
            for owner, window in self._open:
                window.complete = window.complete or owner.name == stream
            self._settle()
            for each in self._streams.values():
                if each.name == stream:
                    each.last.clear()
                    each.raising = None
            self._unrecognized.leave_out()
            self._errors.leave_out()
            self._looked = max(
                self._looked, _FINDER_AFTER
            )  # a finder has omitted lines, so it is ready
            self._repeats += line.repeats
            return
        plain = peel(line.text)
        service = self._services.setdefault(stream, Services()).of(plain)
        state = self._streams.get((stream, service))
        if state is None:
            state = self._streams[stream, service] = _Stream(stream, service)
        if self._own.takes(line, plain, stream):
            return
        plain = state.attributed(plain)
        state.order += 1
        self._frames.see(plain.text, plain.process, line.number)
        for owner, window in self._open:
            if owner is state:
                window.extend(line, plain, state.order)
        self._settle()
        if "\x1b" in line.text:
            text = strip_escapes(line.text)
        else:
            text = line.text
        self._unrecognized.see(text)
        if self._may_hold(text):
            anchors = self._inside(text)
        else:
            anchors = []
        if anchors or self._tasks.is_open:
            self._tasks.see(text, line.number)
        heads = []
        for one in anchors:
            if one in ENGINE_ENDS:
                heads.append(one)
        self._errors.see(
            line, plain, heads, self._context_of(service), self._clock() if heads else 0.0
        )
        across = self._across_the_seam(state, line, text)
        if across:
            # The message begins on earlier lines, so the window opens there and adds this line.
            window = open_window(list(state.last), across)
            self._open.append((state, window))
            window.extend(line, plain, state.order)
        state.last.append((state.order, line, plain))
        if anchors:
            self._open.append((state, open_window(list(state.last), self._candidates(anchors))))

    def _may_hold(self, text: str) -> bool:
        """Return whether a text may contain an anchor; long inputs use one search for all."""
        self._looked += 1
        if self._looked < _FINDER_AFTER:
            return True
        self._finder = self._finder or finder(self._rules.anchors)
        return self._finder.holds(text.encode("utf-8", "surrogatepass"))

    def _across_the_seam(self, state: _Stream, line: Line, text: str) -> list[Candidate]:
        """Return the wordings whose anchor a wrapped line or a segment's end cut."""
        if not state.last or (not line.continued and excludes_failure(text)):
            # A record without failure: no message continues on it.
            return []
        before = [previous.text for _, previous, _ in state.last][-SEAM_LINES:]
        head = text[:SEAM_CHARS].lstrip(" \t#>|*")
        if line.continued:
            glue = ""
        else:
            glue = " "
        seam = (
            words_of(" ".join(part[-SEAM_CHARS:].strip() for part in before))
            + glue
            + words_of(head)
        )
        if not self._may_hold(seam):
            return []
        words = words_of(text)
        inside = "\0".join(map(words_of, before))
        across = []
        for anchor in self._inside(seam):
            if anchor not in words and anchor not in inside:
                across.append(anchor)
        return self._candidates(across)

    def _candidates(self, anchors: Iterable[str]) -> list[Candidate]:
        """Return the wordings of these anchors, in the order of the files."""
        numbered: list[tuple[int, Candidate]] = []
        for anchor in anchors:
            numbered += self._anchors.get(anchor, ())
        numbered.sort(key=itemgetter(0))
        return [candidate for _, candidate in numbered]

    def _settle(self) -> None:
        """Close the complete windows in the order in which they opened, over all streams.

        A start must come after the failure that it follows, and a failure on one stream after the
        start that another stream announced. A silent stream delays the others only until
        ``MAX_OPEN`` windows wait.
        """
        while self._open and (self._open[0][1].complete or len(self._open) > MAX_OPEN):
            self._close(*self._open.pop(0))

    def _close(self, state: _Stream, window: Window) -> None:
        context = self._context_of(state.service)
        failures = []
        echoes = []
        for candidate in window.candidates:
            hit = self._match(candidate, window)
            if hit is None:
                continue
            if hit.kind is not None:
                failures.append(hit)
                continue
            context = self._note(hit, window, context)
            if hit.wording.anchor == ECHO_ANCHOR:
                echoes.append(hit.position)
        for position in echoes:
            context.note_echo(window.text[position:])
        if not failures:
            self._unrecognized.consider(window, context, lambda hit: self._is_quoted(hit, window))
            return
        best = best_of(failures)
        first = window.orders[best.first]
        last = window.orders[best.last]
        # A line of an accepted message may contain another wording's anchor; it is the same
        # message.
        taken = state.taken.get(window.process)
        if taken is not None and taken[0] <= first <= taken[1]:
            if taken[2] is not None:
                taken[2].say_more(best)
            return
        line = window.lines[best.first]
        if self._is_quoted(best, window):
            return
        evidence = _quote(line)
        location = Location(line.number, line.byte, window.process)
        found = self.found.take(best, location, evidence, context)
        state.taken[window.process] = (first, last, found)
        if found is not None:
            self._attach(found, window.lines[best.last].number)

    def _match(self, candidate: Candidate, window: Window) -> Hit | None:
        signature, wording = candidate
        name = (signature.path, wording.key, wording.anchor)
        if name in self._left_out:
            return None
        try:
            return match(signature, wording, window, self._time)
        except TimeoutError:
            place = ": ".join(filter(None, (signature.path, wording.key)))
            self._left_out[name] = f"{place}: a pattern for {wording.anchor!r} {_OUT_OF_TIME}"
            return None

    def _is_quoted(self, hit: Hit, window: Window) -> bool:
        return quoted(hit, window, self._quotations, self._time, self._leave_out) is not None

    def _leave_out(self, slow: Quotation) -> None:
        remaining = list(self._quotations)
        remaining.remove(slow)
        self._quotations = tuple(remaining)
        self._left_out["quotation", slow.name, slow.part] = (
            f"quotation {slow.name!r}: its pattern {_OUT_OF_TIME}"
        )

    def _note(self, hit: Hit, window: Window, context: Context) -> Context:
        """Add a line without failure; return its start: ``context``, or a new one."""
        begun = context.begun_by(hit, window.process, window.text[hit.position :])
        if begun is not None and len(self._contexts) < MAX_STARTS:
            begun.number = len(self._contexts) + 1
            self._contexts.append(begun)
            for service, latest in self._latest.items():
                if latest is context:
                    self._latest[service] = begun
            context = begun
        evidence = _quote(window.lines[hit.first])
        near = context.note(hit, window.process, evidence)
        if near is None:
            return context
        for found in self.found.all[-3:]:
            # The kernel's report of a kill is one message of many lines with numbers in between.
            if found.incident.kind == "host_oom":
                begin = found.incident.location.line
            else:
                begin = found.last_line
            is_near = (begin or 0) <= near.line <= found.last_line + NEAR_AFTER_LINES
            if found.context is context and is_near and near.of(found.process):
                found.near.append(near)
        return context

    def _attach(self, found: ScannedIncident, last_line: int) -> None:
        """Add the current knowledge about the failed process to an incident."""
        context = found.context
        process = found.process
        before = []
        for earlier in self.found.all[:-1]:
            if earlier.context is context and earlier.process == process:
                before.append(earlier.last_line)
        found.last_line = last_line
        found.near = context.near_frames(
            found.incident.location.line or 0, last_line, process, max(before, default=0)
        )
        known = {}
        evidence = found.incident.evidence
        for name, fact in context.facts_for(process).items():
            if name in found.incident.facts:
                continue
            known[name] = fact
            line = context.evidence_for(process, name)
            if line is not None and line not in evidence:
                evidence = (*evidence, line)
        found.incident = replace(
            found.incident,
            facts={**known, **self._frames.facts(process, last_line), **found.incident.facts},
            evidence=evidence,
            phase=found.incident.phase
            if found.incident.phase != "unknown"
            else context.phase_for(process) or "unknown",
        )

    @property
    def measured(self) -> dict[str, float]:
        """Return the run's latest own measurements outside failures, by fact in its unit."""
        return self._contexts[-1].numbers()

    def death(self) -> Incident | None:
        """Close the streams and return the death of the last started engine, or None.

        A death does not count if a later start served requests.
        """
        self.flush()
        if len(self._contexts) >= MAX_STARTS:
            # Later starts cannot be distinguished.
            return None
        last = self._contexts[-1]
        for c in reversed(self._contexts):
            if c.ending.death is not None or c.stands:
                last = c
                break
        return last.death

    def flush(self) -> None:
        """Close all open windows; later lines are not part of them."""
        while self._open:
            self._close(*self._open.pop(0))

    def diagnosis(
        self,
        source: str = "",
        *,
        given: Mapping[str, SettingInForce] | None = None,
        newer_than_s: float | None = None,
    ) -> Diagnosis:
        """Close the streams and return the incidents and starts so far.

        Args:
            source: the path as the user gave it.
            given: the caller's settings; they take precedence over the engine's list.
            newer_than_s: ignore incidents last seen before this ``time.monotonic``, in seconds;
                None for all.
        """
        self.flush()
        found = []
        for one in self.found.all:
            if newer_than_s is None or one.seen_s >= newer_than_s:
                found.append(one)
        kept = drop_recovered(found)
        notes = (*self._time.notes, *self._left_out.values())
        if self._is_unrecognized_taken and not any(f.incident.is_oom for f in self.found.all):
            found_so = self._unrecognized.failure()
            if found_so is not None:
                # The failure without a signature explains the engine's end.
                kept = [one for one in kept if one.incident.kind != "engine_dead"]
                kept.append(found_so)
            notes += () if kept else self._unrecognized.notes
        kept = sorted([*kept, *self._errors.deaths(self.found.all, newer_than_s)], key=_line)
        starts = []
        for context in self._contexts:
            start = complete_start(context, given)
            if start is not None:
                starts.append(start)
        notes += () if kept else self._own.note
        repeats = self._repeats + self.found.counted
        if repeats and kept:
            more = f"{repeats:,} more lines repeat these messages, often with other numbers"
            notes += (f"{more}; oomguard only counted them",)
        several = len({context.service for context in self._contexts}) > 1
        alone = len(kept) == 1
        incidents = []
        for one in kept:
            incidents.append(
                complete_incident(one, given, self._tasks, alone=alone, names_service=several)
            )
        return Diagnosis(source, self._with_causes(kept, incidents), notes, tuple(starts))

    def _with_causes(
        self, kept: Sequence[ScannedIncident], incidents: Sequence[Incident]
    ) -> tuple[Incident, ...]:
        """Return the incidents, each engine's end with its exception or signal."""
        afters = [0, *(found.last_line for found in kept)][: len(kept)]
        befores: list[int | None] = [*map(_line, kept[1:]), None][: len(kept)]
        rows = []
        for one, found, after, before in zip(incidents, kept, afters, befores, strict=True):
            if one.kind == "engine_dead":
                rows.append(self._errors.explained(one, found.context.service, after, before))
            else:
                rows.append(one)
        return tuple(rows)


def _line(found: ScannedIncident) -> int:
    return found.incident.location.line or 0


def scan(
    lines: Iterable[Line | Gap],
    rules: RuleSet,
    source: str = "",
    *,
    given: Mapping[str, SettingInForce] | None = None,
    unrecognized: bool = False,
) -> Diagnosis:
    """Scan a finite stream of lines, with the arguments of ``Scanner`` and its ``diagnosis``."""
    scanner = Scanner(rules, unrecognized=unrecognized)
    for line in lines:
        scanner.push(line)
    return scanner.diagnosis(source, given=given)
