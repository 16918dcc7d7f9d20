"""One start of vLLM in this process: attempted while its processes are heard, and again with other arguments."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from oomguard.engines.vllm.in_process import leftovers, speaking
from oomguard.engines.vllm.in_process.arguments import StartArguments
from oomguard.engines.vllm.in_process.attended import attend, may_attend
from oomguard.engines.vllm.in_process.capture import Capture
from oomguard.engines.vllm.in_process.front_end import step_in_use
from oomguard.engines.vllm.in_process.lasting_client import LastingClient
from oomguard.engines.vllm.in_process.listening import Listener
from oomguard.engines.vllm.in_process.sleeping import check_room
from oomguard.engines.vllm.in_process.stuck import GIVEN_UP, Watched
from oomguard.engines.vllm.in_process.turns import turn
from oomguard.engines.vllm.in_process.words import in_the_last_step, last_words, lines_of, segments_of
from oomguard.engines.vllm.plugin import GROUP, LISTENER
from oomguard.engines.watched_start import EndedStart, MadeAgain, MakeAgain
from oomguard.facts import Fact, FactValue
from oomguard.incident import Incident, SettingInForce
from oomguard.log import get_logger
from oomguard.observe.host import Cgroup, killed_for_memory, read_cgroup

_ALLOWED: Final = "VLLM_PLUGINS"
_PLUGIN: Final = "oomguard"
_STDOUT, _STDERR = 1, 2
_SIGKILL_STATUS: Final = -9
# Where the engine core ran in this process, its CUDA context does not recover from an error of the driver's.
_SPOILS: Final = "CUDA error"
# The environment, the descriptors and the device belong to the process: one start at a time. Two at once would also measure
# each other's memory.
_one_at_a_time = threading.Lock()


def _renew_lock() -> None:
    """In a fork of this process nobody may be left to release it."""
    global _one_at_a_time  # noqa: PLW0603 - of this process
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class VllmStart:
    """A call that starts an engine: ``LLMEngine.from_engine_args`` and its like, which every front end goes through.

    Args:
        function: the call's function.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """

    phase: str | None = None
    tells_success = True

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = StartArguments(function, args, kwargs)
        self._listener = Listener()
        self._told: set[str] = set()
        self._in_use: dict[str, SettingInForce] = {}
        self.is_given_up: Callable[[], bool] = lambda: False

    def behind(self, incident: Incident) -> None:
        """Return nothing: what the engine printed tells which model it runs."""

    def attempt(self, changed: Mapping[str, FactValue], within_s: float | None = None) -> EndedStart:
        """Start the engine with these settings changed, in so many seconds or any number, and return how that ended."""
        args, kwargs = self._arguments.call(changed)
        with _one_at_a_time, turn(stop=self.is_given_up):
            if self.is_given_up():
                return EndedStart(error=RuntimeError(GIVEN_UP), not_again=GIVEN_UP, is_ended=True)
            before = read_cgroup()
            self._listener = Listener()
            result, error, watched = None, None, Watched(self._listener, within_s, self.is_given_up)
            with _heard(self._listener) as captures, watched.lasting():
                try:
                    result = self._function(*args, **kwargs)
                    self._listener.stays = may_attend(result)
                except Exception as raised:  # noqa: BLE001 - judged by the caller, and raised again unless it is remedied
                    error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
                    self._listener.settle()
            printed = "\n".join(capture.text() for capture in captures)
        try:
            if error is None:
                return EndedStart(result, lines=lines_of(self._listener.rows(), None))
            return self._failed(error, before, printed, watched)
        finally:
            # The exception's frames hold this one, and it all frames down to the program's: an engine of a later start in one of them
            # would live until a collection.
            del error

    def _failed(self, error: Exception, before: Cgroup | None, printed: str, watched: Watched) -> EndedStart:
        """Return how a start ended that raised."""
        rows, after = self._listener.rows(), read_cgroup()
        return EndedStart(
            error=error,
            lines=lines_of(rows, error),
            last_words=last_words(rows),
            printed=printed,
            killed_for_memory=bool(killed_for_memory(_SIGKILL_STATUS, before, after)),
            not_again=watched.ended_because or self._why_not_again(error),
            is_ended=watched.ended_because is not None,
        )

    def attend(self, engine: Any, make_again: MakeAgain) -> None:
        """Hear the engine's processes for as long as it lives, and have it made again where its core dies."""
        if not self._listener.stays:
            return
        self._in_use = step_in_use(engine)
        weakref.finalize(engine, self._stop_hearing)

        def died(error: Exception, client: LastingClient) -> MadeAgain | None:
            ended = self._ended_at_work(error, client.before)
            client.suspects = in_the_last_step(self._listener.rows())
            return make_again(ended, client.unfinished.progressed)

        attend(engine, died)
        client = weakref.ref(engine.engine_core)
        self.is_given_up = lambda: (lasting := client()) is None or lasting.is_given_up
        engine.engine_core.before_waking = lambda: check_room(self._listener.rows())

    def _stop_hearing(self) -> None:
        """Close the listener of the engine that works now: another one after each death."""
        self._listener.close()

    def _ended_at_work(self, error: Exception, before: Cgroup | None) -> EndedStart:
        """Return how an engine ended that had begun to work."""
        self._listener.settle()
        rows = self._listener.rows()
        return EndedStart(
            error=error,
            lines=lines_of(rows, error),
            last_words=last_words(rows),
            killed_for_memory=bool(killed_for_memory(_SIGKILL_STATUS, before, read_cgroup())),
        )

    def leave_nothing(self) -> None:
        """End what the attempt before left, and drop what was kept of it."""
        gc.collect()
        speakers = self._listener.speakers
        left = leftovers.end_processes(speakers)
        if left:
            get_logger().warning("what the failed start left does not end", processes=list(left))
        removed = leftovers.remove_segments(segments_of(self._listener.rows()) if not left else ())
        if removed:
            get_logger().debug("removed what the failed start left in shared memory", segments=list(removed))
        self._listener.close()
        self._listener = Listener()

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return what the program gave the engine, and of one that has worked what its steps had beside that."""
        return {**self._in_use, **self._arguments.settings_in_force()}

    def carries(self, name: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether a setting can be changed; say once why where a variable beats it."""
        over = self._arguments.beaten_by(name, facts)
        if over is not None and name not in self._told:
            self._told.add(name)
            get_logger().warning("left as it is", setting=name, because=f"{over.source} in the environment sets it")
        return over is None and self._arguments.carries(name)

    def _why_not_again(self, error: Exception) -> str | None:
        """Return why another start in this process would fail whatever its arguments."""
        if self._listener.speakers or _SPOILS not in str(error):
            return None
        return "the engine ran in this process, and a CUDA error stays in it: only a new process will do"


@contextlib.contextmanager
def _heard(listener: Listener) -> Iterator[list[Capture]]:
    """Hear what the engine's processes say while it starts, and take what they print; leave everything as it was.

    Where they will not speak that is both streams, else the one on which a process prints that dies of a signal.
    """
    from multiprocessing import resource_tracker

    before: dict[str, str | None] = {}
    captures: list[Capture] = []
    try:
        listener.open()
        if listener.path is not None:
            variables = {LISTENER: listener.path}
            allowed = os.environ.get(_ALLOWED)
            if allowed is not None:  # an allow-list: joined where the user has one, never made
                variables[_ALLOWED] = ",".join(dict.fromkeys([*filter(None, allowed.split(",")), _PLUGIN]))
            before = {name: os.environ.get(name) for name in variables}
            os.environ.update(variables)
            speaking.be_listener()
            speaking.speak(listener.path)
        else:
            get_logger().debug("the engine's processes are not heard", reason=listener.problem)
        with contextlib.suppress(Exception):
            resource_tracker.ensure_running()  # it lives as long as this process, and would keep one of our pipes
        captures += [Capture(_STDERR)]
        if listener.path is None or not _is_installed():
            captures.insert(0, Capture(_STDOUT))
        for capture in captures:
            capture.begin()
        yield captures
    finally:
        for capture in captures:
            capture.end()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        speaking.fall_silent()
        if not listener.stays:
            listener.close()


def _is_installed() -> bool:
    """Return whether vLLM's processes will find the plugin: where they do not, all that they print is taken."""
    from importlib import metadata

    try:
        found = metadata.distribution("oomguard").entry_points
    except metadata.PackageNotFoundError:
        return False
    return any(entry.group == GROUP for entry in found)
