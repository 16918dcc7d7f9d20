"""Connect the analyst to the supervisor, through which it observes and controls the run.

The supervisor kills an analyst that sends nothing for half a minute while it waits for an answer.
Every wait for something outside (a device, a pause, other ranks) therefore polls ``stopped_by``,
and each poll also reports that the analyst is alive.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import LaunchError
from oomguard.core.process import set_pid_of_run
from oomguard.supervisor.output_buffer import RecordedOutput

_ALIVE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Describe how an attempt ended, as the supervisor saw it.

    Attributes:
        status: as a shell reports it (128 + n for a signal).
        seconds: how long it ran.
        output: its recorded output.
        is_cut: whether some output is lost because a disk was full.
        of_reader: whether it ended because the reader of its output was gone (``| head``), which is
            not a failure.
        files: the files that its processes had open for writing: device, inode, path.
        since_ns: when it began, in the kernel's file time.
        host: why the supervisor stopped it for the host's memory; None if it did not.
    """

    status: int
    seconds: float
    output: RecordedOutput
    is_cut: bool = False
    of_reader: bool = False
    files: tuple[tuple[int, int, str], ...] = ()
    since_ns: int = 0
    host: Mapping[str, Any] | None = None


@dataclass(slots=True)
class ReaperProxy:
    """Control the command and its processes through the supervisor.

    Attributes:
        link: the link to the supervisor.
        pid: the process above all of the command's processes.
        command_pid: the last started command; None before the first.
        exited: whether the command ended on its own, not by a signal.
    """

    link: Link
    pid: int
    command_pid: int | None = None
    exited: bool = False

    def forward(self, number: int, _code: int | None = None, _sender: int | None = None) -> None:
        """Send a signal to the command."""
        self.link.say("forward", number=number)

    def kill(self) -> None:
        """Kill the whole process tree now."""
        self.link.say("kill")


class ReceivedSignals:
    """Hold the signals that the supervisor has passed on.

    Attributes:
        stopped_at_s: when another process first sent a stop, on the monotonic clock; None if none
            did.
        stopped_between_runs: whether the stop came while no command was running.
        was_typed: whether a key of the terminal sent a stop.
        on_stop: called at the first stop by the reading thread, so it must not wait.
        lost_input: why a rerun command could not read the same standard input; None if it could.
        reaper: the command's processes.
    """

    def __init__(self, link: Link, reaper_pid: int) -> None:
        self._link = link
        self._stopped_by: signal.Signals | None = None
        self.stopped_at_s: float | None = None
        self.stopped_between_runs = False
        self.was_typed = False
        self.on_stop: Callable[[], None] = lambda: None
        self.lost_input: str | None = None
        self.reaper = ReaperProxy(link, reaper_pid)

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The first signal that asked to stop; None if there was none."""
        # Every wait polls this property, so the poll doubles as a sign of life.
        self._link.is_alive()
        return self._stopped_by

    def take(self, message: Mapping[str, Any]) -> None:
        """Take the supervisor's message about stops."""
        # Later messages may only say that the stop reached no command; the first signal stays.
        self.stopped_at_s = message["stopped_at_s"]
        self.was_typed = message["was_typed"]
        self.stopped_between_runs = message["stopped_between_runs"]
        if message["stopped_by"] is not None and self._stopped_by is None:
            self._stopped_by = signal.Signals(message["stopped_by"])
            self.on_stop()


class LiveOutput:
    """Read the command's output while it runs."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def came(self) -> int:
        """Number of bytes received so far, over all streams."""
        return self._link.output_now(counts=True).came

    def now(self) -> RecordedOutput:
        """Return all recorded output."""
        return self._link.output_now()

    def new_since(self, place: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
        """Return the output after a position, and the next position."""
        return self._link.output_now().new_since(place)


@dataclass(slots=True)
class Link:
    """Hold the analyst's end of the socket; one thread reads it.

    Attributes:
        channel: the socket.
        facts: the supervisor's first message.
        options: options for the supervisor before the first command, if it does not read them
            itself.
    """

    channel: socket.socket
    facts: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    signals: ReceivedSignals = field(init=False)
    _messages: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    _outputs: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _alive_s: float = 0.0
    _waits: bool = False
    _begun: dict[str, Any] | None = None
    _is_first: bool = True
    _environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def begin(self) -> None:
        """Read the facts, and then read messages in a thread."""
        stream = self.channel.makefile("rb")
        line = stream.readline()
        self.facts = json.loads(line)
        self.signals = ReceivedSignals(self, self.facts["reaper"])
        set_pid_of_run(self.facts["supervisor"])
        # One thread reads, so that a stop arrives even while another thread waits for an answer.
        threading.Thread(
            target=self._read, args=(stream,), name="oomguard-link", daemon=True
        ).start()

    @property
    def session(self) -> Path:
        """The folder of this run, which is removed at its end.

        If it could not be created, this is its intended path.
        """
        # creating the folder has failed already
        return Path(self.facts["session"] or f"/tmp/oomguard-{os.getpid()}")  # noqa: S108

    @property
    def is_running(self) -> bool:
        """Whether the first command is running before the analyst asked for it."""
        return not self.facts["analyst_first"] and self._is_first

    def environment(self) -> dict[str, str]:
        """Return what the supervisor added to the environment of an already running command."""
        return dict(self._started()["env"])

    def run(
        self,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        on_started: Callable[[int, float], None],
    ) -> AttemptResult:
        """Run a command to its end, or wait for the end of the running one.

        Args:
            argv: its words.
            env: additions to its environment.
            on_started: called after the start with the process and the time in Unix seconds.

        Raises:
            LaunchError: if the command cannot be started.
        """
        if not self.is_running:
            self.say(
                "start",
                argv=list(argv),
                env={**self._changed_environment(), **env},
                options=self.options,
            )
        begun = self._started()
        self._is_first = False
        self._begun = None
        self.signals.reaper.command_pid = begun["pid"]
        on_started(begun["pid"], begun["at"])
        ended = self._next("ended")
        self.signals.take(ended)
        self.signals.lost_input = ended["lost_input"]
        self.signals.reaper.exited = ended["exited"]
        return AttemptResult(
            ended["status"],
            ended["seconds"],
            self._output(ended["output_index"]),
            ended["is_cut"],
            ended["of_reader"],
            tuple((device, inode, path) for device, inode, path in ended["files"]),
            ended["since_ns"],
            ended["host"],
        )

    def _changed_environment(self) -> dict[str, str | None]:
        """Return our own changes of the environment, which the command gets too."""
        changed: dict[str, str | None] = {}
        for name, value in os.environ.items():
            if self._environ.get(name) != value:
                changed[name] = value
        for name in self._environ:
            if name not in os.environ:
                changed[name] = None
        return changed

    def output_now(self, *, counts: bool = False) -> RecordedOutput:
        """Return the output of the running command, or with ``counts`` only its size."""
        with self._asking:
            self.say("output?", counts=counts)
            return self._output(self._outputs.get(timeout=10)["output_index"])

    def is_alive(self) -> None:
        """Report, at most once a second, that this process is alive."""
        if time.monotonic() - self._alive_s > _ALIVE_S:
            self._alive_s = time.monotonic()
            self.say("alive")

    def say(self, what: str, **fields: Any) -> None:
        """Send a message to the supervisor; exit without one."""
        data = json.dumps({"say": what, **fields}).encode() + b"\n"
        try:
            with self._sending:
                self.channel.sendall(data)
        except OSError:
            os._exit(0)

    def _started(self) -> dict[str, Any]:
        if self._begun is None:
            self._begun = self._next("started")
        return self._begun

    def _next(self, what: str) -> dict[str, Any]:
        message = self._messages.get()
        if message is not None and message["say"] == "not started":
            raise LaunchError(message["text"], exit_status=message["status"])
        if message is None or message["say"] != what:
            os._exit(0)
        return message

    def _output(self, index: dict[str, Any]) -> RecordedOutput:
        return RecordedOutput.from_index(os.dup(self.facts["output"]), index)

    def _read(self, stream: Any) -> None:
        try:
            for line in stream:
                message = json.loads(line)
                if message["say"] == "stop":
                    self.signals.take(message)
                elif message["say"] == "output":
                    self._outputs.put(message)
                else:
                    self._messages.put(message)
        finally:
            # The supervisor is gone, so no process reads an answer.
            os._exit(0)


_current: Final[list[Link]] = []


def current_link() -> Link | None:
    """Return the link to the supervisor; None in a process that is not an analyst."""
    if _current:
        return _current[-1]
    return None


def set_link(link: Link) -> None:
    """Set the link of this process."""
    _current[:] = [link]
