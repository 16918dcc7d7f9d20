"""Run the attempts of one ``oomguard run``: start the command, ask the analyst, repeat.

The analyst is a second process, which may fail at any time. Messages are JSON lines on a socket,
each an object with ``say``. The supervisor waits at most ``ANSWER_LIMIT_S`` after the last message.
It kills an analyst that breaks the protocol.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from oomguard.supervisor import tree
from oomguard.supervisor.failsafe import PROGRESS, beat
from oomguard.supervisor.host_memory import HostWatch, group_folders, unshield
from oomguard.supervisor.messages import Messages, write_line
from oomguard.supervisor.open_files import OpenFiles, now_ns
from oomguard.supervisor.options import read_options
from oomguard.supervisor.output_buffer import OutputBuffer, temporary_folders
from oomguard.supervisor.process import Command, Exit, NotStartedError, run_once
from oomguard.supervisor.signals import SignalForwarder
from oomguard.supervisor.streams import StandardInput, Tee
from oomguard.supervisor.tree import become_subreaper

ANSWER_LIMIT_S: Final = 30.0
# After a stop signal the run must end within two seconds.
STOPPED_ANSWER_S: Final = 1.2
TYPED_ANSWER_S: Final = 10.0
_READ_BYTES: Final = 1 << 16
_MOST_BYTES: Final = 1 << 24
_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Python gets this as text, because the package's files may change or disappear meanwhile.
_BOOT: Final = """
import os, sys
try:
    sys.path[:] = [entry for entry in sys.path if os.path.isabs(entry)]
    import importlib.util
    folder = sys.argv[1]
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        "oomguard", init, submodule_search_locations=[folder]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["oomguard"] = package
    spec.loader.exec_module(package)
    from oomguard.cli.analyst import main
    main(int(sys.argv[2]))
except BaseException as error:
    if os.environ.get("OOMGUARD_TRACEBACKS"):
        raise
    os._exit(70)
"""
_CODE_FOLDERS: Final = ("PYTHONPATH", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")


class AnalystProcess:
    """Start the analyst, exchange messages with it, and stop it.

    Args:
        facts: the first message to it.
        output: the descriptor of the recorded output.

    Attributes:
        failed: why the supervisor no longer uses the analyst; None while it works.
        pid: its process; None before the start.
    """

    def __init__(self, facts: dict[str, Any], output: int) -> None:
        self._facts = facts
        self._output = output
        self._socket: socket.socket | None = None
        self.pid: int | None = None
        self._received = b""
        self.failed: str | None = None

    @property
    def runs(self) -> bool:
        """Whether the analyst was started and has not failed."""
        return self._socket is not None

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message arrives; -1 without one."""
        if self._socket is None:
            return -1
        return self._socket.fileno()

    def start(self) -> None:
        """Start the analyst; ``failed`` says why if that is impossible."""
        if self.runs or self.failed is not None:
            return
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            theirs.set_inheritable(True)
            os.set_inheritable(self._output, True)
            flags = []
            for flag, on in (
                ("-E", sys.flags.ignore_environment),
                ("-s", sys.flags.no_user_site),
            ):
                if on:
                    flags.append(flag)
            words = [sys.executable, "-P", *flags, "-c", _BOOT, _FOLDER, str(theirs.fileno())]
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                self.pid = os.posix_spawn(
                    sys.executable,
                    words,
                    _safe_environment(),
                    file_actions=[(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
                    setsigmask=[],
                    setsigdef=[],
                )
            finally:
                os.close(null)
                os.set_inheritable(self._output, False)
            self._socket = ours
            self.send(say="facts", **self._facts, output=self._output)
        except (OSError, ValueError) as error:
            ours.close()
            self.fail(f"it could not be started: {error}")
        finally:
            theirs.close()

    def send(self, **message: Any) -> None:
        """Send a message. An analyst that does not accept it in time has failed."""
        if self._socket is None:
            return
        # Loaded here, because many runs need no analyst.
        import json

        data = memoryview(json.dumps(message).encode() + b"\n")
        until_s = time.monotonic() + ANSWER_LIMIT_S
        try:
            while data:
                beat()
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if poll.poll(500):
                    data = data[self._socket.send(data) :]
                elif time.monotonic() > until_s:
                    self.fail(f"it accepted no message for {ANSWER_LIMIT_S:.0f} s")
                    return
        except OSError:
            self.fail("it has ended")

    def messages(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the analyst's new messages; wait at most ``timeout_s`` seconds for the first.

        An analyst that has ended, or that sends an invalid message, has failed.
        """
        if self._socket is None:
            return []
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        import json

        self._received += data
        *lines, self._received = self._received.split(b"\n")
        found: list[dict[str, Any]] = []
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.fail("its answer is invalid")
        if not all(isinstance(one, dict) and isinstance(one.get("say"), str) for one in found):
            self.fail("its answer is invalid")
            return []
        if len(self._received) > _MOST_BYTES:
            self.fail("its answer is too long")
        if not data and not found:
            self.fail("it ended without an answer")
        return found

    def fail(self, why: str) -> None:
        """Record why the supervisor no longer uses the analyst, and stop it."""
        self.failed = self.failed or why
        self.end()

    def end(self, wait_s: float = 0.0) -> None:
        """Wait ``wait_s`` seconds for the analyst's end, then kill it and its children."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid is None:
            return
        until_s = time.monotonic() + wait_s
        while not self._has_ended():
            beat()
            if time.monotonic() >= until_s:
                for pid in (self.pid, *tree.descendants(self.pid)):
                    tree.send(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self.pid, 0)
                break
            time.sleep(0.005)
        self.pid = None

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self.pid or 0, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True


def _safe_environment() -> dict[str, str]:
    """Return our variables without entries that mean the working directory.

    The analyst must not load code from there.
    """
    variables = dict(os.environ)
    for name in _CODE_FOLDERS:
        kept = []
        for entry in variables.pop(name, "").split(os.pathsep):
            if os.path.isabs(entry):
                kept.append(entry)
        if kept:
            variables[name] = os.pathsep.join(kept)
    return {**variables, "PYTHONSAFEPATH": "1"}


# At first the command has the machine to itself, because the analyst's start takes a second of
# processor time. A quick success needs no analyst.
ANALYST_AFTER_S: Final = 2.0
# Status of a run whose command exits with 0 although its engine died or its output was lost.
FAILED_STATUS: Final = 1
_BY_CAUSE: Final = frozenset({90, 91, 92})
_NOTHING_RAN: Final = frozenset({0, 1, 2, 125, 130, 141})
# Every output of an engine that the analyst knows contains one of these words, in lower case.
ENGINE_WORDS: Final = (
    "vllm",
    "llm engine",
    "llmengine",
    "engine core",
    "enginecore",
    "sglang",
    "llama",
    "tensorrt",
)
# By then the analyst only has to exit.
_LAST_S: Final = 2.0
_POD: Final = "KUBERNETES_SERVICE_HOST"
# Variables for the plugin in vLLM's process, as engines/vllm/plugin.py reads them.
_SAID: Final = "OOMGUARD_VLLM_SAID"
_REPORT: Final = "OOMGUARD_VLLM_REPORT"
_ACKNOWLEDGE: Final = "OOMGUARD_VLLM_ACKNOWLEDGE"
_STEP_RECOVERY: Final = "OOMGUARD_VLLM_STEP_RECOVERY"
_MEMORY_EVENTS: Final = ("memory.events", "memory.oom_control")


class NextStep(NamedTuple):
    """Describe the next step: an attempt with its command, or the end with a status.

    ``status`` is None if the command's own status counts.
    """

    command: Command | None
    status: int | None = None


class Supervisor:
    """Run one ``oomguard run``.

    Args:
        words: the command line between ``run`` and the command.
        argv: the command.
        closed: standard streams that were closed when oomguard started.
    """

    def __init__(self, words: Sequence[str], argv: Sequence[str], closed: frozenset[int]) -> None:
        self._words = tuple(words)
        self._argv = tuple(argv)
        self._closed = closed
        self._options = read_options(words, argv, os.environ)
        self._messages = Messages(quiet=self._options.quiet, is_json=self._options.is_json)
        self._number = 0
        self._is_cut = False
        self._session: str | None = None
        self._source: StandardInput | None = None
        self._tee: Tee | None = None
        self._watched: int | None = None
        self._has_sent_stop = False
        self._host: HostWatch | None = None
        # Where the analyst's messages to systemd went; None if there were none.
        self._notified: str | None = None

    def run(self) -> int:
        """Run the command, and again if the analyst says so; return the run's exit status."""
        # If the reaper is killed, its orphans then come to this process instead of to init.
        become_subreaper()
        signals = self._signals = SignalForwarder(self._closed)
        # Not a with block: leaving it after an error would stop the command.
        signals.__enter__()
        self._buffer = OutputBuffer()
        self._began = {"at": time.time(), "kills": _memory_kills()}
        self._make_session()
        self._analyst = AnalystProcess(self._facts(), self._buffer.fd)
        status = self._attempts()
        # From here on, the run ends with this status whatever fails while it cleans up.
        PROGRESS.final = status
        # Only an analyst that has answered has reported the end to systemd itself. After a stop it
        # may have had too little time.
        if self._analyst.failed is not None and self._notified is not None:
            ended = f"ended with status {status}" if status else "ended"
            _notify(self._notified, f"STOPPING=1\nSTATUS={ended}")
        # After a stop nothing may delay the end, not even a report that is being written.
        self._analyst.end(0.0 if signals.stopped_by is not None else _LAST_S)
        # The child of a healthy analyst delivers a shared journal, and has to outlive it.
        if self._analyst.failed is not None:
            self._end_helpers()
        if self._session is not None:
            tree.remove_tree(self._session)
        signals.__exit__(None, None, None)
        self._end_as_the_command(status)
        return status

    def _attempts(self) -> int:
        status = 125
        following = self._first()
        while following.command is not None:
            try:
                ended = self._attempt(following.command)
            except NotStartedError as error:
                return self._not_started(error)
            status = ended.status
            self._is_cut = self._is_cut or ended.is_cut
            following = self._after(ended)
            if self._signals.reaper.is_lost:
                break
        if following.status is not None:
            status = following.status
        is_failed = self._is_cut or self._host_record is not None
        if is_failed and status == 0:
            status = FAILED_STATUS
        signals = self._signals
        is_between = signals.stopped_between_runs and signals.stopped_by is not None
        # A command that succeeded keeps its status, although a stop came while its tree was ended.
        if is_between and status != 0:
            status = 128 + int(signals.stopped_by or 0)
        return status

    def _first(self) -> NextStep:
        """Return the first attempt: the command as given, or the analyst's version of it."""
        if not self._options.analyst_first:
            return NextStep(Command(self._argv, self._plugin_variables()))
        self._start_analyst()
        answer = self._answer()
        if answer is None:
            if self._signals.stopped_by is not None:
                return NextStep(None, 128 + self._signals.stopped_by)
            self._messages.say(
                "warning",
                "The command runs without oomguard's analysis",
                reason=self._analyst.failed,
            )
            return NextStep(Command(self._argv, {}))
        return answer

    def _attempt(self, command: Command) -> Exit:
        self._number += 1
        # Each attempt is explained from its own output alone.
        self._buffer.forget()
        self._since_ns = now_ns()
        self._files = OpenFiles(self._signals.reaper.pid)
        reserve_bytes = self._options.host_reserve_bytes
        host = self._host = HostWatch(self._signals.reaper, self._messages, reserve_bytes)
        self._command = command
        options = self._options
        self._source = self._source or StandardInput(path=options.input_path)
        try:
            return run_once(
                command,
                self._buffer,
                self._signals,
                self._source,
                grace_s=options.grace_s,
                on_started=self._started,
                on_failing=self._failing,
                pty=options.pty,
                hook=self,
                messages=self._messages,
            )
        finally:
            self._files.stop()
            host.stop()

    def _started(self) -> None:
        self._started_s = time.monotonic()
        # The run works without this thread if the system allows no more.
        with contextlib.suppress(RuntimeError):
            self._files.start()
            if self._host is not None:
                self._host.start()
        self._report_start()

    @property
    def _host_record(self) -> dict[str, Any] | None:
        """Why the last attempt was stopped for the host's memory; None if it was not."""
        if self._host is None:
            return None
        return self._host.record

    def _start_analyst(self) -> None:
        self._analyst.start()
        self._signals.reaper.exempt_pid = self._analyst.pid
        unshield(self._analyst.pid)

    def _report_start(self) -> None:
        self._analyst.send(
            say="started",
            number=self._number,
            pid=self._signals.reaper.command_pid,
            env=dict(self._command.env),
            at=time.time() - (time.monotonic() - self._started_s),
        )

    def attach(self, tee: Tee) -> None:
        """Handle messages of the analyst between the copying."""
        self._tee = tee
        self._watched = None
        self._has_sent_stop = False

    def tick(self) -> None:
        """Start the analyst when it is due, and report a stop to it."""
        analyst = self._analyst
        if self._is_analyst_due():
            self._start_analyst()
            self._report_start()
        if analyst.runs and self._watched is None and self._tee is not None:
            self._watched = analyst.fileno()
            self._tee.watch(self._watched, selectors.EVENT_READ, self._read_messages)
        if not self._has_sent_stop and self._signals.stopped_by is not None:
            self._has_sent_stop = True
            analyst.send(say="stop", **self._stops())
        if not analyst.runs:
            self._unwatch()

    def _read_messages(self) -> None:
        for message in self._analyst.messages(0):
            self._read_safely(message)
        if not self._analyst.runs:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._watched is not None and self._tee is not None:
            # Once the copying has ended, nothing is watched any more.
            with contextlib.suppress(KeyError, ValueError, OSError, RuntimeError):
                self._tee.unwatch(self._watched)
            # never watched again
            self._watched = -1

    def _is_analyst_due(self) -> bool:
        analyst = self._analyst
        is_late = time.monotonic() - self._started_s > ANALYST_AFTER_S
        return (
            is_late
            and not analyst.runs
            and analyst.failed is None
            and self._signals.stopped_by is None
        )

    def _failing(self) -> None:
        self._files.look()

    def _not_started(self, error: NotStartedError) -> int:
        """Report a command that cannot start; in a pod, the analyst reports it too."""
        if not self._analyst.runs and _POD in os.environ:
            self._start_analyst()
        if self._analyst.runs:
            self._analyst.send(
                say="not started", number=self._number, text=str(error), status=error.status
            )
            if self._answer() is not None:
                return error.status
        write_line(f"oomguard: {error}")
        return error.status

    def _after(self, ended: Exit) -> NextStep:
        """Return the next step after an attempt."""
        analyst = self._analyst
        signals = self._signals
        # Most runs succeed quickly and never pay for the second process.
        if not analyst.runs and (not self._has_to_explain(ended) or signals.is_urgent):
            return self._unexplained(ended)
        if not analyst.runs:
            self._start_analyst()
            self._report_start()
        analyst.send(
            say="ended",
            number=self._number,
            status=ended.status,
            seconds=ended.seconds,
            is_cut=ended.is_cut,
            of_reader=ended.of_reader,
            exited=signals.reaper.exited,
            since_ns=self._since_ns,
            files=self._files.seen(),
            lost_input=None if self._source is None else self._source.lost,
            output_index=self._buffer.index(),
            host=self._host_record,
            **self._stops(),
        )
        answer = self._answer()
        if answer is None:
            return self._unexplained(ended)
        return answer

    def _has_to_explain(self, ended: Exit) -> bool:
        """Return whether the analyst has to explain an attempt that ended before it was started."""
        if self._analyst.failed is not None:
            return False
        if self._host_record is not None:
            return True
        return bool(ended.status and not ended.of_reader) or (
            not ended.status and self._buffer.may_hold(ENGINE_WORDS)
        )

    def _unexplained(self, ended: Exit) -> NextStep:
        """End with the command's status; for a failure, name the file of its output."""
        if ended.status and self._analyst.failed is not None and self._signals.stopped_by is None:
            place = self._keep_output()
            if place is None:
                where = {}
            else:
                where = {"output": place}
            self._messages.say(
                "error",
                "oomguard could not explain the failure",
                reason=self._analyst.failed,
                **where,
            )
        return NextStep(None)

    def _keep_output(self) -> str | None:
        """Write the recorded output to a file for the user; return its path.

        None if there is no output, or no folder is writable.
        """
        if not self._buffer.size:
            return None
        for folder in temporary_folders():
            path = f"{folder}/oomguard-output-{os.getpid()}-{self._number}.log"
            with contextlib.suppress(OSError, ValueError):
                self._buffer.copy_to(path)
                return path
        return None

    def _answer(self) -> NextStep | None:
        """Wait for the analyst's decision; None if there is none."""
        analyst = self._analyst
        began_s = time.monotonic()
        until_s = time.monotonic() + ANSWER_LIMIT_S
        has_sent_stop = False
        presses = self._signals.presses
        while analyst.runs:
            beat()
            if self._signals.stopped_by is not None and not has_sent_stop:
                has_sent_stop = True
                analyst.send(say="stop", **self._stops())
            if has_sent_stop:
                # A user at the terminal may want to read why the command failed, and can press the
                # key again.
                is_short = self._signals.is_urgent or self._signals.presses > presses
                if is_short:
                    limit_s = STOPPED_ANSWER_S
                else:
                    limit_s = TYPED_ANSWER_S
                until_s = min(until_s, max(began_s, self._signals.last_stop_s) + limit_s)
            for message in analyst.messages(min(0.1, until_s - time.monotonic())):
                # Each message is a sign of life, so a long analysis may take longer than the limit.
                if not has_sent_stop:
                    until_s = time.monotonic() + ANSWER_LIMIT_S
                found = self._read_safely(message)
                if found is not None:
                    return found
            if time.monotonic() >= until_s:
                is_stopped = self._signals.stopped_by is not None
                analyst.fail(
                    "a signal asked to stop" if is_stopped else "it did not answer in time"
                )
        return None

    def _read_safely(self, message: dict[str, Any]) -> NextStep | None:
        """Follow a message of the analyst; an invalid message counts as its failure."""
        try:
            return self._read(message)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._analyst.fail("its answer is invalid")
            return None

    def _read(self, message: dict[str, Any]) -> NextStep | None:
        """Follow a message of the analyst; return the next step if the message decides it."""
        match message["say"]:
            case "start":
                self._set_options(message.get("options") or {})
                argv = message["argv"]
                env = message["env"]
                values = []
                for value in env.values():
                    if value is not None:
                        values.append(value)
                if not argv or not all(isinstance(word, str) for word in (*argv, *env, *values)):
                    raise TypeError("a command must be a list of words")
                return NextStep(Command(tuple(argv), env))
            case "end":
                return NextStep(None, self._permitted(message["status"]))
            case "broken":
                self._analyst.fail(f"it failed: {str(message.get('reason'))[:300]}")
            case "forward":
                self._signals.reaper.forward(int(message["number"]), None, None)
            case "kill":
                self._signals.reaper.kill()
            case "notify":
                self._notified = message["address"]
                _notify(message["address"], message["text"])
            case "output?":
                self._analyst.send(
                    say="output",
                    output_index=self._buffer.index(counts=bool(message.get("counts"))),
                )
        return None

    def _permitted(self, status: Any) -> int | None:
        """Return the analyst's status for the run if it is allowed.

        None keeps the command's own.
        """
        if status is None or isinstance(status, bool) or not isinstance(status, int):
            return None
        if self._number == 0:
            if status in _NOTHING_RAN:
                return status
            return 125
        # The command's own status counts, so the analyst may choose only among these.
        is_by_cause = status in _BY_CAUSE and self._options.status_by_cause
        if is_by_cause or status == FAILED_STATUS:
            return status
        return None

    def _set_options(self, given: dict[str, Any]) -> None:
        options = self._options
        options.grace_s = float(given.get("grace_s", options.grace_s))
        options.pty = bool(given.get("pty", options.pty))
        options.status_by_cause = bool(given.get("status_by_cause", options.status_by_cause))
        options.input_path = given.get("input_path", options.input_path)
        options.host_reserve_bytes = given.get("host_reserve_bytes", options.host_reserve_bytes)
        self._messages.quiet = bool(given.get("quiet", self._messages.quiet))
        self._messages.is_json = bool(given.get("is_json", self._messages.is_json))

    def _stops(self) -> dict[str, Any]:
        signals = self._signals
        return {
            "stopped_by": None if signals.stopped_by is None else int(signals.stopped_by),
            "stopped_at_s": signals.stopped_at_s,
            "stopped_between_runs": signals.stopped_between_runs,
            "was_typed": signals.was_typed,
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "words": ["run", *self._words, "--", *self._argv],
            "supervisor": os.getpid(),
            "reaper": self._signals.reaper.pid,
            "session": self._session,
            "analyst_first": self._options.analyst_first,
            "began": self._began,
        }

    def _make_session(self) -> None:
        """Create the folder of this run. The reaper removes it, however oomguard ends."""
        for folder in temporary_folders():
            path = f"{folder}/oomguard-{os.urandom(16).hex()}"
            with contextlib.suppress(OSError, ValueError):
                self._signals.reaper.remove_at_end(path)
                os.mkdir(path, 0o700)
                self._session = PROGRESS.folder = path
                return

    def _plugin_variables(self) -> dict[str, str]:
        """Return the variables for oomguard's plugin in a vLLM engine of the command."""
        if self._session is None or _SAID in os.environ or _ACKNOWLEDGE in os.environ:
            return {}
        folder = f"{self._session}/attempt-first"
        try:
            os.mkdir(folder, 0o700)
        except OSError:
            return {}
        return {
            _SAID: f"{folder}/said.jsonl",
            _REPORT: "all",
            _ACKNOWLEDGE: f"{folder}/acknowledged.jsonl",
            _STEP_RECOVERY: os.environ.get(_STEP_RECOVERY, "1"),
        }

    def _end_helpers(self) -> None:
        """Kill the analyst's remaining children, but not the reaper and the processes below it."""
        for pid in tree.children(os.getpid()):
            if pid != self._signals.reaper.pid:
                tree.send(pid, signal.SIGKILL)

    def _end_as_the_command(self, status: int) -> None:
        """End with SIGINT if the command did; otherwise leave the status to the caller."""
        signals = self._signals
        if signals.was_typed and status == 128 + signal.SIGINT and not signals.reaper.exited:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # A shell's loop stops only if its command died from SIGINT.
            os.kill(os.getpid(), signal.SIGINT)


def _notify(address: str, text: str) -> None:
    """Send a message to systemd, which accepts only its service's main process."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        out.sendto(text.encode("utf-8", "replace"), address)


def _memory_kills() -> int | None:
    """Return how many processes of our control group the kernel killed because memory ran out.

    None if the kernel does not report it.
    """
    for folder, _ in group_folders():
        for name in _MEMORY_EVENTS:
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = tree.read_file(f"{folder}/{name}").decode()
                return int(text.partition("oom_kill ")[2].split()[0])
    return None
