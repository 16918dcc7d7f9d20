"""Detect a start that failed but does not end, because its server waits forever.

vLLM 0.32 can do this: its engine core ends, and the API server keeps waiting. The last output is
then the failure of the start, followed by no output and almost no CPU time. oomguard stops such a
command, and handles it as if it had ended on its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from oomguard.analyst.link import LiveOutput
from oomguard.analyst.outcome import CommandTerminator, TerminationReason
from oomguard.core.incident import Attempt, Incident
from oomguard.core.log import get_logger
from oomguard.engines.registry import launchers
from oomguard.scan.source import Line
from oomguard.supervisor import tree

if TYPE_CHECKING:
    from oomguard.engines.command import Launch
    from oomguard.rules.rule_files import RuleSet


QUIET_S: Final = 20.0
LOOK_S: Final = 2.0
_TAIL_BYTES: Final = 1 << 16
_SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
# vLLM names its engine processes VLLM::EngineCore, for example.
_TITLE: Final = "::"
# A waiting command uses less of a core than this.
_IDLE_RATIO: Final = 0.1
_OF_A_START: Final = frozenset(
    {"load_weights", "profile_run", "kv_cache_init", "cudagraph_capture"}
)


@dataclass(slots=True)
class HungStart:
    """Watch a run's command for a hung start, as a hook of the run.

    Attributes:
        live: what the command prints.
        load_rules: loads the rules that read it.
        root: the process above all of the command's processes.
        end: stops the command.
        quiet_s: seconds without any activity before the output is read.
    """

    live: LiveOutput
    load_rules: Callable[[], RuleSet]
    root: int
    end: CommandTerminator
    quiet_s: float = QUIET_S
    _is_engine: bool = False
    _ended: TerminationReason | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def began(self, _number: int, launch: Launch, _pid: int | None) -> None:
        """Begin to watch an attempt."""
        self._is_engine = any(engine.is_own_command(launch.argv) for engine in launchers())
        self._ended = None
        self._over = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._over,), name="oomguard-start", daemon=True
        ).start()

    def ended(self, _attempt: Attempt) -> None:
        """Stop watching."""
        self._over.set()

    def ended_by_us(self) -> TerminationReason | None:
        """Return why oomguard stopped the last attempt; None if it ended on its own."""
        self._over.set()
        return self._ended

    def _watch(self, over: threading.Event) -> None:
        came = -1
        quiet_s = 0.0
        cpu_s = 0.0
        while not over.wait(LOOK_S):
            now = self.live.came
            # Any output counts as activity, even a repeated line.
            if now != came:
                came = now
                quiet_s = 0.0
                cpu_s = _cpu_s(self.root)
                continue
            quiet_s += LOOK_S
            # Reading the output is expensive, so it happens once in each quiet period.
            if not self.quiet_s <= quiet_s < self.quiet_s + LOOK_S:
                continue
            if _cpu_s(self.root) - cpu_s > _IDLE_RATIO * quiet_s:
                quiet_s = 0.0
                cpu_s = _cpu_s(self.root)
                continue
            if not self._is_engine and not has_engine(self.root):
                # Without an engine it is a loop that tries again, or a reader of a log.
                continue
            failed = self._failure()
            if failed is None or over.is_set() or self.end.is_stopped():
                continue
            self._end(failed, over)
            return

    def _end(self, failed: Incident, over: threading.Event) -> None:
        why = f"its start failed ({failed.kind}), but it did not end within {self.quiet_s:.0f} s"
        get_logger().warning("Stopping the command", reason=why)
        self._ended = TerminationReason(why, is_hang=False)
        self.end(over)

    def _failure(self) -> Incident | None:
        """Return the failure of a start if it is the engine's last output; None otherwise."""
        from oomguard.scan.scan import scan

        output = self.live.now()
        texts = (output.tail(stream, _TAIL_BYTES).decode("utf-8", "replace") for stream in (1, 2))
        for text in texts:
            lines = [Line(number, 0, line) for number, line in enumerate(text.splitlines(), 1)]
            found = scan(lines, self.load_rules()).incidents
            if found and any(one.kind == "engine_dead" or _is_of_a_start(one) for one in found):
                return found[0]
        return None


def has_engine(root: int) -> bool:
    """Return whether an engine's own process is alive below ``root``.

    A shell whose text names the engine does not count: the engine itself has to run.
    """
    for pid in tree.descendants(root):
        argv = tree.command_line(pid)
        if not argv or PurePath(argv[0]).name in _SHELLS:
            continue
        if _TITLE in argv[0] or any(engine.is_own_command(argv) for engine in launchers()):
            return True
    return False


def _is_of_a_start(incident: Incident) -> bool:
    return incident.phase in _OF_A_START or incident.kind.endswith("_warmup_oom")


def _cpu_s(root: int) -> float:
    """Return the CPU seconds of all processes below ``root``."""
    return sum(map(tree.cpu_seconds, tree.descendants(root)))
