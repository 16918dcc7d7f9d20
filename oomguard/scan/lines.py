"""Undo what collectors, loggers and container runtimes did to lines: prefixes, wrappers and cuts.

A log may come through Docker, kubectl, journald, SLURM or a launcher, and each adds a prefix. This
module keeps the names of the process and its service or pod, and drops the rest. Evidence always
quotes the raw line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import InputError
from oomguard.core.text import strip_escapes
from oomguard.scan.source import MAX_SEGMENT_CHARS, Gap, Line, open_log, read_lines

# Python and IPython begin a traceback like this; Python adds a colon.
TRACEBACK: Final = "Traceback (most recent call last)"
# Files whose frames the user cannot change.
LIBRARY: Final = (
    r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python\d|^<(?!ipython)"
    r"|[/\\](?:torch|transformers|accelerate|vllm|sglang|peft|oomguard[/\\](?:testing|guarding|engines|mapping))[/\\]"
)
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = (
    r"(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|[Dd]ebug|[Ii]nfo|[Ww]arning|[Ee]rror)"
)

# Prefixes of a line. The group ``name`` is its process, ``service`` its container.
_PREFIXES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # vLLM (EngineCore_DP0 pid=812) and Ray (RayWorkerWrapper pid=7, ip=10.0.0.2) [repeated 3x
        # across cluster]
        r"\s*\((?P<name>[A-Za-z][\w.:-]*(?: rank=\d+| [A-Z]+\d*)* pid=\d+)(?:, ip=[\w.:]+)?\)(?: \[repeated \d+x[^\]]*\])?\s?",
        r"\s*\[(?P<name>(?:Worker|VllmWorker|EngineCore|APIServer)\w* pid=\d+)\]\s?",
        # torchrun, mpirun, accelerate
        r"\s*\[(?P<name>(?:rank|default)\d+)\]:\s?",
        r"\s*\[(?P<name>\d+,\d+)\]<std(?:out|err)>:\s?",
        # vLLM's logger: "INFO 11-21 07:14:52 [core.py:133]", V0 "INFO 01-01 00:00:00
        # worker.py:267]"
        rf"\s*{_LEVEL}:?\s+\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? (?:\[[^\]]{{1,80}}:\d+\]|[\w/.-]+\.py:\d+\])\s?",
        r"\s*\[[\w/.-]+\.py:\d+\]\s?",
        # SGLang: "[2026-04-26 14:38:11 TP0]", "[2026-04-26 14:38:11 DP0 TP1 EP0]"
        rf"\s*\[{_STAMP}(?: [IWEF] \d+ \d+)?(?: (?P<name>(?:[DTPEA]{{1,3}}P\d+ ?)+))?\]\s?",
        # DeepSpeed's launcher and Airflow's task log, after their time stamps
        rf"\s*\[{_LEVEL}\] \[[\w.]+:\d+:[\w<>]+\]\s?",
        rf"\s*(?:\[\d{{4}}-\d\d-\d\d, \d\d:\d\d:\d\d \w+\] )?\{{[\w.]+:\d+\}} {_LEVEL} - ",
        # container runtimes: "2026-01-01T00:00:00.123456789Z stdout F ", kubectl --timestamps,
        # Python's logging
        rf"\s*{_STAMP}\s+std(?:out|err) [FP]\s?",
        # journald with full dates
        rf"\s*{_STAMP} [\w.-]+ [\w./@-]+\[\d+\]:\s",
        rf"\s*{_STAMP}(?:\s+[|-])?(?:\s+(?:{_LEVEL}|[\w.:<>]+(?: \[[^\]\n]{{1,60}}\])?)\s+[|-](?=\s)){{1,3}}\s?",
        # A level and a short date belong to vLLM.
        rf"\s*{_STAMP}\s+(?:{_LEVEL}\s+(?!\d\d-\d\d ))?",
        # kubectl --prefix, docker compose and swarm, honcho, pm2
        r"\s*\[(?P<service>pod/[\w./-]+)\]\s?",
        r"(?:\d\d:\d\d:\d\d |\d{1,3}\|)?(?P<service>[\w.@-]{1,60})\s{1,30}\|\s?(?=\S)",
        r"\s*\|\s+(?=\[?\d{4}-)",
        # journald and syslog
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w./@-]+(?:\[\d+\])?: ",
        # glog, as NCCL and TensorFlow print it
        r"\s*\[?[IWEF]\d{3,4} \d\d:\d\d:\d\d\.\d+(?:\s+\d+)? [\w.]+:\d+\]\s?",
        # SLURM's srun --label
        r" {0,3}\d{1,4}: (?=\S)",
        # a quotation, a comment, a bullet
        r"\s*(?:[>#]+|//)\s(?=\s*\S)",
    )
)
# Color codes as text from a collector: syslog's "#033[2m", a repr's "\\x1b[0m".
_WRITTEN_ESCAPE: Final = re.compile(r"(?:#033|\\x1b|\\u001b|\\033|\^\[|␛)\[[\d;]*m")
# In "C:\\lib\\torch\\nn" the two characters of a line break are part of a name.
_WINDOWS_PATH: Final = re.compile(r"\b[A-Za-z]:\\\\?\w|site-packages\\\\?\w|custom_nodes\\")
# rich pads its console to the full width and prints the record's source in the right margin.
_MARGIN: Final = re.compile(r" {2,}(?:[\w.-]{1,60}\.py:\d+ *)?\Z")
_MAX_PREFIXES: Final = 8
_FRONT_END: Final = "APIServer"
_MARGIN_CHARS: Final = 40
# A record's level is within this many characters.
_LEVEL_CHARS: Final = 80
# Collectors store the line in these fields. The ones below identify a collector's or a chat's
# object.
_TEXT_FIELDS: Final = (
    "log",
    "message",
    "msg",
    "MESSAGE",
    "line",
    "event",
    "textPayload",
    "jsonPayload",
)
_ERROR_FIELDS: Final = (
    "error",
    "err",
    "exc_info",
    "exception",
    "stack",
    "stack_trace",
    "stacktrace",
    "traceback",
    "detail",
)
_RECORD_FIELDS: Final = frozenset(
    {
        "stream",
        "time",
        "timestamp",
        "ts",
        "@timestamp",
        "level",
        "severity",
        "lvl",
        "logger",
        "kubernetes",
        "levelname",
        "asctime",
        "record",
        "PRIORITY",
        "_PID",
        "SYSLOG_IDENTIFIER",
        "__REALTIME_TIMESTAMP",
        "container_name",
        "labels",
    }
)
_CHAT_FIELDS: Final = frozenset(
    {"role", "content", "prompt", "messages", "prompts", "question", "answer", "body", "title"}
)


@dataclass(frozen=True, slots=True)
class PlainLine:
    """Hold one line's words without prefixes, and its process (None: none).

    ``service`` is the first column if it may be a container (``vllm-1 |``, ``[pod/llm-0]``).
    ``is_record`` means that there was also a process, a logger or a clock.
    """

    text: str
    process: str | None
    service: str | None = field(default=None, compare=False)
    is_record: bool = field(default=False, compare=False)


def peel(line: str) -> PlainLine:
    """Remove a collector's wrapping and escapes, then all process, rank and logger prefixes."""
    # A collector's object may contain several lines, each with its own prefix.
    inner, container = unwrap(line)
    peeled = [_peel_one(part) for part in inner.split("\n")]
    process = None
    for one in peeled:
        if one.process:
            process = one.process
            break
    text = without_escaped_breaks("\n".join(one.text for one in peeled))
    return PlainLine(text, process, container or peeled[0].service, peeled[0].is_record)


def _peel_one(line: str) -> PlainLine:
    text = strip_escapes(line)
    process = None
    service = None
    is_record = False
    if "[" in text and _WRITTEN_ESCAPE.search(text):
        text = _WRITTEN_ESCAPE.sub("", text)
    for _ in range(_MAX_PREFIXES):
        for pattern in _PREFIXES:
            match = pattern.match(text)
            if match and match.end():
                text = text[match.end() :]
                named = match.groupdict()
                name = (named.get("name") or "").strip() or None
                if process is None or (name is not None and process.startswith(_FRONT_END)):
                    # A front end prints another process's line.
                    process = name or process
                service = service or named.get("service")
                is_record = is_record or "service" not in named
                break
        else:
            break
    if text.endswith("  ") or ".py:" in text[-_MARGIN_CHARS:]:
        text = _MARGIN.sub("", text)
    return PlainLine(text, process, service, is_record)


def unwrap(line: str) -> tuple[str, str | None]:
    """Return the line in a collector's JSON object, and its pod or container.

    The object may come from Docker, CRI, journald or a JSON logger. Any other line returns
    unchanged.
    """
    if not line.lstrip().startswith("{") or '"' not in line:
        return line, None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line, None
    if (
        not isinstance(record, dict)
        or _CHAT_FIELDS & record.keys()
        or not _RECORD_FIELDS & record.keys()
    ):
        return line, None
    texts = _texts_of(record)
    return "\n".join(part.rstrip("\n") for part in texts) if texts else line, _service_of(record)


def _service_of(record: Mapping[str, Any]) -> str | None:
    """Return a collector's name of the pod or container."""
    about = record.get("kubernetes")
    if isinstance(about, dict):
        pod = about.get("pod_name")
    else:
        pod = None
    container = record.get("container_name") or record.get("CONTAINER_NAME")
    if isinstance(pod, str) and pod:
        return f"pod/{pod}"
    if isinstance(container, str) and container:
        return f"container/{container.strip('/')}"
    return None


def _texts_of(record: Mapping[str, Any], depth: int = 2) -> list[str]:
    """Return the texts of a collector's object, including a nested error or payload."""
    if _CHAT_FIELDS & record.keys():
        return []
    if isinstance(record.get("text"), str) and isinstance(record.get("record"), dict):
        # loguru's line, with its source record.
        return [record["text"]]
    texts: list[str] = []
    for name in (*_TEXT_FIELDS, *_ERROR_FIELDS):
        value = record.get(name)
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict) and depth:
            texts += _texts_of(value, depth - 1)
    return texts


def without_escaped_breaks(text: str) -> str:
    """Convert line breaks written as two characters (JSON, ``repr``) to real ones."""
    if "\\n" not in text or _WINDOWS_PATH.search(text):
        return text
    return text.replace("\\r\\n", "\n").replace("\\n", "\n")


def excludes_failure(line: str) -> bool:
    """Return whether a line is a record whose level excludes a failure; messages end before it."""
    return line.startswith("INFO ") or " INFO " in line[:_LEVEL_CHARS]


def words_of(text: str) -> str:
    """Return a line's words with single spaces, as anchors need them."""
    return " ".join(text.split())


# Join the pieces of long lines that a container runtime cut.
#
# The form is that of Kubernetes' container runtimes (CRI): ``STAMP stderr P text``. ``P`` tags a
# piece that another one follows, ``F`` the last one; fluent-bit stores the tag in its JSON. Docker's
# JSON has none: a piece of 16 KiB without a line break continues. Other runtimes cut at 16 KiB by
# default. Pieces of standard output and error may alternate, and a rotation may separate them.

_PIECE: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) (?P<stream>std(?:out|err)) (?P<tag>[PF])(?::\S*)? "
)


_TAGS: Final = ("logtag", "_p")
# The buffer of moby/daemon/logger/copier.go, 28, whose last character may be cut.
_DOCKER_BYTES: Final = (16 << 10) - 4


@dataclass(slots=True, eq=False, repr=False)
class _Begun:
    """Hold an unfinished line: its first piece with the time stamp, and all words so far.

    ``record`` is the first JSON object.
    """

    first: Line
    texts: list[str]
    chars: int
    record: dict[str, Any] | None = None

    @property
    def line(self) -> Line:
        whole = "".join(self.texts)
        if self.record is not None:
            whole = json.dumps({**self.record, "log": whole}, ensure_ascii=False)
        return self.first._replace(text=whole)


class Pieces:
    """Join pieces to whole lines; lines without a tag pass unchanged.

    Args:
        begun_before: streams whose line began in the previous log, which already has it; its rest
            is dropped here.
    """

    def __init__(self, begun_before: Iterable[str] = ()) -> None:
        self._begun: dict[str, _Begun] = {}
        self._before = set(begun_before)
        self._last: tuple[str, bool] | None = (
            # Of the previous line: its stream, and whether another piece follows.
            None
        )

    @property
    def open(self) -> frozenset[str]:
        """Return the streams whose last line is not complete."""
        return frozenset(self._begun)

    def feed(self, line: Line) -> Iterator[Line]:
        """Yield the lines that are now complete, at the position of their first piece."""
        if (
            line.continued and self._last is not None and self._last[1]
        ):  # one piece is longer than a segment
            yield from self._add(self._last[0], line, line.text)
            return
        if line.continued:
            found = None
        else:
            found = piece(line.text, may_end=bool(self._begun))
        if found is None:
            if not line.continued:
                self._last = None
            yield line
            return
        stream, tag, text = found
        self._last = (stream, tag == "P")
        if stream in self._before:
            if tag == "F":
                self._before.remove(stream)
        elif tag == "P":
            yield from self._add(stream, line, text)
        elif (begun := self._begun.pop(stream, None)) is None:
            yield line
        else:
            begun.texts.append(text)
            yield begun.line

    def _add(self, stream: str, line: Line, text: str) -> Iterator[Line]:
        begun = self._begun.get(stream)
        if begun is None:
            if stream not in self._before:
                record = _record(line.text)
                self._begun[stream] = _Begun(
                    line, [line.text if record is None else text], len(line.text), record
                )
            return
        begun.texts.append(text)
        begun.chars += len(text)
        # The limit bounds the memory.
        if begun.chars > MAX_SEGMENT_CHARS:
            yield begun.line
            self._begun[stream] = _Begun(line._replace(continued=True), [], 0, begun.record)

    def end(self) -> Iterator[Line]:
        """Yield the unfinished lines."""
        begun = self._begun
        self._begun = {}
        self._last = None
        unfinished = []
        for one in begun.values():
            if one.texts:
                unfinished.append(one.line)
        yield from sorted(unfinished, key=attrgetter("byte"))


def piece(text: str, *, may_end: bool = False) -> tuple[str, str, str] | None:
    """Return stream, tag and words of a container runtime's line, or None.

    ``may_end`` means that a line has begun, so JSON without a tag may be its end.
    """
    if text.startswith("{"):
        is_asked = may_end or len(text) > _DOCKER_BYTES or any(f'"{tag}"' in text for tag in _TAGS)
        if is_asked:
            return _json_piece(text)
        return None
    found = _PIECE.match(text)
    return found and (found["stream"], found["tag"], text[found.end() :])


def _json_piece(text: str) -> tuple[str, str, str] | None:
    record = _record(text)
    if record is None:
        return None
    log = record["log"]
    stream = str(record.get("stream", ""))
    tag = None
    for name in _TAGS:
        if record.get(name) in ("P", "F"):
            tag = record[name]
            break
    goes_on = not log.endswith("\n") and len(log.encode("utf-8", "replace")) >= _DOCKER_BYTES
    return stream, tag or ("P" if goes_on else "F"), log


def _record(text: str) -> dict[str, Any] | None:
    """Return the collector's object on a line, or None."""
    try:
        if text.startswith("{"):
            record = json.loads(text)
        else:
            record = None
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("log"), str):
        return record
    return None


def join_pieces(
    lines: Iterable[Line | Gap], begun_before: Iterable[str] = (), behind: Iterable[Line] = ()
) -> Iterator[Line | Gap]:
    """Yield lines with their pieces joined.

    Args:
        lines: the lines, with gaps for omitted lines.
        begun_before: as for ``Pieces``.
        behind: the lines of the next log; read only if a line is unfinished at the end.
    """
    pieces = Pieces(begun_before)
    for line in lines:
        if isinstance(line, Gap):
            yield from pieces.end()
            yield line
        else:
            yield from pieces.feed(line)
    still = set(pieces.open)
    for line in behind if still else ():
        found = piece(line.text)
        if found is not None and found[0] in still:
            yield from pieces.feed(line)
            still -= {found[0]} if found[1] == "F" else set()
        if not still:
            break
    yield from pieces.end()


# A rotation may cut a line between two logs of one container. It then belongs to the log where it
# began.
#
# The kubelet renames a full ``0.log`` to ``0.log.20251125-051410``, compresses it at the next
# rotation (``.gz``), and the runtime continues in a new ``0.log`` (kubernetes
# pkg/kubelet/logs/container_log_manager.go, 1.34). Logs behind a URL are read alone.

_NAME: Final = re.compile(r"(?P<instance>\d+\.log)(?:\.(?P<at>\d{8}-\d{6})(?:\.gz)?)?")
# A stream's last output is within this many lines of the end, and continues within as many of the
# next log.
_LINES: Final = 4096


def begun_before(path: str) -> frozenset[str]:
    """Return the streams whose first line here began in the previous log."""
    if not _begins_with_piece(path):
        return frozenset()
    before = log_before(path)
    if before is None:
        return frozenset()
    begun = set()
    for line in before[1]:
        found = piece(line.text)
        if found is None:
            continue
        stream, tag, _text = found
        # A stream's last piece decides whether its line goes on.
        if tag == "P":
            begun.add(stream)
        else:
            begun.discard(stream)
    return frozenset(begun)


def log_before(path: str) -> tuple[Path, list[Line]] | None:
    """Return path and last lines of the previous log, or None if missing or unreadable."""
    before = _neighbour(path, -1)
    if before is None:
        return None
    with contextlib.suppress(OSError, InputError), open_log(str(before)) as stream:
        return before, list(deque(read_lines(stream), maxlen=_LINES))
    return None


def lines_behind(path: str) -> Iterator[Line]:
    """Yield the first lines of the next log, or nothing without one."""
    behind = _neighbour(path, 1)
    if behind is not None:
        with contextlib.suppress(OSError, InputError), open_log(str(behind)) as stream:
            for _, line in zip(range(_LINES), read_lines(stream), strict=False):
                yield line


def _neighbour(path: str, step: int) -> Path | None:
    """Return the container's previous (-1) or next (1) log, or None."""
    named_so = _named(path)
    if named_so is None:
        return None
    path, own = named_so
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError, ValueError):
        for other in sorted(
            Path(path).parent.iterdir()
        ):  # during compression both exist, and the compressed one counts
            named = _NAME.fullmatch(other.name)
            if named is not None and named["instance"] == own["instance"]:
                found[named["at"] or "now"] = other
    # Digits come before letters, so the current log is last.
    order = sorted(found)
    if (own["at"] or "now") in order:
        at = order.index(own["at"] or "now") + step
    else:
        at = -1
    if 0 <= at < len(order):
        return found[order[at]]
    return None


def _named(path: str) -> tuple[str, re.Match[str]] | None:
    """Return a log's folder and its parsed name, or None if the kubelet did not name it."""
    if "://" in path or ".log" not in path:
        return None
    with contextlib.suppress(OSError, ValueError):
        if os.path.islink(path):  # noqa: PTH114 - takes any name; as in /var/log/containers
            path = os.path.realpath(path)
    own = _NAME.fullmatch(Path(path).name)
    if own is None:
        return None
    return (path, own)


def _begins_with_piece(path: str) -> bool:
    """Return whether a log is a container runtime's by name and first line, without a listing."""
    if _named(path) is None:
        return False
    with contextlib.suppress(OSError, InputError), open_log(path) as stream:
        return piece(next((line.text for line in read_lines(stream)), "")) is not None
    return False
