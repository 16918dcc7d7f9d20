"""Collect incidents: fold repeats, join wrappers with causes, group the ranks of a failure.

A failure that no signature describes becomes an incident too, if the scan found nothing else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from oomguard.core.facts import Fact, number_of
from oomguard.core.incident import Diagnosis, Evidence, Incident, Location
from oomguard.core.text import strip_escapes
from oomguard.rules.signature import Signature, Wording
from oomguard.scan.context import NEAR_AFTER_LINES, NO_ENGINE, Context, Near, related, role
from oomguard.scan.pattern_search import Hit, Window, agree, refines

# ``srun --label`` puts the rank before each line: ``3: RuntimeError: …``.

_LABEL: Final = re.compile(r" {0,3}(\d{1,4}): (?=\S)")
# A job script's output file (sbatch(1)); there a number before a line is a label.
_JOB_OUTPUT: Final = re.compile(r"(?:^|/)slurm-\d+[^/]*$")
_RANK: Final = re.compile(r"rank ?\d+")


def with_labels(diagnosis: Diagnosis) -> Diagnosis:
    """Return a log's diagnosis with the rank of each labelled incident in its process."""
    is_labelled = _JOB_OUTPUT.search(diagnosis.source) is not None
    return replace(
        diagnosis,
        incidents=tuple(with_label(one, is_labelled=is_labelled) for one in diagnosis.incidents),
    )


def with_label(incident: Incident, *, is_labelled: bool) -> Incident:
    """Return an incident with the rank from its lines' labels, or unchanged.

    Args:
        incident: the incident.
        is_labelled: whether the lines certainly have labels. Otherwise two of its lines must have
            the same number, because line numbers (``grep -n``) never repeat.
    """
    named = incident.location.process
    if not incident.evidence or (named is not None and _RANK.match(named)):
        return incident
    own, *others = incident.evidence
    label = _LABEL.match(own.text)
    if label is None or not (
        is_labelled or any(_is_of(label[1], other.text) for other in others if other != own)
    ):
        return incident
    if named is None:
        process = f"rank {label[1]}"
    else:
        process = f"rank {label[1]}: {named}"
    return replace(incident, location=replace(incident.location, process=process))


def _is_of(rank: str, text: str) -> bool:
    label = _LABEL.match(text)
    return label is not None and label[1] == rank


MAX_INCIDENTS = 1000
# A server that catches each failure prints one wording with ever new numbers. The first failures of
# a wording and its newest one are kept, and the others are counted.
MAX_ALIKE = 50
# Within this many lines a message with fewer numbers repeats the same failure, and a wrapper
# describes its cause.
FOLD_LINES = 400
# This only applies if no other message explains more of the same end.
_SIGKILL_ONLY = "sigkill_only"
# The kernel, a shell, a cluster and a job manager each report a part of one end in their own words.
_TOLD_IN_PIECES = frozenset({"host_oom"})
_OF_TELLER = frozenset({"host_manager", "host_phase", "host_scope"})
MAX_ALSO_IN = 100
MAX_WRAPPERS = 20


# One share applies to all ranks, so the device with the least free memory decides.
_LEAST_FREE_DECIDES = frozenset({"startup_free_memory_below_utilization"})
_FREE = "device_free_bytes"
_DEVICE = "gpu_index"
_SAME_IN_RANKS = ("tried_bytes", "device_total_bytes")


def _of_ranks(one: Mapping[str, Fact], other: Mapping[str, Fact]) -> bool:
    """Return whether two messages without a process come from two ranks.

    They do if both failed the same request on devices of the same size.
    """
    if _DEVICE not in one or _DEVICE not in other or one[_DEVICE].value == other[_DEVICE].value:
        return False
    return all(
        name in one and name in other and agree(one[name], other[name]) for name in _SAME_IN_RANKS
    )


def _least_free(facts: Mapping[str, Fact], known: Mapping[str, Fact]) -> Mapping[str, Fact]:
    """Return the numbers of a rank whose device has less free memory than known, or nothing."""
    free = number_of(facts, _FREE)
    least = number_of(known, _FREE)
    if free is not None and least is not None and free < least:
        return facts
    return {}


Telling = tuple[str, frozenset[str]]


def _telling(hit: Hit) -> Telling:
    """Return the key of a repeated message: its wording and the names of its facts."""
    return hit.wording.anchor, frozenset(hit.facts)


@dataclass(slots=True, eq=False)
class ScannedIncident:
    """Hold one incident during the scan.

    ``own`` are the facts of its message alone. ``began_s`` and ``seen_s`` are its first and last
    time (``time.monotonic`` seconds). ``kinds`` are all kinds of its messages, ``near`` the frames
    next to it. ``becomes`` and ``wraps`` come from its signature. ``tellings`` are its wordings,
    each with the names of its facts.
    """

    incident: Incident
    context: Context
    own: dict[str, Fact]
    seen_s: float
    last_line: int
    kinds: set[str]
    near: list[Near] = field(default_factory=list)
    becomes: dict[str, str] = field(default_factory=dict)
    phase_is_known: bool = False
    wraps: tuple[str, ...] = ()
    began_s: float | None = None
    tellings: set[Telling] = field(default_factory=set)

    def say_more(self, hit: Hit) -> None:
        """Add another wording's numbers for the same message; the more exact one of two wins."""
        if hit.kind not in self.kinds and hit.kind not in self.wraps:
            return
        line = self.incident.location.line
        new = {
            k: replace(f, line=line)
            for k, f in hit.facts.items()
            if k not in self.own or refines(f, self.own[k])
        }
        if _SIGKILL_ONLY not in hit.facts:
            self.own.pop(_SIGKILL_ONLY, None)
            known = {k: f for k, f in self.incident.facts.items() if k != _SIGKILL_ONLY}
        else:
            known = dict(self.incident.facts)
        self.own.update(new)
        self.incident = replace(self.incident, facts={**known, **new})

    @property
    def process(self) -> str | None:
        """Return the process that printed it first."""
        return self.incident.location.process


class ScannedIncidents:
    """Hold all incidents of one input in order of time.

    ``clock`` returns the time of the current line. ``counted`` is the number of failures that were
    not kept, because many of their wording were.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.all: list[ScannedIncident] = []
        self.counted = 0
        self._alike: dict[tuple[int, str | None, Telling], list[ScannedIncident]] = {}
        self._clock = clock

    def take(
        self, hit: Hit, location: Location, evidence: Evidence, context: Context
    ) -> ScannedIncident | None:
        """Fold a hit into a known incident, or return it as a new one; None if folded or too many.

        Args:
            hit: the found wording.
            location: the start of its message.
            evidence: its first line as printed.
            context: its start of an engine.
        """
        facts = {name: replace(fact, line=location.line) for name, fact in hit.facts.items()}
        kind = hit.kind or "other"
        process = location.process
        line = location.line or 0
        # A failure in the output of a client's or a proxy's container is another program's.
        recent = [f for f in reversed(self.all) if f.context is context or context.is_empty]
        if kind == "engine_dead" and recent and recent[0].incident.kind != kind:
            self._pass_on(recent[0], evidence, hit.framework)
            return None
        for known in recent:
            if self._told_again(known, kind, facts, process, line, _telling(hit)):
                return None
        inner = next((f for f in recent if self._wraps(hit, f, process, line)), None)
        if inner is not None:
            self._wrap(inner, hit, facts, evidence, line)
            return None
        alike = self._alike.setdefault((context.number, process, _telling(hit)), [])
        if len(alike) >= MAX_ALIKE:
            self.all.remove(alike.pop())
            self.counted += 1
        if len(self.all) >= MAX_INCIDENTS:
            return None
        incident = Incident(
            kind=kind,
            message=hit.message,
            framework=hit.framework,
            location=location,
            phase=hit.wording.phase or hit.signature.phase,
            facts=facts,
            evidence=(evidence,),
            start=context.number,
        )
        found = ScannedIncident(
            incident,
            context,
            own=facts,
            seen_s=self._clock(),
            last_line=line,
            kinds={kind},
            becomes=dict(hit.signature.becomes),
            phase_is_known=incident.phase != "unknown",
            wraps=hit.signature.wraps,
            began_s=self._clock(),
            tellings={_telling(hit)},
        )
        self.all.append(found)
        alike.append(found)
        context.failed = True
        return found

    def began_s(self) -> float | None:
        """Return the time of the first memory failure in seconds, or None if unknown."""
        began = (found.began_s for found in self.all if found.incident.is_oom)
        return min((at_s for at_s in began if at_s is not None), default=None)

    def _pass_on(self, known: ScannedIncident, evidence: Evidence, framework: str) -> None:
        if known.incident.framework in {*NO_ENGINE, "transformers"}:  # its parent names the engine
            known.incident = replace(known.incident, framework=framework)
        if evidence not in known.incident.wrappers and len(known.incident.wrappers) < MAX_WRAPPERS:
            known.incident = replace(known.incident, wrappers=(*known.incident.wrappers, evidence))
        known.seen_s = self._clock()

    def _told_again(
        self,
        known: ScannedIncident,
        kind: str,
        facts: dict[str, Fact],
        process: str | None,
        line: int,
        telling: Telling,
    ) -> bool:
        if kind not in known.kinds:
            return False
        close = line - known.last_line <= FOLD_LINES
        if (_SIGKILL_ONLY in facts) != (_SIGKILL_ONLY in known.own):
            facts = {name: fact for name, fact in facts.items() if name != _SIGKILL_ONLY}
        own = {
            name: fact for name, fact in known.own.items() if name != _SIGKILL_ONLY or name in facts
        }
        both = (facts.keys() & own.keys()) - _OF_TELLER
        agreeing = all(agree(facts[name], known.own[name]) for name in both)
        same = agreeing and facts.keys() == own.keys() and bool(facts)
        less = (
            agreeing
            and close
            and (
                kind in _TOLD_IN_PIECES or facts.keys() <= own.keys() or own.keys() <= facts.keys()
            )
        )
        # Ranks of one job fail together, each with its own numbers.
        sibling = (
            close
            and process != known.process
            and process is not None
            and role(process) == role(known.process)
        )
        sibling = sibling or (
            close and process is None and known.process is None and _of_ranks(facts, own)
        )
        if not (same or (less and related(process, known.process)) or sibling):
            return False
        incident = known.incident
        named = process
        if process is None and sibling:
            named = f"GPU {facts['gpu_index'].value}"
        if (
            named is not None
            and len(incident.also_in) < MAX_ALSO_IN
            and named not in {known.process, *incident.also_in}
            and (sibling or role(process) == role(known.process))
        ):
            incident = replace(incident, also_in=(*incident.also_in, named))
        if sibling and kind in _LEAST_FREE_DECIDES:
            least = _least_free(facts, own)
            known.own = {**own, **least}
            incident = replace(incident, facts={**incident.facts, **least})
        if not sibling:
            exact = {name: facts[name] for name in both if refines(facts[name], known.own[name])}
            more = {name: fact for name, fact in facts.items() if name not in own}
            dropped = known.own.keys() - own.keys()
            known.own = {**own, **more, **exact}
            told = {name: fact for name, fact in incident.facts.items() if name not in dropped}
            incident = replace(incident, facts={**told, **more, **exact})
        if kind in _TOLD_IN_PIECES and incident.phase == "unknown":
            incident = replace(incident, phase=known.context.phase_for(process) or "unknown")
        # Another wording, or one with other facts, describes the same moment.
        again = sibling or telling in known.tellings
        known.tellings.add(telling)
        known.incident = replace(incident, repeated=incident.repeated + again)
        known.last_line, known.seen_s = max(known.last_line, line), self._clock()
        return True

    @staticmethod
    def _wraps(hit: Hit, known: ScannedIncident, process: str | None, line: int) -> bool:
        return (
            known.incident.kind in hit.signature.wraps
            and line - known.last_line <= FOLD_LINES
            and related(process, known.process)
        )

    def _wrap(
        self,
        inner: ScannedIncident,
        hit: Hit,
        facts: dict[str, Fact],
        evidence: Evidence,
        line: int,
    ) -> None:
        """Use the kind of the outer message; the inner one came first and has the numbers.

        The frames between both belong to the inner one, because an exception's cause is printed
        first.
        """
        incident = inner.incident
        between = (
            n for n in inner.context.near if inner.last_line + NEAR_AFTER_LINES < n.line <= line
        )
        inner.near.extend(n for n in between if n.of(inner.process))
        inner.own = {**facts, **inner.own}
        inner.kinds.add(hit.kind or "other")
        inner.becomes = dict(hit.signature.becomes)
        inner.phase_is_known = True
        inner.incident = replace(
            incident,
            kind=hit.kind or incident.kind,
            phase=hit.wording.phase or hit.signature.phase,
            framework=hit.framework if hit.framework != "torch" else incident.framework,
            facts={**facts, **incident.facts},
            evidence=(*incident.evidence, evidence),
        )
        inner.last_line, inner.seen_s = max(inner.last_line, line), self._clock()


# Out-of-memory failures without a signature, and reports without a log.
#
# The rule is small on purpose. It accepts the last line of a traceback with an out-of-memory type
# or the words "out of memory". It also accepts a line of level ERROR, CRITICAL or FATAL with these
# words. It counts only if the scan found nothing else.

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
_WORDING: Final = Wording(anchor="", pattern=None, source="oomguard/scan/incidents.py")
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
