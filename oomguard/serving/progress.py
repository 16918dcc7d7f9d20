"""Whether a server's engine goes on, judged from looks at it: pure, so that every case can be tried without a server.

A server that answers ``/health`` may be stuck: the front answers, the scheduler behind it takes no step. What tells the two apart is
whether anything that a step changes has changed while a request waited. A long prompt is no hang: each of its chunks changes the share
of the KV cache in use, though no token is counted before the last. A single step that takes longer than the limit cannot be told from a
hang by anything outside, and the limit is generous for that reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from oomguard.serving.counters import Counters
from oomguard.serving.engine_processes import EngineProcesses

# A server ends by itself within seconds of its engine's death; what lives on after this does not.
CORE_GONE_S: Final = 30.0
# Looks that lie so much further apart than planned: we stood still ourselves, and nothing was seen meanwhile.
_GAP_RATIO: Final = 4
# An engine that takes less CPU than this share of the time does nothing.
_IDLE_RATIO: Final = 0.02


@dataclass(frozen=True, slots=True)
class Look:
    """What one look saw.

    Attributes:
        began_s: when it began, on the monotonic clock: the server may take its time to answer.
        at_s: when it ended.
        engines: the counters of each engine by its label; empty where nothing counts, None where the server did not answer.
        waits_s: for how long each request at the port waits for its answer; None where the kernel does not tell.
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
class Finding:
    """What is wrong with the engine.

    Attributes:
        what: in words, with its numbers.
        is_sure: whether nothing else explains it; else a request that goes through the engine decides.
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


class Progress:
    """Judges looks that come one after the other.

    Args:
        limit_s: a request that waits for so long while nothing moves is a hang.
        every_s: looks come so often.
        had_cores: the engine's core was there when its server answered first.
    """

    def __init__(self, limit_s: float, every_s: float, *, had_cores: bool = False) -> None:
        self._limit_s, self._every_s = limit_s, every_s
        self._last: Look | None = None
        self._quiet_s: dict[str, float] = {}  # since when nothing moves in an engine that has work
        self._moved_s = self._silent_s = self._idle_s = 0.0
        self._idle_cpu_s = 0.0
        self._stopped_s: dict[int, float] = {}
        self._gone_s: float | None = None
        self._had_cores = had_cores

    def forget(self, at_s: float) -> None:
        """Begin anew: the engine has answered, or nothing was seen for a while."""
        self._last, self._quiet_s, self._stopped_s, self._gone_s = None, {}, {}, None
        self._moved_s = self._silent_s = self._idle_s = at_s

    def see(self, look: Look) -> Finding | None:
        """Take a look; return what is wrong, None where nothing is or the limit is not reached."""
        last = self._last
        if last is None or look.is_paused or look.began_s - last.at_s > _GAP_RATIO * self._every_s + 1.0:
            self.forget(look.at_s)
            self._idle_cpu_s = look.processes.cpu_s
        self._note_counters(look, last)
        self._note_processes(look)
        self._last = look
        return self._gone(look) or self._stopped(look) or self._quiet(look) or self._silent(look) or self._waiting(look)

    def _note_counters(self, look: Look, last: Look | None) -> None:
        if look.engines is not None:
            self._silent_s = look.at_s
        for label, engine in (look.engines or {}).items():
            before = last.engines.get(label) if last is not None and last.engines else None
            moved = before is None or before.progress != engine.progress
            if moved or engine.sleeps:
                self._moved_s = look.at_s
            if moved or engine.sleeps or not engine.running:
                self._quiet_s[label] = look.at_s

    def _note_processes(self, look: Look) -> None:
        now = look.processes
        if now.cpu_s - self._idle_cpu_s > _IDLE_RATIO * max(self._every_s, look.at_s - self._idle_s):
            self._idle_s, self._idle_cpu_s = look.at_s, now.cpu_s
        self._stopped_s = {pid: self._stopped_s.get(pid, look.at_s) for pid in now.stopped}
        self._had_cores = self._had_cores or bool(now.cores)
        is_gone = self._had_cores and not now.cores
        self._gone_s = (look.at_s if self._gone_s is None else self._gone_s) if is_gone else None

    def _gone(self, look: Look) -> Finding | None:
        if self._gone_s is None or look.at_s - self._gone_s < min(CORE_GONE_S, self._limit_s):
            return None
        what = f"its engine core has been gone for {look.at_s - self._gone_s:.0f} s and the server lives on"
        return Finding(what, is_sure=True, is_dead=True)

    def _stopped(self, look: Look) -> Finding | None:
        for pid, since_s in self._stopped_s.items():
            if look.at_s - since_s >= self._limit_s:
                what = (
                    f"a signal stopped its engine core {pid} {look.at_s - since_s:.0f} s ago, and nothing continued it"
                )
                return Finding(what, is_sure=True)
        return None

    def _quiet(self, look: Look) -> Finding | None:
        for label, since_s in self._quiet_s.items():
            engine = (look.engines or {}).get(label)
            if engine is None or look.at_s - since_s < self._limit_s:
                continue
            whose = f" of engine {label}" if len(self._quiet_s) > 1 else ""
            what = f"{engine.running:g} requests{whose} in a step, and no counter moved for {look.at_s - since_s:.0f} s"
            return Finding(f"{what}{self._cpu(look)}", is_counted=True, may_be_asked=len(self._quiet_s) == 1)
        return None

    def _silent(self, look: Look) -> Finding | None:
        if look.engines is not None or look.at_s - self._silent_s < self._limit_s:
            return None
        return Finding(f"the server has answered nothing for {look.at_s - self._silent_s:.0f} s", is_sure=True)

    def _waiting(self, look: Look) -> Finding | None:
        """Judge by the connections: stuck before it counted the request, or it counts nothing.

        Without counters the CPU time of the engine's processes has to stand in: one that computes may be at work.
        """
        longest_s = max(look.waits_s or (0.0,))
        if longest_s < self._limit_s or look.engines is None:
            return None
        still_s = look.at_s - (self._moved_s if look.engines else self._idle_s)
        if still_s < self._limit_s or not (look.engines or look.processes.cores):
            return None
        what = "no counter moved" if look.engines else "nothing is counted"
        waited = f"a request has waited for {longest_s:.0f} s"
        told = f"{waited} and {what} for {still_s:.0f} s" if look.engines else f"{waited} and {what}"
        return Finding(f"{told}{self._cpu(look)}", has_counters=bool(look.engines))

    def _cpu(self, look: Look) -> str:
        """Return what is known of its processes' CPU time, to be put behind a finding; empty where that is nothing."""
        if not look.processes.cores:
            return ""
        idle_s = look.at_s - self._idle_s
        is_idle = idle_s >= self._limit_s / 2
        return f"; its processes are idle for {idle_s:.0f} s" if is_idle else "; its processes take CPU time"
