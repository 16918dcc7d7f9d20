"""Detect a hung server: watch it while it runs, report problems, and end it if the user wants
that.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from oomguard.analyst.link import current_link
from oomguard.analyst.nested_run import innermost_command
from oomguard.analyst.outcome import TerminationReason
from oomguard.core.http_port import HttpAddress, HttpPort, listening_at
from oomguard.core.incident import Attempt
from oomguard.core.log import get_logger
from oomguard.core.process import pid_of_run
from oomguard.engines.command import Launch
from oomguard.engines.server import ListenAddress, ServingNames, address_of, serving_names
from oomguard.supervisor import tree

# Find the processes of an engine below its server by their process titles, with state and CPU time.

_PROC: Final = Path("/proc")
# The kernel counts CPU time in these ticks.
_TICKS_A_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """Describe the processes of an engine, from /proc.

    Attributes:
        cores: the processes that run the engine's steps.
        stopped: the cores that a signal has stopped.
        cpu_s: the CPU seconds of all cores and workers since they began.
    """

    cores: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    cpu_s: float = 0.0


def engine_processes(root: int, titles: dict[str, Any]) -> EngineProcesses:
    """Return the engine's processes below ``root``; empty without process titles."""
    cores: list[int] = []
    cpu_s = 0.0
    for pid in tree.descendants(root):
        title = _title(pid)
        if _is(title, titles["core"]):
            cores.append(pid)
        elif not _is(title, titles["others"]):
            continue
        cpu_s += cpu_of(pid)
    stopped = []
    for pid in cores:
        if tree.is_stopped(pid):
            stopped.append(pid)
    return EngineProcesses(tuple(cores), tuple(stopped), cpu_s)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process without its children, or 0 if it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_A_S
    except (OSError, IndexError, ValueError):
        # The process ended in the meantime.
        return 0.0


def _is(title: str, endings: Sequence[str]) -> bool:
    return any(ending in title for ending in endings)


def _title(pid: int) -> str:
    """Return the first word of a process's command line, which a process title replaces."""
    words = tree.command_line(pid)
    return words[0] if words else ""


OK: Final = 200
NOBODY: Final = "nothing listens there"
# A healthy server answers within this time.
ANSWER_S: Final = 10.0
# A wrong port may answer with an endless file.
_MOST_BYTES: Final = 16 << 20
# the listening address, and the address for requests
_ANY: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold the status and text of an HTTP answer."""

    status: int
    text: str


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True)
class Server:
    """Hold a server's address and API key.

    Over TLS no certificate is checked, because the server is our own command.
    """

    address: ListenAddress
    tls: bool = False
    key: str | None = None

    def ask(
        self, path: str, *, limit_s: float, body: Mapping[str, Any] | None = None
    ) -> Answer | str:
        """Return the answer, or a short reason why none came within ``limit_s``."""
        until_s = time.monotonic() + limit_s
        connection = self._connection(limit_s)
        if self.key:
            headers = {"Authorization": f"Bearer {self.key}"}
        else:
            headers = {}
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                headers["Content-Type"] = "application/json"
                connection.request("POST", path, json.dumps(body), headers)
            # Subtract the time of the connection.
            if connection.sock is not None:
                connection.sock.settimeout(max(0.1, until_s - time.monotonic()))
            response = connection.getresponse()
            return Answer(response.status, response.read(_MOST_BYTES).decode("utf-8", "replace"))
        except TimeoutError:
            # An overloaded server is slow but works, so this is not a failure yet.
            return "no answer in time"
        except ConnectionRefusedError:
            # Before it is ready, a server does not listen.
            return NOBODY
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def _connection(self, limit_s: float) -> http.client.HTTPConnection:
        if self.address.path is not None:
            return _OverUnix(self.address.path, limit_s)
        host = _ANY.get(self.address.host, self.address.host)
        port = self.address.port
        if not self.tls:
            return http.client.HTTPConnection(host, port, timeout=limit_s)
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, timeout=limit_s, context=context)


# The kernel shows requests without an answer, without any traffic to the server. A server that
# counts nothing, or hung before it counted a request, still has the request's connection. For each
# connection the kernel knows when it last carried bytes in each direction (struct tcp_info of
# include/uapi/linux/tcp.h, through sock_diag(7)). If bytes came in after the last bytes went out, a
# request or a part of one waits for its answer.

# NETLINK_SOCK_DIAG.
_SOCK_DIAG: Final = 4
# SOCK_DIAG_BY_FAMILY.
_BY_FAMILY: Final = 20
# NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH.
_DUMP: Final = 0x301
_ERROR = 2
_DONE = 3
_ESTABLISHED: Final = 1 << 1
# INET_DIAG_INFO.
_INFO: Final = 2
# struct nlmsghdr.
_HEAD: Final = struct.Struct("=IHHII")
# struct inet_diag_msg, then its attributes.
_MESSAGE_BYTES: Final = 72
# Offsets in struct tcp_info: milliseconds since bytes were sent and received, bytes sent and
# acknowledged, and bytes received.
_SENT = 44
_RECEIVED = 52
_WENT = 120
_CAME = 128
# The kernel answers at once. A longer wait would delay all checks.
_LIMIT_S: Final = 2.0


def request_waits_s(port: int) -> tuple[float, ...] | None:
    """Return the seconds that each request at a local port has waited, or None if unknown."""
    waits: list[float] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_LIMIT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                kernel.send(_request(family, port))
                for message in _answers(kernel):
                    if (wait := _wait_s(message, port)) is not None:
                        waits.append(wait)
    except (OSError, AttributeError, struct.error):  # no such socket here, or another kernel
        return None
    return tuple(waits)


def _request(family: int, port: int) -> bytes:
    identity = (
        struct.pack(">HH", port, 0) + bytes(32) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    )
    body = (
        struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
        + identity
    )
    return _HEAD.pack(_HEAD.size + len(body), _BY_FAMILY, _DUMP, 1, 0) + body


def _answers(kernel: socket.socket) -> Iterator[bytes]:
    while True:
        data = kernel.recv(1 << 16)
        at = 0
        while at < len(data):
            length, kind, *_ = _HEAD.unpack_from(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR or length < _HEAD.size:
                raise OSError("sock_diag does not answer")
            yield data[at + _HEAD.size : at + length]
            at += (length + 3) & ~3


def _wait_s(message: bytes, port: int) -> float | None:
    """Return how long the request of a connection has waited, or None if none waits."""
    if struct.unpack_from(">H", message, 4)[0] != port:
        return None
    at = _MESSAGE_BYTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO and length - 4 >= _CAME + 8:
            info = message[at + 4 : at + length]
            (sent,), (received,) = (
                struct.unpack_from("=I", info, _SENT),
                struct.unpack_from("=I", info, _RECEIVED),
            )
            went, came = struct.unpack_from("=QQ", info, _WENT)
            # The kernel's clock ticks every few milliseconds. If both times are in one tick, check
            # whether the first request has had any byte back.
            if came and (received < sent or not went):
                return float(received) / 1000
            return None
        at += max(4, (length + 3) & ~3)
    return None


# Read a server's /metrics: the requests in a step, and counters that change when the scheduler
# takes a step.

# A row of the Prometheus text format 0.0.4: name, labels, value and an optional time.
_ROW: Final = re.compile(
    r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$", re.MULTILINE
)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Counters:
    """Hold the counters of one engine behind the server.

    Attributes:
        running: the requests in a step, or None if the server does not report them.
        sleeps: whether the engine was put to sleep, so that it takes no step.
        progress: the counters that change when the scheduler takes a step, by name and labels.
    """

    running: float | None = None
    sleeps: bool = False
    progress: dict[str, float] = field(default_factory=dict)


def read_counters(text: str, names: Mapping[str, Any]) -> dict[str, Counters]:
    """Return the counters of each engine by its label.

    The label is "" if the engine has none. The result is empty for another kind of server.
    """
    found: dict[str, Counters] = {}
    progress = frozenset(names["progress"])
    awake = names["awake"]
    for name, labels, value in _ROW.findall(text):
        is_awake = name == awake["name"]
        if name not in progress and not is_awake and name != names["running"]:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        given = dict(_LABEL.findall(labels))
        engine = found.setdefault(given.get(names["engine_label"], ""), Counters())
        if name == names["running"]:
            engine.running = (engine.running or 0.0) + number
        if name in progress:
            engine.progress[f"{name}{{{labels}}}"] = number
        elif is_awake and given.get(awake["label"]) == awake["value"]:
            engine.sleeps = number == 0
    return found


# Progress is judged from looks at the server, without any input or output, so that tests can try
# every case. A server that answers ``/health`` may hang: its front answers, but the scheduler takes
# no step. A hang means that a request waited while no counter changed. A long prompt is not a hang,
# because each chunk changes the share of the KV cache in use. A single step that is longer than the
# limit looks like a hang, so the limit is generous.

# A server normally ends within seconds of its engine's death. If it lives longer, it hangs.
CORE_GONE_S: Final = 30.0
# If looks are this much further apart than planned, oomguard itself was stopped and saw nothing.
_GAP_RATIO: Final = 4
# An engine that uses less CPU than this share of the time is idle.
_IDLE_RATIO: Final = 0.02


@dataclass(frozen=True, slots=True)
class HealthSample:
    """Hold the observations of one look.

    Attributes:
        began_s: when it began, on the monotonic clock; the server may answer slowly.
        at_s: when it ended.
        engines: the counters of each engine by its label. Empty: no counters. None: no answer.
        waits_s: the seconds that each request has waited, or None if the kernel does not report
            them.
        processes: the engine's processes.
        is_paused: whether a signal stopped the server itself.
    """

    began_s: float
    at_s: float
    engines: Mapping[str, Counters] | None
    waits_s: tuple[float, ...] | None = None
    processes: EngineProcesses = field(default_factory=EngineProcesses)
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class EngineProblem:
    """Describe what is wrong with the engine.

    Attributes:
        what: a text with numbers.
        is_sure: whether there is no other explanation. If not, a test request decides.
        is_dead: whether the engine's process has ended while its server lives.
        is_counted: whether the engine's own counters show it.
        has_counters: whether the engine has counters at all.
        may_be_asked: whether a test request would reach this engine.
    """

    what: str
    is_sure: bool = False
    is_dead: bool = False
    is_counted: bool = False
    has_counters: bool = True
    may_be_asked: bool = True


class ProgressMonitor:
    """Judge a series of looks.

    Args:
        limit_s: the seconds without progress after which a waiting request means a hang.
        every_s: the interval of looks in seconds.
        had_cores: whether the engine's core existed when its server first answered.
    """

    def __init__(self, limit_s: float, every_s: float, *, had_cores: bool = False) -> None:
        self._limit_s = limit_s
        self._every_s = every_s
        self._last: HealthSample | None = None
        # Since when an engine with work has made no progress.
        self._quiet_s: dict[str, float] = {}
        self._moved_s = self._silent_s = self._idle_s = 0.0
        self._idle_cpu_s = 0.0
        self._stopped_s: dict[int, float] = {}
        self._gone_s: float | None = None
        self._had_cores = had_cores

    def forget(self, at_s: float) -> None:
        """Start again, because the engine answered or oomguard saw nothing for a while."""
        self._last = None
        self._quiet_s = {}
        self._stopped_s = {}
        self._gone_s = None
        self._moved_s = self._silent_s = self._idle_s = at_s

    def see(self, look: HealthSample) -> EngineProblem | None:
        """Judge a look; return the problem, or None without one within the limit."""
        last = self._last
        if (
            last is None
            or look.is_paused
            or look.began_s - last.at_s > _GAP_RATIO * self._every_s + 1.0
        ):
            self.forget(look.at_s)
            self._idle_cpu_s = look.processes.cpu_s
        self._note_counters(look, last)
        self._note_processes(look)
        self._last = look
        return (
            self._gone(look)
            or self._stopped(look)
            or self._quiet(look)
            or self._silent(look)
            or self._waiting(look)
        )

    def _note_counters(self, look: HealthSample, last: HealthSample | None) -> None:
        if look.engines is not None:
            self._silent_s = look.at_s
        for label, engine in (look.engines or {}).items():
            if last is not None and last.engines:
                before = last.engines.get(label)
            else:
                before = None
            moved = before is None or before.progress != engine.progress
            if moved or engine.sleeps:
                self._moved_s = look.at_s
            if moved or engine.sleeps or not engine.running:
                self._quiet_s[label] = look.at_s

    def _note_processes(self, look: HealthSample) -> None:
        now = look.processes
        if now.cpu_s - self._idle_cpu_s > _IDLE_RATIO * max(
            self._every_s, look.at_s - self._idle_s
        ):
            self._idle_s = look.at_s
            self._idle_cpu_s = now.cpu_s
        self._stopped_s = {pid: self._stopped_s.get(pid, look.at_s) for pid in now.stopped}
        self._had_cores = self._had_cores or bool(now.cores)
        is_gone = self._had_cores and not now.cores
        if is_gone:
            self._gone_s = look.at_s if self._gone_s is None else self._gone_s
        else:
            self._gone_s = None

    def _gone(self, look: HealthSample) -> EngineProblem | None:
        if self._gone_s is None or look.at_s - self._gone_s < min(CORE_GONE_S, self._limit_s):
            return None
        what = (
            f"its engine core has been gone for {look.at_s - self._gone_s:.0f} s, but the server "
            "still runs"
        )
        return EngineProblem(what, is_sure=True, is_dead=True)

    def _stopped(self, look: HealthSample) -> EngineProblem | None:
        for pid, since_s in self._stopped_s.items():
            if look.at_s - since_s >= self._limit_s:
                what = (
                    f"a signal stopped its engine core {pid} {look.at_s - since_s:.0f} s ago, and "
                    "it was not continued"
                )
                return EngineProblem(what, is_sure=True)
        return None

    def _quiet(self, look: HealthSample) -> EngineProblem | None:
        for label, since_s in self._quiet_s.items():
            engine = (look.engines or {}).get(label)
            if engine is None or look.at_s - since_s < self._limit_s:
                continue
            if len(self._quiet_s) > 1:
                whose = f" of engine {label}"
            else:
                whose = ""
            what = (
                f"{engine.running:g} requests{whose} in a step, but no counter moved for "
                f"{look.at_s - since_s:.0f} s"
            )
            return EngineProblem(
                f"{what}{self._cpu(look)}", is_counted=True, may_be_asked=len(self._quiet_s) == 1
            )
        return None

    def _silent(self, look: HealthSample) -> EngineProblem | None:
        if look.engines is not None or look.at_s - self._silent_s < self._limit_s:
            return None
        return EngineProblem(
            f"the server has not answered for {look.at_s - self._silent_s:.0f} s", is_sure=True
        )

    def _waiting(self, look: HealthSample) -> EngineProblem | None:
        """Judge by connections, for an engine without counters or one that hung before it counted.

        Without counters, CPU time of the engine's processes counts as work.
        """
        longest_s = max(look.waits_s or (0.0,))
        if longest_s < self._limit_s or look.engines is None:
            return None
        still_s = look.at_s - (self._moved_s if look.engines else self._idle_s)
        if still_s < self._limit_s or not (look.engines or look.processes.cores):
            return None
        if look.engines:
            what = "no counter moved"
        else:
            what = "the server has no counters"
        waited = f"a request has waited for {longest_s:.0f} s"
        if look.engines:
            text = f"{waited} and {what} for {still_s:.0f} s"
        else:
            text = f"{waited} and {what}"
        return EngineProblem(f"{text}{self._cpu(look)}", has_counters=bool(look.engines))

    def _cpu(self, look: HealthSample) -> str:
        """Return what is known about the processes' CPU time as the end of a message, or ""."""
        if not look.processes.cores:
            return ""
        idle_s = look.at_s - self._idle_s
        is_idle = idle_s >= self._limit_s / 2
        if is_idle:
            return f"; its processes have been idle for {idle_s:.0f} s"
        return "; its processes use CPU time"


# Look at a server that answers: counters, connections, processes. If they leave a question, send a
# test request of one token.

# From this status on, the server itself failed. 401 and 404 come from a healthy server.
_SERVER_ERROR: Final = 500


def looks_every_s(limit_s: float) -> float:
    """Return the interval of looks in seconds: 1/20 of the limit, between 0.25 and 15."""
    return min(15.0, max(0.25, limit_s / 20))


def answer_limit_s(limit_s: float) -> float:
    """Return the time limit of a test request in seconds: 1/4 of the limit, between 2 and 30."""
    return min(30.0, max(2.0, limit_s / 4))


@dataclass(frozen=True, slots=True)
class NoEngineAnswer:
    """Report that the engine was not tested; ``why`` is what the front answered."""

    why: str


@dataclass(slots=True)
class ServerWatch:
    """Watch one server that answers."""

    health: Health
    server: Server
    names: ServingNames
    pid: int
    over: threading.Event
    counts_nothing: bool
    _model: str | None = None

    def watch(self) -> None:
        """Look until the attempt ends, or until the server is ended because of a problem."""
        limit_s = self.health.limit_s
        every_s = looks_every_s(limit_s)
        progress = ProgressMonitor(limit_s, every_s, had_cores=self.health.had_cores)
        progress.see(self._look())
        while not self.over.wait(every_s):
            finding = progress.see(self._look())
            if finding is None:
                self.health.record_progress()
            elif self._holds(finding, progress) and self.health.found(finding, self.over):
                return

    def _look(self) -> HealthSample:
        began_s = time.monotonic()
        answer = self.server.ask(
            self.names.metrics["path"], limit_s=min(ANSWER_S, self.health.limit_s)
        )
        engines: dict[str, Counters] | None = None
        if isinstance(answer, Answer):
            if answer.status == OK:
                engines = read_counters(answer.text, self.names.metrics)
            else:
                engines = {}
            if not engines:
                self._tell_uncounted(answer)
        if self.server.address.path is None:
            waits_s = request_waits_s(self.server.address.port)
        else:
            waits_s = None
        processes = engine_processes(self.pid, dict(self.names.processes))
        return HealthSample(
            began_s, time.monotonic(), engines, waits_s, processes, tree.is_stopped(self.pid)
        )

    def _tell_uncounted(self, answer: Answer) -> None:
        path = self.names.metrics["path"]
        if self.counts_nothing:
            why = f"{self.names.metrics['off_flags'][0]} removes the engine's counters from {path}"
        elif answer.status == OK:
            why = f"{path} has no counters of this engine"
        else:
            why = f"{path} answers {answer.status}"
        if self.server.address.path is None:
            left = "the waiting time of requests, and the CPU time of its processes"
        else:
            left = "nothing"
        self.health.warn_unwatched(why, left=left)

    def _holds(self, finding: EngineProblem, progress: ProgressMonitor) -> bool:
        """Return whether a problem is real: no other explanation, or the test request fails."""
        if finding.is_sure or self.health.wrong is not None or not finding.may_be_asked:
            return True
        answers: list[Answer | NoEngineAnswer | str] = []
        if finding.has_counters:
            limit_s = answer_limit_s(self.health.limit_s)
        else:
            limit_s = self.health.limit_s
        asking = threading.Thread(
            target=lambda: answers.append(self._asked(limit_s)), name="oomguard-asks", daemon=True
        )
        asking.start()
        moved = False
        while asking.is_alive() and not moved:
            if self.over.wait(looks_every_s(limit_s)):
                return False
            moved = progress.see(self._look()) is None
        if answers:
            answer = answers[0]
        else:
            answer = "no answer"
        if moved or (isinstance(answer, Answer) and answer.status == OK):
            get_logger().debug("the engine works again", though=finding.what)
            progress.forget(time.monotonic())
            return False
        if isinstance(answer, NoEngineAnswer):
            self.health.warn_unwatched("it accepts no test request", reason=answer.why)
            return finding.is_counted
        # the front itself reports a dead engine
        if isinstance(answer, Answer) and answer.status < _SERVER_ERROR:
            self.health.warn_unwatched("it accepts no test request", status=answer.status)
            return finding.is_counted
        return True

    def _asked(self, limit_s: float) -> Answer | NoEngineAnswer | str:
        """Request one token; every answer of the server, even an error, proves that it works."""
        try:
            return self._ask(limit_s)
        except Exception as error:  # noqa: BLE001
            # An error in this thread would print a traceback on the command's standard error.
            return NoEngineAnswer(f"{type(error).__name__}: {error}")

    def _ask(self, limit_s: float) -> Answer | NoEngineAnswer | str:
        if self._model is None:
            path = self.names.http["models"]
            answer = self.server.ask(path, limit_s=ANSWER_S)
            if not isinstance(answer, Answer) or answer.status != OK:
                return answer
            self._model = _first_model(answer.text)
            if self._model is None:
                return NoEngineAnswer(f"{path} lists no model")
        path = self.names.http["ask"]
        body = {"model": self._model, **self.names.http["body"]}
        answer = self.server.ask(path, limit_s=limit_s, body=body)
        if (
            isinstance(answer, Answer)
            and answer.status == OK
            and not isinstance(_parsed(answer.text), dict)
        ):
            return NoEngineAnswer(f"{path} does not answer like an engine")
        return answer


def _first_model(text: str) -> str | None:
    """Return the first model of an OpenAI model list, or None if the text is not one."""
    match _parsed(text):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    return None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # Another program may listen on the port and answer something else.
        return None


# Load the modules in the thread, because a short run never needs them.

# Looks before the server is ready are this far apart.
_FIRST_LOOK_S: Final = 1.0


@dataclass(slots=True)
class Health:
    """Watch the server of a run; implements a companion.

    Attributes:
        engine: the name of the engine.
        limit_s: the seconds without progress after which a waiting request means a hang.
        end: ends the command's processes. It is called from a thread.
        acts: whether to end a server that hangs. A server whose engine has died is always ended.
        asked_for: whether the user asked to watch, so that oomguard reports when it cannot.
        environ: the environment variables of the command.
        is_stopped: returns whether the user stopped the run; then oomguard does not end it.
        is_ready: whether the server has answered in this attempt.
        wrong: the current problem, or None.
        had_cores: whether the engine's core existed when the server answered. It may die before the
            first look.
    """

    engine: str
    limit_s: float
    end: Callable[[threading.Event], None]
    environ: dict[str, str]
    acts: bool = False
    asked_for: bool = False
    is_stopped: Callable[[], bool] = lambda: False
    is_ready: bool = False
    wrong: str | None = None
    had_cores: bool = False
    _ended: TerminationReason | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _warned: set[str] = field(default_factory=set)

    def began(self, _number: int, launch: Launch, pid: int | None) -> None:
        """Start to watch the server of an attempt."""
        self.is_ready = False
        self.wrong = None
        self._ended = None
        argv = innermost_command(launch.argv)
        names = serving_names(self.engine)
        address = address_of(argv, self.engine)
        if names is None or pid is None:
            return
        if address is None:
            self.warn_unwatched(
                "its command does not show its address", hint="give --host and --port"
            )
            # Readiness is unknown, and a client would wait for it forever.
            self.is_ready = True
            return
        self._over = threading.Event()
        given = (argv, pid, address, names, self._over)
        threading.Thread(
            target=self._watch, args=given, name="oomguard-health", daemon=True
        ).start()

    def ended(self, _attempt: Attempt) -> None:
        """Stop watching, because the attempt has ended."""
        # Its thread may wait for an answer, so do not join it.
        self._over.set()

    def ended_by_us(self) -> TerminationReason | None:
        """Return why oomguard ended the last attempt, or None."""
        self._over.set()
        return self._ended

    def _watch(
        self,
        argv: tuple[str, ...],
        pid: int,
        address: ListenAddress,
        names: ServingNames,
        over: threading.Event,
    ) -> None:
        if over.wait(_FIRST_LOOK_S):
            return

        try:
            server = Server(address, names.speaks_tls(argv), names.key(argv, self.environ))
            if self._answers(server, names, pid, over) and self.limit_s > 0:
                ServerWatch(self, server, names, pid, over, names.counts_nothing(argv)).watch()
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever a server answers
            self.warn_unwatched(f"{type(error).__name__}: {error}")

    def _answers(
        self, server: Server, names: ServingNames, pid: int, over: threading.Event
    ) -> bool:
        """Wait until the server answers; return False if it never does in this attempt."""

        is_ours = False
        while True:
            answer = server.ask(names.http["health"], limit_s=ANSWER_S)
            if answer != NOBODY and not is_ours:
                # Any status counts, because another server may not know the path.
                listening = self._listening(server.address, pid)
                if listening is False:
                    return False
                is_ours = listening is True
            if isinstance(answer, Answer) and answer.status == OK:
                break
            if not isinstance(answer, Answer) and "SSL" in answer:
                self.warn_unwatched("its TLS setup does not allow test requests", reason=answer)
            if over.wait(_FIRST_LOOK_S):
                return False

        self.had_cores = bool(engine_processes(pid, dict(names.processes)).cores)
        self.is_ready = True
        get_logger().debug("the server answers", address=str(server.address))
        return True

    def _listening(self, address: ListenAddress, pid: int) -> bool | None:
        """Return whether the command listens at its address, or None if unknown.

        If another process listens there, log it and return False.
        """
        from oomguard.analyst.restart_gate import listening_at

        found = {}
        for bound, pids in listening_at(address).items():
            if pids:
                found[bound] = pids
        pids = set().union(*found.values())
        if not pids or pids & {pid, *tree.descendants(pid)}:
            if pids:
                return True
            return None
        addresses = ", ".join(sorted(map(str, found)))
        self.warn_unwatched(
            "another server answers at its address", address=addresses, pids=sorted(pids)
        )
        return False

    def warn_unwatched(self, why: str, **fields: object) -> None:
        """Log once that the server cannot be watched completely."""
        if why not in self._warned:
            self._warned.add(why)
            log = get_logger()
            if self.asked_for or "pids" in fields:
                tell = log.warning
            else:
                tell = log.debug
            tell(f"oomguard may not see a hang of the server: {why}", **fields)

    def found(self, finding: EngineProblem, over: threading.Event) -> bool:
        """Report a problem; return whether oomguard ended the server for it."""
        log = get_logger()
        why = f"{'the engine is gone' if finding.is_dead else 'the server hangs'}: {finding.what}"
        acts = self.acts or finding.is_dead
        if over.is_set() or self.is_stopped():
            return True
        if self.wrong is None:
            log.warning(why) if acts else log.warning(why, to_end_it="add --restart on-failure")
        self.wrong = why
        if acts:
            self._ended = TerminationReason(why, is_hang=not finding.is_dead)
            self.end(over)
        return acts

    def record_progress(self) -> None:
        """Record that the server works, and log it after a problem.

        A server that is being stopped may also move, so that does not count.
        """
        if self.wrong is not None and not self.is_stopped():
            get_logger().info("the server works again", after=self.wrong)
            self.wrong = None


# Answer HTTP probes that detect a hang.
#
# A server's own ``/health`` may answer 200 although its scheduler hangs.


ALIVE: Final = "/livez"
READY: Final = "/readyz"
_OK = 200
# Kubernetes takes any status from 400 on as a failed probe.
_UNAVAILABLE = 503
_NOT_FOUND = 404


class Probes:
    """Answer probes until the process ends; also a companion of the run.

    Args:
        address: the address to listen at.
        health: the health monitor. None: the command is not a known server, so it is ready while it
            runs.

    Attributes:
        address: the address with the real port.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, address: HttpAddress, health: Health | None) -> None:
        self._health = health
        self._is_running = False
        listening = listening_at(address)
        self.address = HttpAddress(address.host, listening.getsockname()[1])
        threading.Thread(
            target=self._serve, args=(listening,), name="oomguard-probes", daemon=True
        ).start()

    def began(self, _number: int, _launch: object, _pid: int | None) -> None:
        """Record that the command runs."""
        self._is_running = True

    def ended(self, _attempt: object) -> None:
        """Record that no command runs until the next attempt."""
        self._is_running = False

    def answer(self, path: str) -> tuple[int, str]:
        """Return the status and text for a path."""
        if self._health is not None:
            wrong = self._health.wrong
        else:
            wrong = None
        if path == ALIVE:
            if wrong is None:
                return (_OK, "ok")
            return (_UNAVAILABLE, wrong)
        if path != READY:
            return _NOT_FOUND, f"{ALIVE} or {READY}"
        if wrong is not None:
            return _UNAVAILABLE, wrong
        if not self._is_running:
            return _UNAVAILABLE, "no attempt is running"
        if self._health is not None and not self._health.is_ready:
            return _UNAVAILABLE, "the server has not answered yet"
        return _OK, "ok"

    def _serve(self, listening: socket.socket) -> None:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = answer(self.path.partition("?")[0].rstrip("/") or "/")
                body = f"{text}\n".encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 - the same

            def log_message(self, *_args: object) -> None:
                """Log nothing, because standard error belongs to the command."""

        try:
            HttpPort(listening, Handler).serve_forever()
        except OSError as error:
            get_logger().warning("oomguard no longer answers probes", reason=str(error))


# Notify systemd when the server is ready, alive or stopping (sd_notify(3)).
#
# The server itself knows nothing about systemd. oomguard stays the main process of the unit. It
# removes the variables of systemd's socket, so that no child process answers instead.

# systemd shows the status in its journal, so a change should appear soon.
_EVERY_S: Final = 5.0
_USEC: Final = 1_000_000
# A start that works, by CPU time or reading, gets this much more time again and again.
_EXTENDED_S: Final = 60.0
# A start whose processes did nothing for this long gets no more time.
_STILL_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class SystemdSocket:
    """Hold the socket of the service manager.

    Attributes:
        address: a path, or an abstract name that begins with NUL.
        watchdog_s: the interval of the watchdog in seconds, or None without a watchdog.
    """

    address: str
    watchdog_s: float | None = None

    def send(self, **what: object) -> None:
        """Send one message; ignore a missing receiver."""
        lines = []
        for name, value in what.items():
            lines.append(f"{name}={str(value).replace(chr(10), ' ')}")
        text = "\n".join(lines)
        link = current_link()
        # systemd accepts messages only from the main process of the service.
        if link is not None:
            link.say("notify", address=self.address, text=text)
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(text.encode("utf-8", "replace"), self.address)


def take_systemd_socket(environ: MutableMapping[str, str]) -> SystemdSocket | None:
    """Remove the variables of systemd's socket and return the socket, or None without one."""
    address = environ.pop("NOTIFY_SOCKET", "")
    usec = environ.pop("WATCHDOG_USEC", "")
    pid = environ.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return None
    is_ours = usec.isdecimal() and int(usec) > 0 and pid in {"", str(pid_of_run())}
    if address.startswith("@"):
        path = f"\0{address[1:]}"
    else:
        path = address
    return SystemdSocket(path, int(usec) / _USEC if is_ours else None)


class SystemdNotifier:
    """Notify systemd about one run, from a thread; implements a companion.

    Args:
        systemd: the socket.
        health: the health monitor of the server.
        stopped: returns whether the user stopped the run.
    """

    def __init__(self, systemd: SystemdSocket, health: Health, stopped: Callable[[], bool]) -> None:
        self._systemd = systemd
        self._health = health
        self._stopped = stopped
        self._every_s = min(_EVERY_S, (systemd.watchdog_s or 2 * _EVERY_S) / 2)
        self._over = threading.Event()
        self._pid: int | None = None
        self._did = (0.0, 0)
        self._did_s = 0.0
        self._was_ready = self._was_stopped = self._has_failed = False
        self._lock = threading.Lock()
        self._status = ""
        self._thread: threading.Thread | None = None

    def began(self, number: int, _launch: Launch, pid: int | None) -> None:
        """Report that an attempt has begun."""
        self._pid = pid
        self._did = (0.0, 0)
        self._did_s = time.monotonic()
        self._say("starting" if number == 1 else f"restarting, attempt {number}")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="oomguard-systemd", daemon=True)
            self._thread.start()

    def ended(self, attempt: Attempt) -> None:
        """Report how an attempt ended; a stop by the user is not a failure."""
        self._pid = None
        if not attempt.succeeded and not self._was_stopped:
            self._say(f"attempt {attempt.number} failed: {attempt.error or 'out of memory'}")

    def stopping(self) -> None:
        """Report once that the user stopped the run; any thread may call this."""
        with self._lock:
            is_first = not self._was_stopped
            self._was_stopped = True
            if is_first:
                self._systemd.send(STOPPING=1, STATUS="stopping")

    def close(self, status: int) -> None:
        """Report that the run ends."""
        self._over.set()
        self._systemd.send(STOPPING=1, STATUS=f"ended with status {status}" if status else "ended")

    def _run(self) -> None:
        while not self._over.wait(self._every_s if self._was_ready else min(1.0, self._every_s)):
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001
                # No problem is known, and without a message the watchdog would end the server.
                if not self._has_failed:
                    get_logger().warning(
                        "oomguard sends systemd only the watchdog signal",
                        reason=f"{type(error).__name__}: {error}",
                    )
                self._has_failed = True
                self._pulse()

    def _tick(self) -> None:
        if self._stopped():
            self.stopping()
            self._pulse()
            return
        health = self._health
        if health.is_ready and health.wrong is None:
            if not self._was_ready:
                self._was_ready = True
                self._systemd.send(READY=1)
            self._say("serving")
        elif health.wrong is not None:
            self._say(health.wrong)
            # If oomguard sends nothing, systemd's watchdog acts.
            return
        elif not self._goes_on():
            return
        elif not self._was_ready:
            self._systemd.send(EXTEND_TIMEOUT_USEC=int(_EXTENDED_S * _USEC))
        self._pulse()

    def _pulse(self) -> None:
        if self._systemd.watchdog_s is not None:
            self._systemd.send(WATCHDOG=1)

    def _say(self, status: str) -> None:
        with self._lock:
            if status != self._status and not self._was_stopped:
                self._status = status
                self._systemd.send(STATUS=status)

    def _goes_on(self) -> bool:
        """Return whether a start makes progress: its processes use CPU or read, or none exists
        yet.
        """
        now_s = time.monotonic()
        if self._pid is None:
            return True
        pids = [self._pid, *tree.descendants(self._pid)]
        did = sum(map(cpu_of, pids)), sum(map(tree.read_bytes, pids))
        if did[0] - self._did[0] >= 0.02 * self._every_s or did[1] != self._did[1]:
            self._did = did
            self._did_s = now_s
        return now_s - self._did_s < _STILL_S
