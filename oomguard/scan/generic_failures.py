"""Detect out-of-memory failures without a signature, and reports without a log.

The rule is small on purpose. It accepts the last line of a traceback with an out-of-memory type or
the words "out of memory". It also accepts a line of level ERROR, CRITICAL or FATAL with these
words. It counts only if the scan found nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from oomguard.core.incident import Evidence, Incident, Location
from oomguard.core.text import strip_escapes
from oomguard.rules.signature import Signature, Wording
from oomguard.scan.context import Context
from oomguard.scan.incidents import ScannedIncident
from oomguard.scan.pattern_search import Hit, Window

REPORT_NOTE: Final = "This reads like a report; diagnose the log itself"
# The rule's confidence: oomguard changes and reruns nothing because of it.
CERTAINTY_RATIO: Final = 0.8
_LINE_CHARS: Final = 500
_PHRASE: Final = (
    r"(?i:\b(?:ran |run |runs |running )?out[ _-]of[ _-](?:[a-z]{2,12}[ _-]){0,2}memory\b)"
)
_OUT_OF_MEMORY: Final = re.compile(_PHRASE)
# The line after the frames, which are indented.
_EXCEPTION: Final = (
    r"(?:\A|\n)[ \t]+\S[^\n]*\n(?P<line>(?:\w+(?:\.|::))*(?:\w*OutOfMemory\w*|\w*MemoryError)(?=:|\s*(?:\n|\Z))[^\n]*"
    rf"|(?:\w+(?:\.|::))*\w*(?:Error|Exception):[^\n]{{0,{_LINE_CHARS}}}?{_PHRASE}[^\n]*)"
)
_FRAME: Final = r'File "[^"\n]+", line \d|Traceback \(most recent call last\)'
# A sentence that lists the levels is no log record: "an ERROR, CRITICAL or FATAL line".
_LEVEL: Final = (
    r"(?:\A|[\s\[(|])(?<!\ban )(?<!\bor )(?:ERROR|CRITICAL|FATAL)\b(?!, [A-Z]+ | or )|\blevel=(?:error|critical|fatal)\b|\[(?:error|critical|fatal)\]"
    r'|"(?:level|severity|lvl)": ?"(?i:error|critical|fatal)"|\A[EF]\d{4} '
)
_LEVEL_CHARS: Final = 120
# A condition, advice or a denial before the words, or an attempt that the program survives.
_UNLESS_BEFORE: Final = (
    r"(?i)\b(?:if|when|whenever|unless|may|might|could|would|should|can|avoid\w*|prevent\w*|not|never|without|no longer|possibl[ey])\b"
    r"[^.;\n]*\Z"
)
_GOES_ON: Final = r"(?i)\bretr(?:y|ying|ied)\b|\bfall(?:ing|s)? back\b|\bskipping\b|\breducing\b"
# The first match in the line is the kind.
_KINDS: Final = (
    ("nccl_oom", r"(?i)\bnccl|\brccl"),
    ("cublas_alloc", r"(?i)\b(?:cublas|cudnn|cusolver|hipblas)"),
    ("llamacpp_oom", r"(?i)\bggml|\bllama[._-]"),
    ("xla_oom", r"(?i)\bxla|\bjax|\btpu\b|RESOURCE_EXHAUSTED"),
    ("hip_oom", r"(?i)\bhip|\brocm"),
    ("xpu_oom", r"(?i)\bxpu\b|\bsycl\b|level[_ ]zero"),
    ("npu_oom", r"(?i)\bnpu\b|\bascend"),
    ("mps_oom", r"(?i)\bmps\b|\bmetal\b"),
    ("cuda_oom", r"(?i)cuda|\bgpus?\b|\bvram\b|\bdevice\b"),
    (
        "host_oom",
        r"(?i)\bhost\b|\bsystem\b|\bcpu\b|(?<![A-Za-z])ram\b|\bcontainer\b|\bcgroup\b|(?<!OutOf)MemoryError",
    ),
)
# A line of a log, a traceback or a command's output.
_OF_A_LOG: Final = r"\s*(?:[\w.]|::)*(?:Error|Exception|OutOfMemory\w*)\b ?[:(]|\s*[{<|]|\s*\d+%"
_AMID_A_LOG: Final = (
    r"\d\d:\d\d:\d\d|\b(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\blevel=\w|Traceback \(most|\bFile \"[^\"\n]+\", line \d"
    r"|\bpid[ =]\d"
)
_MENTION: Final = rf"{_PHRASE}|\bOOM(?:s|ed|'d|ing)?\b|(?i:\b(?:gpu|cuda) memory error)"
_OF_A_PERSON: Final = r"\b(?:I|I'm|I've|[Ww]e|[Mm]y|[Oo]ur|me)\b|\?\s*\Z"
_SENTENCE: Final = r"(?:\b[a-zI']+\b,? ){3}"
_WORDING: Final = Wording(anchor="", pattern=None, source="oomguard/scan/generic_failures.py")
_SIGNATURE: Final = Signature("", "other", "unknown", "unknown", (_WORDING,), ())


class Unrecognized:
    """Collect the first failure without a signature, and check for a report without a log."""

    def __init__(self) -> None:
        self._first: tuple[Hit, Window, Context] | None = None
        self._is_log = self._is_mentioned = self._is_of_a_person = False

    def see(self, text: str) -> None:
        """Add the next line of the input."""
        if self._is_log:
            return
        self._is_log = (
            re.match(_OF_A_LOG, text) is not None or re.search(_AMID_A_LOG, text) is not None
        )
        if re.search(_MENTION, text) and re.search(_SENTENCE, text):
            self._is_mentioned = True
        if re.search(_OF_A_PERSON, text):
            self._is_of_a_person = True

    def leave_out(self) -> None:
        """Record an omission, because a report must be short and complete."""
        self._is_log = True

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on a report that describes a failure in sentences without any log line."""
        is_report = self._is_mentioned and self._is_of_a_person and not self._is_log
        if is_report:
            return (REPORT_NOTE,)
        return ()

    def consider(self, window: Window, context: Context, is_quoted: Callable[[Hit], bool]) -> None:
        """Check a window without a known failure; ``is_quoted`` means that it only quotes one."""
        if self._first is None and (hit := _message(window)) is not None and not is_quoted(hit):
            self._first = hit, window, context

    def failure(self) -> ScannedIncident | None:
        """Return the failure, or None if there is none or the engine recovered."""
        if self._first is None:
            return None
        found = _scanned(*self._first)
        is_recovered = any(
            "recovered" in near.facts and near.line >= found.last_line for near in found.near
        )
        if is_recovered:
            return None
        return found


def _message(window: Window) -> Hit | None:
    """Return the message on the window's own line, or None if it reports no failure."""
    begin, end = window.anchor_span
    text = window.text[:end]
    if re.search(_FRAME, text):
        for found in re.finditer(_EXCEPTION, text):
            if begin <= found.start("line") < end:
                return _hit(window, found.start("line"), found["line"])
    at = _OUT_OF_MEMORY.search(text, begin)
    raw = strip_escapes(window.lines[window.anchor].text)[:_LEVEL_CHARS]
    if at is None or not re.search(_LEVEL, raw):
        return None
    line, position = window.line_around(at.start())
    if re.search(_UNLESS_BEFORE, line[:position]) or re.search(_GOES_ON, line):
        return None
    return _hit(window, at.start(), line)


def _hit(window: Window, position: int, line: str) -> Hit:
    first = window.index(position)
    message = " ".join(line[:_LINE_CHARS].split())
    return Hit(_SIGNATURE, _WORDING, first, first, len(line), message, {}, position)


def _scanned(hit: Hit, window: Window, context: Context) -> ScannedIncident:
    line = window.lines[hit.first]
    process = window.process
    kind = next((kind for kind, pattern in _KINDS if re.search(pattern, hit.message)), "other")
    incident = Incident(
        kind=kind,
        message=hit.message,
        framework=context.framework_for(process) or "unknown",
        location=Location(line.number, line.byte, process),
        phase=context.phase_for(process) or "unknown",
        facts=context.facts_for(process),
        evidence=(Evidence(strip_escapes(line.text).strip()[:_LINE_CHARS], line.number),),
        start=context.number,
        certainty_ratio=CERTAINTY_RATIO,
    )
    return ScannedIncident(
        incident,
        context,
        own={},
        seen_s=0.0,
        last_line=line.number,
        kinds={kind},
        near=context.near_frames(line.number, window.lines[-1].number, process, 0),
        phase_is_known=incident.phase != "unknown",
    )
