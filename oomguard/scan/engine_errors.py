"""Find the exceptions and signals that ended an engine's processes, line by line.

A front end only reports that one of its processes died. The exception is above, or in another
process's lines.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from oomguard.core.facts import Fact, FactValue
from oomguard.core.files import read_tables
from oomguard.core.incident import Evidence, Incident, Location
from oomguard.core.text import strip_escapes
from oomguard.scan.context import ENGINE_ROLES, Context, role
from oomguard.scan.incidents import FOLD_LINES, ScannedIncident
from oomguard.scan.lines import TRACEBACK, PlainLine
from oomguard.scan.source import Line

MAX_ERRORS: Final = 400
_MAX_CHARS: Final = 300
_MAX_RAW_CHARS: Final = 400
_FRONT_END: Final = "APIServer"
_TRACEBACK: Final = f"{TRACEBACK}:"
_DIRECT: Final = "The above exception was the direct cause of the following exception:"
_DURING: Final = "During handling of the above exception, another exception occurred:"
# The largest number of lines, from other processes or warnings, between a head and its traceback or
# between two frames.
_MOST_BETWEEN: Final = 40
# These patterns compile on first use, because most logs contain no dead engine.
_EXCEPTION: Final = (
    r"(?:(?:[A-Za-z_]\w*\.)+[A-Z]\w*|\w*(?:Error|Exception|Exit|Interrupt|Iteration|Timeout|Warning))"
    r"(?:\(\w[\w.]*\))?(?::|\s*$)"
)
_BARE: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): \S")
# The message of these continues on the following lines.
_GOES_ON: Final = r":\s*$|\bvalidation errors? for \w+$"
# The text before a head on its line: names of a logger, and brackets.
_LEAD: Final = r"(?:[\w.-]+: |\[[^\]]*\]\s*)*"
# Literals of the patterns below; most lines contain none.
_MARKS: Final = (
    "atal",
    "ignal",
    "SIG",
    "egfault",
    "egmentation",
    "Watchdog",
    "terminate called",
    "what():",
    "Failed: Cuda",
    "; error",
)
# Most lines begin nothing; this finds the others.
_MAY_BEGIN: Final = re.compile(
    "|".join(map(re.escape, (*_MARKS, "Error: ", "Exception: ", _TRACEBACK)))
)
_OTHER_ERROR: Final = (
    r"(?P<text>Watchdog caught collective operation timeout: .+|Failed: Cuda error .+"
    r"|ptxas \S+, line \d+; error +: .+|ptxas fatal +: .+)|^\s*what\(\):\s+(?P<what>\S.*)"
)
_SIGNALS: Final = {
    "SIGILL": 4, "SIGTRAP": 5, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15,
    "Illegal instruction": 4, "Aborted": 6, "Bus error": 7, "Floating-point exception": 8, "Floating point exception": 8,
    "Segmentation fault": 11, "Segfault encountered": 11,
}  # fmt: skip
_SIGNAL: Final = (
    r"Fatal Python error: (?P<name>Illegal instruction|Aborted|Bus error|Floating.point exception|Segmentation fault)"
    r"|\*\*\* (?P<name1>SIG[A-Z]+) (?:received|\()|(?P<name2>Segfault encountered)"
    r"|(?:Caught|exited on|shutdown with) signal (?P<number>\d{1,2})\b|\bSignal: [\w ]+ \((?P<number1>\d{1,2})\)"
    r"|^(?P<name3>Segmentation fault|Illegal instruction|Bus error|Aborted) \(core dumped\)"
)
# An engine that was asked to stop ends with these.
_STOPS: Final = frozenset({"KeyboardInterrupt", "SystemExit"})
# A process dies from these signals at once, so no later exception ended it.
_CRASHES: Final = frozenset({4, 5, 7, 8, 11})
_OF_MEMORY: Final = (
    r"(?i)\bout[ _-]of[ _-](?:\w+[ _-])?memory|OutOfMemory|MemoryError|insufficient memory|not enough memory|no available memory"
    r"|cannot allocate|fail\w* to allocate|alloc\w* failed|\bENOMEM\b"
)
# NCCL reports a CUDA error without its name, which may be running out of memory.
_HIDES_CAUSE: Final = r"(?i)\bNCCL error\b.*\bunhandled cuda error|ncclUnhandledCudaError"
# NCCL's own output on the same line of a paste.
_NCCL_RECORD: Final = r"\s\S+:\d+:\d+ \[\d+\] NCCL (?:INFO|WARN)\b.*"
# Engines print these lines above the traceback that ended one of their processes. Only with these
# the engine itself is dead; after other lines it may continue.
_FATAL: Final = {
    "EngineCore failed to start": "vllm",
    "EngineCore encountered a fatal error": "vllm",
    "EngineCore hit an exception": "vllm",
    "Process EngineCore": "vllm",
    "WorkerProc failed to start": "vllm",
    "Engine background task failed": "vllm",
    "Scheduler hit an exception": "sglang",
    "Failed to initialize executor on rank": "tensorrt-llm",
    "Executor worker initialization error": "tensorrt-llm",
    "Shard complete standard error output": "tgi",
}
# An ERROR record of a vLLM process that runs the model. A paste may have several on one line.
_RECORD: Final = r"\bERROR \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[\w/.-]+\.py:\d+\] ?"
_LOGGED: Final = r"\bERROR \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?(?:[\w/.-]*/)?(?:core|multiproc_executor|multiproc_worker_utils)\.py:\d+\]"
# Only a running engine prints this.
_SERVES: Final = re.compile(r'HTTP/\d\.\d" 200\b|Avg prompt throughput')
# The source of a line: the service or pod, and the process.
_Source = tuple[str | None, str | None]


class EngineError(NamedTuple):
    """Hold an exception, or a message that replaces one.

    ``is_headed`` means that the engine itself printed it as its end.
    """

    text: str
    line: int
    raw: str
    source: _Source
    is_headed: bool

    @property
    def level(self) -> int:
        """Return how much the exception explains.

        0: the reason; 1: it may follow from another process's end; 2: it only reports that another
        process failed.
        """
        data = _data()
        name = _name(self.text)
        if name in data.exceptions or any(words in self.text for words in data.parents_messages):
            return 2
        return int(
            self.follows
            or any(words in self.text for words in data.quoting)
            or is_of_another_rank(self.text)
        )

    @property
    def follows(self) -> bool:
        """Return whether it only follows from another process's end."""
        data = _data()
        return _name(self.text) in data.consequences or self.text.startswith(
            data.consequence_messages
        )


class _Signal(NamedTuple):
    number: int
    line: int
    raw: str
    source: _Source


class _Death(NamedTuple):
    """Hold the position where an engine reported its own end."""

    framework: str
    message: str
    location: Location
    raw: str
    context: Context
    seen_s: float


@dataclass(slots=True)
class _Reading:
    """Hold a traceback during reading.

    It has exceptions, oldest first, each with the words that join it to the previous one.
    """

    state: str  # headed, frames, behind, joined
    is_headed: bool = False
    death: _Death | None = None
    links: list[tuple[EngineError, str]] = field(default_factory=list)
    joint: str = ""
    between: int = _MOST_BETWEEN
    goes_on: bool = False


class EngineErrors:
    """Collect an input's exceptions, signals, and engines' reports of their own end."""

    def __init__(self) -> None:
        self._errors: deque[EngineError] = deque(maxlen=MAX_ERRORS)
        self._signals: deque[_Signal] = deque(maxlen=MAX_ERRORS)
        self._deaths: deque[_Death] = deque(maxlen=MAX_ERRORS)
        self._readings: dict[_Source, _Reading] = {}
        self._logged: list[_Death] = []  # by an engine's process, without its own report of an end

    def see(
        self, line: Line, plain: PlainLine, heads: Sequence[str], context: Context, seen_s: float
    ) -> None:
        """Add the next line.

        Args:
            line: the line as printed.
            plain: the same line without prefixes.
            heads: the literals of ``ENGINE_ENDS`` in it.
            context: its start of an engine.
            seen_s: the time of the line in seconds.
        """
        if self._logged and _SERVES.search(plain.text):
            self._logged = []
        if plain.process is not None and plain.process.startswith(_FRONT_END):
            return
        source = (context.service, plain.process)
        if not heads and source not in self._readings and not _MAY_BEGIN.search(plain.text):
            return
        for text in _texts(plain.text):
            if (
                " ERROR " in line.text
                and _BARE.match(text)
                and (logged := re.search(_LOGGED, line.text)) is not None
            ):
                location = Location(line.number, line.byte, plain.process)
                death = _Death("vllm", logged.group(), location, _raw(line), context, seen_s)
                self._logged = [*self._logged[-1:], death._replace(message=_clipped(text))]
            head = next(
                (
                    one
                    for one in heads
                    if one in text and re.fullmatch(_LEAD, text[: text.index(one)])
                ),
                None,
            )
            if head is not None:
                self._begin(head, text, line, source, context, seen_s)
            elif not self._take(text, line, source):
                self._look(text, line, source)

    def leave_out(self) -> None:
        """Record an omission: the next line does not continue a traceback."""
        for source in list(self._readings):
            self._finish(source)

    def _begin(
        self, head: str, text: str, line: Line, source: _Source, context: Context, seen_s: float
    ) -> None:
        self._finish(source)
        framework = _FATAL.get(head)
        self._readings[source] = reading = _Reading(
            "frames" if _TRACEBACK in text else "headed", is_headed=True
        )
        if framework is not None:
            location = Location(line.number, line.byte, source[1])
            reading.death = _Death(
                framework, text.strip()[:_MAX_CHARS], location, _raw(line), context, seen_s
            )
        if (
            framework == "tensorrt-llm" and _TRACEBACK not in text
        ):  # its message has the exception's text but no traceback
            message = text[text.index(head) + len(head) :].partition(": ")[2]
            if message:
                self._link(reading, message, line, source)

    def _take(self, text: str, line: Line, source: _Source) -> bool:
        """Add a line to its process's traceback; return False if it does not belong to it."""
        reading = self._readings.get(source)
        if reading is None:
            return False
        if reading.state == "behind":
            return self._is_behind(reading, text, source)
        if _TRACEBACK in text:
            reading.state = "frames"
            return True
        if not text.strip() or (
            reading.state == "frames" and text.startswith((" ", "\t", 'File "'))
        ):
            return True
        if reading.state != "joined" and _is_exception(text, in_frames=reading.state == "frames"):
            self._link(reading, text, line, source)
            return True
        reading.between -= 1
        if reading.between < 0 or reading.state == "joined":
            self._finish(source)
        return False

    def _is_behind(self, reading: _Reading, text: str, source: _Source) -> bool:
        """Return whether a line after an exception belongs to it.

        It does if it continues the message or joins it to the next exception.
        """
        if not text.strip():
            return True
        if text.startswith((_DIRECT, _DURING)):
            reading.state, reading.joint = "joined", text.strip()
            return True
        if reading.goes_on and _TRACEBACK not in text:
            self._go_on(reading, text)
            return True
        self._finish(source)
        return False

    def _look(self, text: str, line: Line, source: _Source) -> None:
        """Check what begins on a line that continues nothing."""
        if _TRACEBACK in text:
            self._readings[source] = _Reading("frames")
        elif _BARE.match(text):
            self._readings[source] = reading = _Reading("behind")
            self._link(reading, text, line, source)
        elif any(mark in text for mark in _MARKS):
            if found := re.search(_OTHER_ERROR, text):
                message = found["text"] or found["what"]
                self._errors.append(
                    EngineError(_clipped(message), line.number, _raw(line), source, is_headed=False)
                )
            elif found := re.search(_SIGNAL, text):
                groups = found.groupdict()
                number = groups["number"] or groups["number1"]
                name = next(
                    (groups[key] for key in ("name", "name1", "name2", "name3") if groups[key]), ""
                )
                known = (
                    int(number)
                    if number
                    else _SIGNALS.get(name.replace("Floating point", "Floating-point"))
                )
                if known:
                    self._signals.append(_Signal(known, line.number, _raw(line), source))

    @staticmethod
    def _link(reading: _Reading, text: str, line: Line, source: _Source) -> None:
        error = EngineError(_clipped(text), line.number, _raw(line), source, reading.is_headed)
        reading.links.append((error, reading.joint))
        reading.state, reading.joint, reading.goes_on = (
            "behind",
            "",
            bool(re.search(_GOES_ON, error.text)),
        )

    @staticmethod
    def _go_on(reading: _Reading, text: str) -> None:
        """Add the line after an exception to its message.

        A single word there is the name of a field, whose message follows.
        """
        error, joint = reading.links[-1]
        reading.links[-1] = (error._replace(text=_clipped(f"{error.text} {text.strip()}")), joint)
        reading.goes_on = " " not in text.strip()

    def _finish(self, source: _Source) -> None:
        reading = self._readings.pop(source, None)
        if reading is None:
            return
        if reading.links:
            self._errors.append(_root(reading.links))
        is_stop = bool(reading.links) and _name(self._errors[-1].text) in _STOPS
        if reading.death is not None and not is_stop:  # without an exception its traceback was cut
            self._deaths.append(reading.death)

    def deaths(
        self, found: Iterable[ScannedIncident], newer_than_s: float | None
    ) -> list[ScannedIncident]:
        """Return the engines' own reports of an end that no incident covers, one per start.

        Args:
            found: all incidents of the input.
            newer_than_s: ignore lines printed before this time in seconds; None for all.
        """
        self.leave_out()
        known = list(found)
        if not known and not self._deaths:
            self._deaths.extend(self._logged[-1:])
        silent: dict[int, ScannedIncident] = {}
        for death in self._deaths:
            line = death.location.line or 0
            context = death.context
            if (
                newer_than_s is not None and death.seen_s < newer_than_s
            ) or context.number in silent:
                continue
            if context.ending.was_stop_requested_before(line) or any(
                one.context is context or abs(one.last_line - line) <= FOLD_LINES for one in known
            ):
                continue
            silent[context.number] = _scanned(death)
        return list(silent.values())

    def explained(
        self, incident: Incident, service: str | None, after: int, before: int | None
    ) -> Incident:
        """Return an engine's end with the exception or signal that caused it, if there is one.

        Args:
            incident: the end.
            service: the service or pod of the engine; None if the text has none.
            after: the last line of the previous failure.
            before: the line of the next failure; None if there is none.
        """
        self.leave_out()
        death = incident.location.line or 0
        error = _first_cause(
            [
                one
                for one in self._errors
                if one.source[0] == service and _within(one.line, after, before)
            ],
            death,
        )
        known = incident.facts.get("exit_signal")
        if known is None:
            signal = None
        else:
            signal = _Signal(int(known.value), known.line or death, "", (service, None))
        if signal is None and (error is None or not error.is_headed):
            signals = [
                one
                for one in self._signals
                if one.source[0] == service and _within(one.line, after, before)
            ]
            signal = next(
                reversed([one for one in signals if one.line <= death] or signals[:1]), None
            )
        if error is not None and signal is not None:
            begins_before = error.is_headed and error.line < signal.line
            crashed = signal.number in _CRASHES and not begins_before
            if crashed or error.follows:
                error = None
        facts = dict(incident.facts)
        evidence = list(incident.evidence)
        if error is not None:
            facts |= _facts(error)
            evidence.insert(0, Evidence(error.raw, error.line))
        if signal is not None and known is None:
            facts["exit_signal"] = Fact("exit_signal", signal.number, line=signal.line)
            evidence.append(Evidence(signal.raw, signal.line))
        return replace(incident, facts=facts, evidence=tuple(dict.fromkeys(evidence)))


def _is_exception(text: str, *, in_frames: bool) -> bool:
    """Return whether a line is an exception; after frames it needs no message."""
    if in_frames:
        found = re.match(_EXCEPTION, text)
    else:
        found = _BARE.match(text)
    return found is not None


def _texts(text: str) -> Sequence[str]:
    """Return the records of a line: usually one, or several in a paste or a collector's line."""
    if "\n" in text:
        return text.split("\n")
    if " ERROR " in text:
        return re.split(_RECORD, text)
    return (text,)


def is_of_another_rank(text: str) -> bool:
    """Return whether an exception says that its rank ended because another one is gone."""
    lower = text.lower()
    return any(words in lower for words in _data().of_other_ranks)


def passes_on(exception: str) -> bool:
    """Return whether an exception's line only reports that another process failed."""
    return _name(exception) in _data().exceptions or is_of_another_rank(exception)


def _first_cause(errors: Sequence[EngineError], death: int) -> EngineError | None:
    """Return the exception that caused the end.

    Among those with the best level it is the first of the last group printed together.
    """
    for level in (0, 1):
        ones = [one for one in errors if one.level == level]
        engines = [one for one in ones if role(one.source[1]) in ENGINE_ROLES]
        for group in ([one for one in ones if one.is_headed], engines, ones):
            exceptions = sorted(
                [one for one in group if one.line <= death] or group, key=lambda one: one.line
            )
            if not exceptions:
                continue
            first = len(exceptions) - 1
            while first and exceptions[first].line - exceptions[first - 1].line <= FOLD_LINES:
                first -= 1
            return exceptions[first]
    return None


def _root(links: Sequence[tuple[EngineError, str]]) -> EngineError:
    """Return the root of a chain of exceptions.

    That is the first one of ``raise … from …``. An exception raised while handling another explains
    more, unless it only passes that one on.
    """
    parts: list[list[EngineError]] = []
    for error, joint in links:
        if joint == _DIRECT and parts:
            parts[-1].append(error)
        else:
            parts.append([error])
    roots = [min(part, key=lambda error: error.level) for part in parts]
    return min(reversed(roots), key=lambda error: error.level)


def _scanned(death: _Death) -> ScannedIncident:
    context = death.context
    process = death.location.process
    line = death.location.line or 0
    incident = Incident(
        kind="engine_dead",
        message=death.message,
        framework=death.framework,
        location=death.location,
        phase=context.phase_for(process) or "unknown",
        facts=context.facts_for(process),
        evidence=(Evidence(death.raw, line),),
        start=context.number,
    )
    near = context.near_frames(line, line + FOLD_LINES, process, 0)
    return ScannedIncident(incident, context, {}, death.seen_s, line, {"engine_dead"}, near=near)


def _facts(error: EngineError) -> dict[str, Fact]:
    of_memory = re.search(_OF_MEMORY, error.text) is not None
    values: dict[str, FactValue] = {
        "engine_error": error.text,
        "engine_error_line": error.line,
        "engine_error_of_memory": of_memory,
        "engine_error_hides_cause": not of_memory
        and re.search(_HIDES_CAUSE, error.text) is not None,
        "engine_error_follows": error.follows,
        "engine_error_is_its_end": error.is_headed and not is_of_another_rank(error.text),
    }
    return {name: Fact(name, value, line=error.line) for name, value in values.items()}


def _within(line: int, after: int, before: int | None) -> bool:
    return after < line and (before is None or line < before)


def _raw(line: Line) -> str:
    return strip_escapes(line.text).strip()[:_MAX_RAW_CHARS]


def _clipped(text: str) -> str:
    return " ".join(re.sub(_NCCL_RECORD, "", text).split())[:_MAX_CHARS]


def _name(exception: str) -> str:
    return exception.partition(":")[0].rpartition(".")[2].partition("(")[0].strip()


class _Data(NamedTuple):
    exceptions: frozenset[str]
    consequences: frozenset[str]
    consequence_messages: tuple[str, ...]
    of_other_ranks: tuple[str, ...]
    parents_messages: tuple[str, ...]
    quoting: tuple[str, ...]


@functools.cache
def _data() -> _Data:
    table = next(iter(read_tables("engine_errors", [Path(__file__).with_suffix(".toml")]).values()))
    return _Data(
        frozenset(table["exceptions"]),
        frozenset(table["consequences"]),
        tuple(table["consequence_messages"]),
        tuple(text.lower() for text in table["of_other_ranks"]),
        tuple(table["parents_messages"]),
        tuple(table["quoting"]),
    )
