"""Health that sees a hang: looks at a server while it runs, says what is wrong, and ends it where
that is asked for.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oomguard.analyst.nested_run import innermost_command
from oomguard.analyst.outcome import TerminationReason
from oomguard.core.incident import Attempt
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.engines.server import ListenAddress, ServingNames, address_of, serving_names
from oomguard.supervisor import tree

# The processes of an engine below its server, by the titles that they give themselves: their
# states, and the CPU time they took.

_PROC: Final = Path("/proc")
_TICKS_A_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """What /proc tells of them.

    Attributes:
        cores: the processes whose loop takes the engine's steps.
        stopped: cores that a signal has stopped.
        cpu_s: CPU time of cores and workers, since they began.
    """

    cores: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    cpu_s: float = 0.0


def engine_processes(root: int, titles: dict[str, Any]) -> EngineProcesses:
    """Return the engine's processes below ``root``; none where they have no titles, or /proc says
    nothing.
    """
    cores: list[int] = []
    cpu_s = 0.0
    for pid in tree.descendants(root):
        title = _title(pid)
        if _is(title, titles["core"]):
            cores.append(pid)
        elif not _is(title, titles["others"]):
            continue
        cpu_s += cpu_of(pid)
    return EngineProcesses(tuple(cores), tuple(pid for pid in cores if tree.is_stopped(pid)), cpu_s)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process took itself; 0 where it is gone."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_A_S
    except (OSError, IndexError, ValueError):
        return 0.0


def _is(title: str, endings: Sequence[str]) -> bool:
    return any(ending in title for ending in endings)


def _title(pid: int) -> str:
    """Return the first word of a process's command line: a title takes its place."""
    try:
        return (
            (_PROC / str(pid) / "cmdline")
            .read_bytes()
            .split(b"\0", 1)[0]
            .decode("utf-8", "replace")
        )
    except OSError:
        return ""


# One question to a server on this machine, over TCP, TLS or a Unix socket, answered in time or not
# at all.

OK: Final = 200
NOBODY: Final = "nobody listens"
ANSWER_S: Final = 10.0  # what a healthy front answers within
_MOST_BYTES: Final = 16 << 20
# where it listens, and where it is asked
_ANY: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the status, and the text."""

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
    """Where a server is asked, and with what key; over TLS no certificate is checked, as the server
    is our own command.
    """

    address: ListenAddress
    tls: bool = False
    key: str | None = None

    def ask(
        self, path: str, *, limit_s: float, body: Mapping[str, Any] | None = None
    ) -> Answer | str:
        """Return the answer, or in a word why none came within ``limit_s``."""
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
            if connection.sock is not None:  # what connecting took is gone
                connection.sock.settimeout(max(0.1, until_s - time.monotonic()))
            response = connection.getresponse()
            return Answer(response.status, response.read(_MOST_BYTES).decode("utf-8", "replace"))
        except TimeoutError:
            return "no answer in time"
        except ConnectionRefusedError:
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


# Requests that wait for an answer, as the kernel tells of the connections to a server: nothing is
# sent to the server, nothing is read.
#
# A server that counts nothing, or got stuck before it counted a request, still has the connection
# that the request came through. The kernel knows for each when it last carried bytes in either
# direction (struct tcp_info of include/uapi/linux/tcp.h, asked for through sock_diag(7)): bytes
# that came after the last ones that went out are a request without an answer, or the first part of
# one.

_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_ERROR = 2
_DONE = 3
_ESTABLISHED: Final = 1 << 1
_INFO: Final = 2  # INET_DIAG_INFO
_HEAD: Final = struct.Struct("=IHHII")  # struct nlmsghdr
_MESSAGE_BYTES: Final = 72  # struct inet_diag_msg, attributes follow
# Offsets in struct tcp_info: milliseconds since bytes were sent and received, how many were sent
# and confirmed, and how many came in all.
_SENT = 44
_RECEIVED = 52
_WENT = 120
_CAME = 128
_LIMIT_S: Final = 2.0


def unanswered_s(port: int) -> tuple[float, ...] | None:
    """Return for how many seconds each request at a local port waits; None where the kernel does
    not tell.
    """
    waits: list[float] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_LIMIT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                kernel.send(_request(family, port))
                waits += [
                    wait
                    for message in _answers(kernel)
                    if (wait := _wait_s(message, port)) is not None
                ]
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
    """Return how long the request of a connection waits; None where none does."""
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
            # The kernel's clock ticks every few milliseconds: where both fell into one tick, a
            # first request has had no byte back.
            if came and (received < sent or not went):
                return float(received) / 1000
            return None
        at += max(4, (length + 3) & ~3)
    return None


# What a server's /metrics says of its engines: requests in a step, and what changes when the
# scheduler takes one.

# A row of the Prometheus text format 0.0.4: name, labels, value; a time may follow.
_ROW: Final = re.compile(
    r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$", re.MULTILINE
)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Counters:
    """One engine behind the server.

    Attributes:
        running: requests in a step, as it last counted; None where that is not printed.
        sleeps: whether it was told to sleep, and takes no step.
        progress: what changes when the scheduler takes a step, by name and labels.
    """

    running: float | None = None
    sleeps: bool = False
    progress: dict[str, float] = field(default_factory=dict)


def read_counters(text: str, names: Mapping[str, Any]) -> dict[str, Counters]:
    """Return the counters of each engine by its label, "" where it has none; empty where the text
    is another server's.
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


# Whether a server's engine goes on, judged from looks at it: pure, so that every case can be tried
# without a server.
#
# A server that answers ``/health`` may be stuck: the front answers, the scheduler behind it takes
# no step. What tells the two apart is whether anything that a step changes has changed while a
# request waited. A long prompt is no hang: each of its chunks changes the share of the KV cache in
# use, though no token is counted before the last. A single step that takes longer than the limit
# cannot be told from a hang by anything outside, and the limit is generous for that reason.

# A server ends by itself within seconds of its engine's death; what lives on after this does not.
CORE_GONE_S: Final = 30.0
# Looks that lie so much further apart than planned: we stood still ourselves, and nothing was seen
# meanwhile.
_GAP_RATIO: Final = 4
# An engine that takes less CPU than this share of the time does nothing.
_IDLE_RATIO: Final = 0.02


@dataclass(frozen=True, slots=True)
class Look:
    """What one look saw.

    Attributes:
        began_s: when it began, on the monotonic clock: the server may take its time to answer.
        at_s: when it ended.
        engines: the counters of each engine by its label; empty where nothing counts, None where
            the server did not answer.
        waits_s: for how long each request at the port waits for its answer; None where the kernel
            does not tell.
        processes: the engine's processes.
        is_paused: whether the server itself is stopped by a signal, so by somebody.
    """

    began_s: float
    at_s: float
    engines: Mapping[str, Counters] | None
    waits_s: tuple[float, ...] | None = None
    processes: EngineProcesses = field(default_factory=EngineProcesses)
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class EngineProblem:
    """What is wrong with the engine.

    Attributes:
        what: in words, with its numbers.
        is_sure: whether nothing else explains it; else a request that goes through the engine
            decides.
        is_dead: the engine's process is gone, and its server lives on.
        is_counted: the engine's own counters say it.
        has_counters: whether the engine counts at all.
        may_be_asked: whether such a request would reach this engine.
    """

    what: str
    is_sure: bool = False
    is_dead: bool = False
    is_counted: bool = False
    has_counters: bool = True
    may_be_asked: bool = True


class ProgressMonitor:
    """Judges looks that come one after the other.

    Args:
        limit_s: a request that waits for so long while nothing moves is a hang.
        every_s: looks come so often.
        had_cores: the engine's core was there when its server answered first.
    """

    def __init__(self, limit_s: float, every_s: float, *, had_cores: bool = False) -> None:
        self._limit_s = limit_s
        self._every_s = every_s
        self._last: Look | None = None
        self._quiet_s: dict[str, float] = {}  # since when nothing moves in an engine that has work
        self._moved_s = self._silent_s = self._idle_s = 0.0
        self._idle_cpu_s = 0.0
        self._stopped_s: dict[int, float] = {}
        self._gone_s: float | None = None
        self._had_cores = had_cores

    def forget(self, at_s: float) -> None:
        """Begin anew: the engine has answered, or nothing was seen for a while."""
        self._last = None
        self._quiet_s = {}
        self._stopped_s = {}
        self._gone_s = None
        self._moved_s = self._silent_s = self._idle_s = at_s

    def see(self, look: Look) -> EngineProblem | None:
        """Take a look; return what is wrong, None where nothing is or the limit is not reached."""
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

    def _note_counters(self, look: Look, last: Look | None) -> None:
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

    def _note_processes(self, look: Look) -> None:
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

    def _gone(self, look: Look) -> EngineProblem | None:
        if self._gone_s is None or look.at_s - self._gone_s < min(CORE_GONE_S, self._limit_s):
            return None
        what = (
            f"its engine core has been gone for {look.at_s - self._gone_s:.0f} s and the server "
            "lives on"
        )
        return EngineProblem(what, is_sure=True, is_dead=True)

    def _stopped(self, look: Look) -> EngineProblem | None:
        for pid, since_s in self._stopped_s.items():
            if look.at_s - since_s >= self._limit_s:
                what = (
                    f"a signal stopped its engine core {pid} {look.at_s - since_s:.0f} s ago, and "
                    "nothing continued it"
                )
                return EngineProblem(what, is_sure=True)
        return None

    def _quiet(self, look: Look) -> EngineProblem | None:
        for label, since_s in self._quiet_s.items():
            engine = (look.engines or {}).get(label)
            if engine is None or look.at_s - since_s < self._limit_s:
                continue
            if len(self._quiet_s) > 1:
                whose = f" of engine {label}"
            else:
                whose = ""
            what = (
                f"{engine.running:g} requests{whose} in a step, and no counter moved for "
                f"{look.at_s - since_s:.0f} s"
            )
            return EngineProblem(
                f"{what}{self._cpu(look)}", is_counted=True, may_be_asked=len(self._quiet_s) == 1
            )
        return None

    def _silent(self, look: Look) -> EngineProblem | None:
        if look.engines is not None or look.at_s - self._silent_s < self._limit_s:
            return None
        return EngineProblem(
            f"the server has answered nothing for {look.at_s - self._silent_s:.0f} s", is_sure=True
        )

    def _waiting(self, look: Look) -> EngineProblem | None:
        """Judge by the connections: stuck before it counted the request, or it counts nothing.

        Without counters the CPU time of the engine's processes has to stand in: one that computes
        may be at work.
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
            what = "nothing is counted"
        waited = f"a request has waited for {longest_s:.0f} s"
        if look.engines:
            told = f"{waited} and {what} for {still_s:.0f} s"
        else:
            told = f"{waited} and {what}"
        return EngineProblem(f"{told}{self._cpu(look)}", has_counters=bool(look.engines))

    def _cpu(self, look: Look) -> str:
        """Return what is known of its processes' CPU time, to be put behind a finding; empty where
        that is nothing.
        """
        if not look.processes.cores:
            return ""
        idle_s = look.at_s - self._idle_s
        is_idle = idle_s >= self._limit_s / 2
        if is_idle:
            return f"; its processes are idle for {idle_s:.0f} s"
        return "; its processes take CPU time"


# Looking at a server that answers: its counters, its connections, its processes, and a request of
# one token where these leave it open.

_SERVER_ERROR: Final = 500


def looks_every_s(limit_s: float) -> float:
    """Return how often a server is looked at: a twentieth of the limit, between 0.25 and 15 s."""
    return min(15.0, max(0.25, limit_s / 20))


def answer_limit_s(limit_s: float) -> float:
    """Return how long a request of one token may take that decides over a hang: a quarter of the
    limit, between 2 and 30 s.
    """
    return min(30.0, max(2.0, limit_s / 4))


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The front answered and the engine was not asked: ``why`` says what came instead."""

    why: str


@dataclass(slots=True)
class LookedAt:
    """One server that answers, and how it is looked at."""

    health: Health
    server: Server
    names: ServingNames
    pid: int
    over: threading.Event
    counts_nothing: bool
    _model: str | None = None

    def watch(self) -> None:
        """Look until the attempt ends, or the server is ended for what was found."""
        limit_s = self.health.limit_s
        every_s = looks_every_s(limit_s)
        progress = ProgressMonitor(limit_s, every_s, had_cores=self.health.had_cores)
        progress.see(self._look())
        while not self.over.wait(every_s):
            finding = progress.see(self._look())
            if finding is None:
                self.health.goes_on()
            elif self._holds(finding, progress) and self.health.found(finding, self.over):
                return

    def _look(self) -> Look:
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
            waits_s = unanswered_s(self.server.address.port)
        else:
            waits_s = None
        processes = engine_processes(self.pid, dict(self.names.processes))
        return Look(
            began_s, time.monotonic(), engines, waits_s, processes, tree.is_stopped(self.pid)
        )

    def _tell_uncounted(self, answer: Answer) -> None:
        path = self.names.metrics["path"]
        if self.counts_nothing:
            why = (
                f"{self.names.metrics['off_flags'][0]} leaves {path} without the engine's counters"
            )
        elif answer.status == OK:
            why = f"{path} has no counters of this engine"
        else:
            why = f"{path} answers {answer.status}"
        if self.server.address.path is None:
            left = "the time that requests wait, and the CPU time of its processes"
        else:
            left = "nothing"
        self.health.cannot_see(why, left=left)

    def _holds(self, finding: EngineProblem, progress: ProgressMonitor) -> bool:
        """Return whether the finding stands: nothing else explains it, or a request through the
        engine gets no answer.
        """
        if finding.is_sure or self.health.wrong is not None or not finding.may_be_asked:
            return True
        answers: list[Answer | Elsewhere | str] = []
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
            get_logger().debug("the engine goes on", though=finding.what)
            progress.forget(time.monotonic())
            return False
        if isinstance(answer, Elsewhere):
            self.health.cannot_see("it takes no request that tells", reason=answer.why)
            return finding.is_counted
        if isinstance(answer, Answer) and answer.status < _SERVER_ERROR:  # the front's own word
            self.health.cannot_see("it takes no request that tells", status=answer.status)
            return finding.is_counted
        return True

    def _asked(self, limit_s: float) -> Answer | Elsewhere | str:
        """Ask for one token; whatever a server answers, and whatever goes wrong with that, is an
        answer.
        """
        try:
            return self._ask(limit_s)
        except Exception as error:  # noqa: BLE001
            # a thread of our own: what it raises would stand on the command's standard error
            return Elsewhere(f"{type(error).__name__}: {error}")

    def _ask(self, limit_s: float) -> Answer | Elsewhere | str:
        if self._model is None:
            path = self.names.http["models"]
            told = self.server.ask(path, limit_s=ANSWER_S)
            if not isinstance(told, Answer) or told.status != OK:
                return told
            self._model = _first_model(told.text)
            if self._model is None:
                return Elsewhere(f"{path} names no model")
        path = self.names.http["ask"]
        body = {"model": self._model, **self.names.http["body"]}
        answer = self.server.ask(path, limit_s=limit_s, body=body)
        if (
            isinstance(answer, Answer)
            and answer.status == OK
            and not isinstance(_parsed(answer.text), dict)
        ):
            return Elsewhere(f"{path} answers something else than an engine does")
        return answer


def _first_model(text: str) -> str | None:
    """Return the first model of a list as OpenAI's API has it; None where the text is none."""
    match _parsed(text):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    return None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# A run of seconds never looks at its health: what does is loaded in its own thread.

_FIRST_LOOK_S: Final = 1.0


@dataclass(slots=True)
class Health:
    """Goes along with a run of an engine's server, as its companion.

    Attributes:
        engine: the engine's name.
        limit_s: a request that waits for so long while nothing moves is a hang.
        end: ends the command's processes; called from a thread.
        acts: end a server that hangs; else say it and go on. One whose engine is gone is ended in
            any case.
        asked_for: whether the user asked to watch, so that it is told where that cannot be done.
        environ: variables of the command.
        is_stopped: whether the user asked to stop: then its end is none of ours.
        is_ready: whether the server has answered in the attempt under way.
        wrong: what is wrong with it now; None: nothing that is known.
        had_cores: whether the engine's core was there when the server answered: it may die before
            the first look.
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
    _told: set[str] = field(default_factory=set)

    def began(self, _number: int, launch: Launch, pid: int | None) -> None:
        """Begin to look at the server of an attempt."""
        self.is_ready = False
        self.wrong = None
        self._ended = None
        argv = innermost_command(launch.argv)
        names = serving_names(self.engine)
        address = address_of(argv, self.engine)
        if names is None or pid is None:
            return
        if address is None:
            self.cannot_see(
                "its address is not known from its command", hint="give --host and --port"
            )
            self.is_ready = True  # nobody can tell; who waits for it would wait for ever
            return
        self._over = threading.Event()
        given = (argv, pid, address, names, self._over)
        threading.Thread(
            target=self._watch, args=given, name="oomguard-health", daemon=True
        ).start()

    def ended(self, _attempt: Attempt) -> None:
        """Stop looking: the attempt has ended."""
        self._over.set()  # its thread may wait for an answer: nothing waits for it

    def ended_by_us(self) -> TerminationReason | None:
        """Return why we ended the last attempt; None where it ended by itself."""
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
                LookedAt(self, server, names, pid, over, names.counts_nothing(argv)).watch()
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever a server answers
            self.cannot_see(f"{type(error).__name__}: {error}")

    def _answers(
        self, server: Server, names: ServingNames, pid: int, over: threading.Event
    ) -> bool:
        """Wait until the server answers; return False where the attempt ended before, or another
        server answers.
        """

        is_ours = False
        while True:
            answer = server.ask(names.http["health"], limit_s=ANSWER_S)
            if (
                answer != NOBODY and not is_ours
            ):  # whatever it says: another server need not know the question
                listening = self._listening(server.address, pid)
                if listening is False:
                    return False
                is_ours = listening is True
            if isinstance(answer, Answer) and answer.status == OK:
                break
            if not isinstance(answer, Answer) and "SSL" in answer:
                self.cannot_see("it is not to be asked over TLS", reason=answer)
            if over.wait(_FIRST_LOOK_S):
                return False

        self.had_cores = bool(engine_processes(pid, dict(names.processes)).cores)
        self.is_ready = True
        get_logger().debug("the server answers", address=str(server.address))
        return True

    def _listening(self, address: ListenAddress, pid: int) -> bool | None:
        """Return whether the command listens at its address; False where another does instead,
        which is told; None: not known.
        """
        from oomguard.analyst.listeners import listening_at

        found = {bound: pids for bound, pids in listening_at(address).items() if pids}
        pids = {one for each in found.values() for one in each}
        if not pids or pids & {pid, *tree.descendants(pid)}:
            if pids:
                return True
            return None
        told = ", ".join(sorted(map(str, found)))
        self.cannot_see("another server answers at its address", address=told, pids=sorted(pids))
        return False

    def cannot_see(self, why: str, **told: object) -> None:
        """Say, once, that something of the server is not watched."""
        if why not in self._told:
            self._told.add(why)
            log = get_logger()
            if self.asked_for or "pids" in told:
                tell = log.warning
            else:
                tell = log.debug
            tell(f"a hang of the server may not be seen: {why}", **told)

    def found(self, finding: EngineProblem, over: threading.Event) -> bool:
        """Tell what was found; return whether the server was ended for it."""
        log = get_logger()
        why = f"{'the engine is gone' if finding.is_dead else 'the server hangs'}: {finding.what}"
        acts = self.acts or finding.is_dead
        if over.is_set() or self.is_stopped():
            return True
        if self.wrong is None:
            log.warning(why) if acts else log.warning(why, to_end_it="give --restart on-failure")
        self.wrong = why
        if acts:
            self._ended = TerminationReason(why, is_hang=not finding.is_dead)
            self.end(over)
        return acts

    def goes_on(self) -> None:
        """Note that the server works, and say so where it was told otherwise; one that is being
        stopped moves for that.
        """
        if self.wrong is not None and not self.is_stopped():
            get_logger().info("the server goes on", after=self.wrong)
            self.wrong = None
