"""What the lines that tell no failure say of the engine: settings, memory figures, phases; by
process and by start.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Evidence, Incident, Location, SettingInForce
from oomguard.core.settings import SETTING_FACTS
from oomguard.scan.effective_settings import ECHO_ANCHOR, Echo, read_echo
from oomguard.scan.pattern_search import Hit

# How an engine ended, as its own log tells: it died, its front found it gone, or it was told to
# stop.
#
# A wording tells one of five:
#
# - ``died``: the engine itself says so.
# - ``failing``: it lost a part, at work or while starting, and does not tell what becomes of the whole.
# - ``gone``: its front says so, also of an engine that ended with its program.
# - ``stopping``: it stops in good order.
# - ``told``: someone asked it to stop.


@dataclass(slots=True)
class EngineEnd:
    """How one start of an engine has ended so far; ``death`` is None as long as no line tells one.

    ``missed`` says that a serving front found the engine gone, ``told_line`` where it was asked to
    stop while it lived.
    """

    death: Incident | None = None
    missed: bool = False
    told_line: int | None = None
    _only_gone: bool = False
    _failing: bool = False
    _stopping: bool = False

    def note(self, what: str, evidence: Evidence, process: str | None, framework: str) -> None:
        """Take one line that tells of the end; a line after a stop belongs to the stop and tells no
        death.

        Args:
            what: one of the five.
            evidence: the line as it was printed.
            process: the process that printed it.
            framework: the engine.
        """
        if what == "told" and self._only_gone:
            self.death, self._only_gone = (
                None,
                False,
            )  # a stop reaches engine and front at once: either may print first
        if what == "failing":
            self._failing = True
        # What is left of a failing engine stops in good order, which is no stop of the engine.
        if what == "told" or (what == "stopping" and not self._failing):
            self._stopping = self._stopping or self.death is None
        if what == "told" and self.death is None and self.told_line is None:
            self.told_line = evidence.line
        if what not in {"died", "gone"}:
            return
        self.missed = self.missed or (what == "gone" and not self._stopping)
        if not self._stopping and (self.death is None or (self._only_gone and what == "died")):
            location = Location(evidence.line, None, process)
            self.death = Incident(
                "engine_dead", evidence.text, framework, location=location, evidence=(evidence,)
            )
            self._only_gone = what == "gone"

    def was_told_before(self, line: int) -> bool:
        """Return whether it had been asked to stop before that line: what fails of its end then is
        no death.
        """
        return self.told_line is not None and self.told_line < line

    def of(self, start: int) -> Incident | None:
        """Return the death as an incident of this start, None if no line tells one."""
        if self.death is None:
            return None
        return replace(self.death, start=start)


# A traceback's frames stand before its message, within this many lines; a summary may name them
# just behind.
NEAR_BEFORE_LINES: Final = 250
NEAR_AFTER_LINES: Final = 12
MAX_NEAR: Final = 400
MAX_SLEEPS: Final = 6
# Of several frames near one failure the most telling one gives the phase: the first in this order.
PHASE_RANK: Final = (
    "wake_up",  # a trainer wakes the engine
    "training",
    "prompt_logprobs",
    "sampling_logits",
    "cudagraph_capture",
    "profile_run",
    "kv_cache_init",
    "load_weights",
    "generate",
    "prefill",
    "decode",
)
# Who prints a message without being the engine that runs the model.
NO_ENGINE: Final = frozenset({"torch", "any"})
_ROLE: Final = re.compile(r"[A-Za-z]+")
_PID: Final = re.compile(r" ?pid=\d+")
# SGLang's name of a rank.
_RANK: Final = re.compile(r"(?:[DTPEA]{1,3}P\d+ ?)+")
_REPLICA: Final = re.compile(r"(?<![A-Za-z])DP(\d+)")
ENGINE_ROLES: Final = frozenset(
    {"EngineCore", "Worker", "VllmWorker", "VllmWorkerProcess", "APIServer", "RayWorkerWrapper"}
)
_ALONE: Final = frozenset({"EngineCore", "APIServer"})
# What the user decided outlives an engine's start; what the engine measured does not.
_DECIDED: Final = frozenset(SETTING_FACTS.values()) | {
    "speculative",
    "multimodal",
    "quantized",
    "lora",
    "device_share_ratio",
}
# Of these what no list of the user's settings holds.
_UNLISTED: Final = frozenset({"device_share_ratio"})
# Figures that a start prints once its KV cache stands.
_SERVES: Final = frozenset({"kv_cache_capacity_tokens", "kv_cache_blocks"})


def role(process: str | None) -> str | None:
    """Return what a process is (``Worker`` for ``Worker_TP3 pid=2081``), None for a process without
    a name.
    """
    if process:
        found = _ROLE.match(process)
    else:
        found = None
    if found:
        return found.group()
    return None


def _unnumbered(process: str | None) -> str | None:
    """Return a process's name without its number, as its successor after a restart is named."""
    return process and _PID.sub("", process)


def related(one: str | None, other: str | None) -> bool:
    """Return whether what one process prints can speak of another: not between two ranks, nor two
    data-parallel replicas.
    """
    if one is None or other is None or one == other:
        return True
    replicas = [found.group(1) for found in (_REPLICA.search(one), _REPLICA.search(other)) if found]
    return role(one) != role(other) and len(set(replicas)) < 2


@dataclass(frozen=True, slots=True)
class Near:
    """A line that speaks only of the failure beside it: a traceback's frame, a clause
    of a report.
    """

    line: int
    process: str | None
    facts: Mapping[str, Fact]
    phase: str | None
    framework: str | None
    evidence: Evidence

    def of(self, process: str | None) -> bool:
        """Return whether it may speak of a failure of ``process``."""
        return self.process == process or self.process is None or process is None


@dataclass(slots=True)
class Context:
    """All that one engine start has printed so far; the key None stands for lines that name no
    process.
    """

    number: int
    first_line: int | None = None
    by_process: dict[str | None, dict[str, Fact]] = field(default_factory=dict)
    later: dict[str | None, dict[str, Fact]] = field(default_factory=dict)
    lines: dict[tuple[str | None, str], Evidence] = field(default_factory=dict)
    settings: dict[str, SettingInForce] = field(default_factory=dict)
    settings_complete: bool = False
    listed_again: Echo | None = (
        None  # the same settings once more: a sibling's, or those of a start that follows
    )
    frameworks: dict[str | None, str] = field(default_factory=dict)
    phases: dict[str | None, tuple[int, str]] = field(default_factory=dict)
    near: deque[Near] = field(default_factory=lambda: deque(maxlen=MAX_NEAR))
    failed: bool = False
    announced: dict[tuple[str, str | None], str | None] = field(default_factory=dict)
    ending: EngineEnd = field(default_factory=EngineEnd)
    service: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no engine has printed anything of itself in it: a client's lines, a proxy's."""
        return not (self.by_process or self.settings or self.announced)

    def begun_by(self, hit: Hit, process: str | None, text: str) -> Context | None:
        """Return the context of the start that a line begins; None if the line belongs to this one.

        Args:
            hit: what was found in the line.
            process: that printed it.
            text: what was printed, from where the hit begins.
        """
        if hit.wording.anchor == ECHO_ANCHOR:
            echo = read_echo(text)
        else:
            echo = None
        if echo is not None:
            if self._is_over_at(echo):
                return self.next(echo)
            return None
        if hit.wording.starts and self.is_over(hit, process):
            return self.next()
        return None

    def _is_over_at(self, echo: Echo) -> bool:
        """Return whether the settings that an engine lists are those of another start: one lists
        them before it loads anything.
        """
        return self.failed or (
            bool(self.phases and self.settings) and echo.complete and echo.settings != self.settings
        )

    def is_over(self, hit: Hit, process: str | None) -> bool:
        """Return whether a line that marks a start begins another one: after a failure, or from a
        process that replaces one.
        """
        if self.failed:
            return True
        key = (hit.wording.anchor, _unnumbered(process))
        known = self.announced.get(key, process)
        # The processes of a container have the same numbers each time; one process runs one model.
        model = hit.facts.get("model")
        own = self.by_process.get(process, {}).get("model")
        if (
            process is not None
            and model
            and own
            and model.value != own.value
            and key in self.announced
        ):
            return known == process
        # Before a start has measured anything it is not over: a logger may print its first lines
        # twice.
        measured = any(
            name not in _DECIDED and name != "framework_version"
            for f in self.by_process.values()
            for name in f
        )
        return measured and key in self.announced and (process is None or known != process)

    def next(self, echo: Echo | None = None) -> Context:
        """Return the context of the start that follows: what the user decided stays, what was
        measured does not.

        ``echo`` is the list of settings that it begins with; where that is whole the start has no
        others.
        """
        if echo is not None and echo.complete:
            stays = _UNLISTED
        else:
            stays = _DECIDED
        kept = {name: fact for name, fact in self.by_process.get(None, {}).items() if name in stays}
        lines = {key: line for key, line in self.lines.items() if key[0] is None and key[1] in kept}
        following = Context(
            self.number + 1,
            by_process={None: kept},
            lines=lines,
            frameworks=dict(self.frameworks),
            service=self.service,
        )
        if echo is None and self.listed_again is not None:
            following.take_echo(self.listed_again)
        return following

    def note(self, hit: Hit, process: str | None, evidence: Evidence) -> Near | None:
        """Take one line that tells no failure; return it if it speaks only of the failure beside
        it, else None.
        """
        line = evidence.line or 0
        wording = hit.wording
        if wording.ends is not None:
            if wording.role in {None, role(process)}:
                self.ending.note(wording.ends, evidence, process, hit.framework)
            return None
        facts = {name: replace(fact, line=evidence.line) for name, fact in hit.facts.items()}
        if hit.framework not in NO_ENGINE:
            framework = hit.framework
        else:
            framework = None
        if wording.near:
            near = Near(line, process, facts, wording.phase, framework, evidence)
            self.near.append(near)
            return near
        if framework:
            self.frameworks[process] = framework
        if wording.phase:
            # A window may close before an earlier one of the same process, so the later line
            # counts.
            self.phases[process] = max(self.phases.get(process, (0, "")), (line, wording.phase))
        if wording.starts:
            self.announced[wording.anchor, _unnumbered(process)] = process
        if self.first_line is None:
            self.first_line = evidence.line
        mine = self.by_process.setdefault(process, {})
        for name, fact in facts.items():
            if self.failed:
                self.later.setdefault(process, {}).setdefault(name, fact)
            mine[name] = fact
            self.lines[process, name] = evidence
        if "sleep_used_bytes" in facts:
            _note_sleep(mine, facts["sleep_used_bytes"])
        return None

    @property
    def death(self) -> Incident | None:
        """The engine's death, None if no line tells one.

        In a log of errors alone only a server's word counts: the program's next start would not be
        seen in it.
        """
        told = self.by_process or self.settings or self.ending.missed
        if told:
            return self.ending.of(self.number)
        return None

    @property
    def stands(self) -> bool:
        """Whether the start came so far that requests could be served."""
        counted = any(_SERVES & facts.keys() for facts in self.by_process.values())
        return counted or any(phase == "decode" for _, phase in self.phases.values())

    def note_echo(self, text: str) -> None:
        """Take the settings that the engine itself listed, if the text is such a list."""
        echo = read_echo(text)
        if echo is not None:
            self.take_echo(echo)

    def take_echo(self, echo: Echo) -> None:
        """Take a list of the engine's settings; a whole one takes the place of what an earlier
        start listed that loaded nothing.
        """
        if self.phases and echo.settings == self.settings:
            self.listed_again = echo
        if echo.complete:
            self.settings.clear()
        self.settings.update(echo.settings)
        self.settings_complete = self.settings_complete or echo.complete

    def all_facts(self) -> dict[str, Fact]:
        """Return the facts of all processes, each as last printed."""
        return {name: fact for facts in self.by_process.values() for name, fact in facts.items()}

    def numbers(self) -> dict[str, float]:
        """Return the figures of all processes, each as last printed."""
        told = ((name, fact.value) for name, fact in self.all_facts().items())
        return {
            name: value
            for name, value in told
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def facts_for(self, process: str | None) -> dict[str, Fact]:
        """Return what is known by now of a failure of ``process``: its own lines count over those
        of others.
        """
        merged: dict[str, Fact] = {}
        for facts in self.by_process.values():  # all ranks run under the same settings
            merged.update({name: fact for name, fact in facts.items() if name in _DECIDED})
        return merged | self._from_far_to_near(process, self.by_process)

    def later_for(self, process: str | None) -> dict[str, Fact]:
        """Return what was printed after the first incident, for facts that it left open."""
        return self._from_far_to_near(process, self.later)

    def evidence_for(self, process: str | None, name: str) -> Evidence | None:
        """Return the line that a fact was read from, None if it was read from no line."""
        for other in [process, None, *self.by_process]:
            if (related(other, process) or name in _DECIDED) and (other, name) in self.lines:
                return self.lines[other, name]
        return None

    def framework_for(self, process: str | None) -> str | None:
        """Return the engine that hosts a process, as its lines tell; None if they do not."""
        if role(process) in ENGINE_ROLES:
            return "vllm"
        own = self.frameworks.get(process)
        return own or next((f for p, f in self.frameworks.items() if related(p, process)), None)

    def phase_for(self, process: str | None) -> str | None:
        """Return the phase that the start had reached by the last line that told one, None before
        any.
        """
        told = [at for p, at in self.phases.items() if related(p, process)]
        if not told and role(process) not in _ALONE:  # ranks go through a start together
            told = list(self.phases.values())
        if told:
            return max(told)[1]
        return None

    def beside(
        self,
        first_line: int,
        last_line: int,
        process: str | None,
        since: int,
        behind: int = NEAR_AFTER_LINES,
    ) -> list[Near]:
        """Return the frames that belong to a failure printed on these lines.

        Args:
            first_line: of the failure's message.
            last_line: of the failure's message.
            process: that failed.
            since: the last line of the failure before.
            behind: how many lines behind the message a frame may stand.
        """
        return [
            n
            for n in self.near
            if max(since, first_line - NEAR_BEFORE_LINES - 1) < n.line <= last_line + behind
            and n.of(process)
        ]

    @staticmethod
    def _from_far_to_near(
        process: str | None, sources: Mapping[str | None, dict[str, Fact]]
    ) -> dict[str, Fact]:
        # Loose text first, then other processes in the order of their lines, then its own lines:
        # the last value counts.
        order = sorted(
            sources, key=lambda p: 2 if p == process and p is not None else 0 if p is None else 1
        )
        own = {
            name: fact for p in order if related(p, process) for name, fact in sources[p].items()
        }
        if process is None or not _RANK.fullmatch(process):
            return own
        # SGLang's first rank prints for all of them; what a device has free is each rank's own.
        ranks = (p for p in order if p is not None and _RANK.fullmatch(p))
        shared = {
            name: f
            for p in ranks
            for name, f in sources[p].items()
            if not name.endswith("_free_bytes")
        }
        return {**shared, **own}


def _note_sleep(mine: dict[str, Fact], used: Fact) -> None:
    """Add to a process's facts what of the device stayed in use after one more sleep."""
    if "sleep_used_each" in mine:
        before = str(mine["sleep_used_each"].value).split(", ")
    else:
        before = []
    sizes = [*before, f"{float(used.value) / GIB:.2f}"][-MAX_SLEEPS:]
    mine["sleep_used_each"] = Fact("sleep_used_each", ", ".join(sizes), line=used.line)


def nearest_phase(near: list[Near]) -> str | None:
    """Return the most telling phase of the frames beside a failure, None if no frame tells one."""
    told = {n.phase for n in near if n.phase}
    return next((phase for phase in PHASE_RANK if phase in told), None)
