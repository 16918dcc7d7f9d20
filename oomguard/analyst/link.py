"""What the analyst knows of the run and can do about it: all of it goes through the supervisor.

The supervisor ends an analyst that says nothing for half a minute while it waits for an answer.
Every wait for something outside (a device, a pause, other ranks) looks at ``stopped_by`` again and
again, and that look says that the analyst is alive.
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
from oomguard.core.process_state import set_pid_of_run
from oomguard.supervisor.output_buffer import RecordedOutput

_ALIVE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Attempted:
    """How an attempt ended, as the supervisor saw it.

    Attributes:
        status: as a shell reports it (128 + n for a signal).
        seconds: how long it ran.
        output: what it printed, as far as it was kept.
        is_cut: whether some of its output is lost, as a full disk did not take it.
        of_reader: whether it ended of a pipe whose reader had gone (``| head``): no failure of its
            own.
        files: the files that its processes had open for writing: device, inode, path.
        since_ns: when it began, as the kernel stamps files.
    """

    status: int
    seconds: float
    output: RecordedOutput
    is_cut: bool = False
    of_reader: bool = False
    files: tuple[tuple[int, int, str], ...] = ()
    since_ns: int = 0


@dataclass(slots=True)
class Reaper:
    """The command and its processes, as far as the supervisor lets the analyst at them.

    Attributes:
        link: to the supervisor.
        pid: the process below which all of the command's are.
        command_pid: the command that was started last.
        exited: whether it has ended by itself, of no signal.
    """

    link: Link
    pid: int
    command_pid: int | None = None
    exited: bool = False

    def forward(self, number: int, _code: int | None = None, _sender: int | None = None) -> None:
        """Send a signal to the command."""
        self.link.say("forward", number=number)

    def kill(self) -> None:
        """Kill the whole tree now."""
        self.link.say("kill")


class ReceivedSignals:
    """The signals that the supervisor has handed on.

    Attributes:
        stopped_at_s: when another process sent one first, on the monotonic clock.
        stopped_between_runs: whether it came while no command was there to end of it.
        was_typed: whether a stop came from a key of the terminal.
        on_stop: called with the first of these stops, by the thread that reads, so it must not
            wait.
        lost_input: why a command that is run again could not read what the last one read, None
            where it could.
        watcher: the command's processes.
    """

    def __init__(self, link: Link, reaper_pid: int) -> None:
        self._link = link
        self._stopped_by: signal.Signals | None = None
        self.stopped_at_s: float | None = None
        self.stopped_between_runs = False
        self.was_typed = False
        self.on_stop: Callable[[], None] = lambda: None
        self.lost_input: str | None = None
        self.watcher = Reaper(link, reaper_pid)

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The first signal that asked to stop."""
        self._link.is_alive()
        return self._stopped_by

    def take(self, message: Mapping[str, Any]) -> None:
        """Take what the supervisor says of stops."""
        self.stopped_at_s = message["stopped_at_s"]
        self.was_typed = message["was_typed"]
        self.stopped_between_runs = message["stopped_between_runs"]
        if message["stopped_by"] is not None and self._stopped_by is None:
            self._stopped_by = signal.Signals(message["stopped_by"])
            self.on_stop()


class LiveOutput:
    """What the command has printed so far, asked for while it runs."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def came(self) -> int:
        """Bytes that came, over all streams."""
        return self._link.output_now(counts=True).came

    def now(self) -> RecordedOutput:
        """Return all that is kept of it."""
        return self._link.output_now()

    def new_since(self, place: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
        """Return what came since a place, and the place behind it."""
        return self._link.output_now().new_since(place)


@dataclass(slots=True)
class Link:
    """The analyst's end of the socket; one thread reads it.

    Attributes:
        channel: the socket.
        facts: what the supervisor said first.
        options: what it is to know of the options before it starts the first command, where it does
            not read them itself.
    """

    channel: socket.socket
    facts: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    signals: ReceivedSignals = field(init=False)
    _heard: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    _outputs: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _alive_s: float = 0.0
    _waits: bool = False
    _begun: dict[str, Any] | None = None
    _is_first: bool = True
    _environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def begin(self) -> None:
        """Read the facts, and from then on whatever comes."""
        stream = self.channel.makefile("rb")
        line = stream.readline()
        self.facts = json.loads(line)
        self.signals = ReceivedSignals(self, self.facts["reaper"])
        set_pid_of_run(self.facts["supervisor"])
        threading.Thread(
            target=self._read, args=(stream,), name="oomguard-link", daemon=True
        ).start()

    @property
    def session(self) -> Path:
        """The folder of this run: it goes at its end. One that could not be made is named all the
        same.
        """
        # it was tried already
        return Path(self.facts["session"] or f"/tmp/oomguard-{os.getpid()}")  # noqa: S108

    @property
    def is_running(self) -> bool:
        """Whether the first command was started before it was asked for."""
        return not self.facts["analyst_first"] and self._is_first

    def environment(self) -> dict[str, str]:
        """Return what the supervisor has added to the environment of a command that
        runs already.
        """
        return dict(self._started()["env"])

    def run(
        self,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        on_started: Callable[[int, float], None],
    ) -> Attempted:
        """Have a command run to its end, or wait for the end of the one that runs already.

        Args:
            argv: its words.
            env: what is added to its environment.
            on_started: called with its process and the time, in Unix seconds, when it has started.

        Raises:
            LaunchError: it cannot be started.
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
        self.signals.watcher.command_pid = begun["pid"]
        on_started(begun["pid"], begun["at"])
        ended = self._next("ended")
        self.signals.take(ended)
        self.signals.lost_input = ended["lost_input"]
        self.signals.watcher.exited = ended["exited"]
        return Attempted(
            ended["status"],
            ended["seconds"],
            self._output(ended["output_index"]),
            ended["is_cut"],
            ended["of_reader"],
            tuple((device, inode, path) for device, inode, path in ended["files"]),
            ended["since_ns"],
        )

    def _changed_environment(self) -> dict[str, str | None]:
        """Return what was set in our own environment, or taken out of it, for the command."""
        changed: dict[str, str | None] = {
            name: value for name, value in os.environ.items() if self._environ.get(name) != value
        }
        return changed | {name: None for name in self._environ if name not in os.environ}

    def output_now(self, *, counts: bool = False) -> RecordedOutput:
        """Return what the command that runs has printed; only how much, with ``counts``."""
        with self._asking:
            self.say("output?", counts=counts)
            return self._output(self._outputs.get(timeout=10)["output_index"])

    def is_alive(self) -> None:
        """Say, once a second at most, that this process goes on."""
        if time.monotonic() - self._alive_s > _ALIVE_S:
            self._alive_s = time.monotonic()
            self.say("alive")

    def say(self, what: str, **fields: Any) -> None:
        """Say something to the supervisor; without one this process ends."""
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
        message = self._heard.get()
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
                    self._heard.put(message)
        finally:
            os._exit(0)  # the supervisor is gone: nobody asks any more


_current: Final[list[Link]] = []


def current_link() -> Link | None:
    """Return the link to the supervisor; None in a process that is no analyst."""
    if _current:
        return _current[-1]
    return None


def set_link(link: Link) -> None:
    """Make a link this process's."""
    _current[:] = [link]
