"""Strip one raw line: remove collectors' wrappers, terminal escapes and logger prefixes.

A log may come through Docker, kubectl, journald, SLURM or a launcher, and each adds a prefix. This
module keeps the names of the process and its service or pod, and drops the rest. Evidence always
quotes the raw line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.text import strip_escapes

# Python and IPython begin a traceback like this; Python adds a colon.
TRACEBACK: Final = "Traceback (most recent call last)"
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
        rf"\s*{_STAMP} [\w.-]+ [\w./@-]+\[\d+\]:\s",  # journald with full dates
        rf"\s*{_STAMP}(?:\s+[|-])?(?:\s+(?:{_LEVEL}|[\w.:<>]+(?: \[[^\]\n]{{1,60}}\])?)\s+[|-](?=\s)){{1,3}}\s?",
        rf"\s*{_STAMP}\s+(?:{_LEVEL}\s+(?!\d\d-\d\d ))?",  # a level and a short date belong to vLLM
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
    process = next((one.process for one in peeled if one.process), None)
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
                    process = name or process  # a front end prints another process's line
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
        return [record["text"]]  # loguru's line, with its source record
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
