"""Collect what the engine printed outside failures, by process and start.

These are settings, memory numbers, phases and the user's frames in tracebacks.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from oomguard.core.facts import GIB, REGISTRY, Fact, FactValue, is_of_type, number_of
from oomguard.core.incident import Evidence, Incident, Location, SettingInForce
from oomguard.core.settings import SETTING_FACTS, SETTINGS
from oomguard.scan.lines import LIBRARY, TRACEBACK

if TYPE_CHECKING:
    from oomguard.scan.pattern_search import Hit

# The effective settings: the caller's, the engine's, then a script's flags.
#
# vLLM lists its effective settings in the ``non-default args`` line.

# A rule's condition may ask whether the user set these settings.
_ASKED: Final = tuple(name for name in SETTINGS if f"{name}_set" in REGISTRY)
_ENTRY: Final = (
    r"'(\w+)': ('(?:[^'\\]|\\.)*'|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|True|False|None)(?=[,}])"
)
_LIMITS: Final = r"'limit_mm_per_prompt': (\{[^{}]*\})"
_BRACES: Final = r"'(?:[^'\\]|\\.)*'|[{}]"
_MAX_DIGITS: Final = 18
ECHO_ANCHOR: Final = "non-default args: {"


class Echo(NamedTuple):
    """Hold the settings of one echo.

    ``complete`` means that its end is visible, so the user set nothing else.
    """

    settings: dict[str, SettingInForce]
    complete: bool


def read_echo(text: str) -> Echo | None:
    """Parse a ``non-default args`` line, wrapped or not; None without such a line.

    It reads plain values (numbers, text, True, False, None), and limits of images and video as
    JSON. Other objects print as ``<...>`` without a value.
    """
    start = text.find(ECHO_ANCHOR)
    if start < 0:
        return None
    body = text[start + len(ECHO_ANCHOR) - 1 :]
    end = _closing_brace(body)
    entries = re.findall(_ENTRY, body[:end])
    values = {name: _literal(raw) for name, raw in entries}
    found = {}
    for name, value in values.items():
        found[name] = SettingInForce(name, _own_choice(name, value), True, "printed")
    if limits := re.search(_LIMITS, body[:end]):
        name = "limit_mm_per_prompt"
        found[name] = SettingInForce(name, limits.group(1).replace("'", '"'), True, "printed")
    return Echo(found, end is not None)


def _own_choice(name: str, value: FactValue | None) -> FactValue | None:
    """Return a value, or None for a negative number, with which the engine chooses itself."""
    if name in SETTINGS and isinstance(value, (int, float)) and value < 0:
        return None
    return value


def _closing_brace(body: str) -> int | None:
    """Return the position after the brace that closes the first one, or None.

    Quoted braces do not count.
    """
    depth = 0
    for match in re.finditer(_BRACES, body):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    return None


def _literal(raw: str) -> FactValue | None:
    if raw in {"True", "False"}:
        return raw == "True"
    if raw == "None":
        return None
    if raw.startswith("'"):
        return raw[1:-1]
    if len(raw) > _MAX_DIGITS:
        # No setting has so many digits, and some do not fit in a double.
        return None
    if re.search(r"[.e]", raw):
        return float(raw)
    return int(raw)


def setting_facts(settings: Mapping[str, SettingInForce], *, complete: bool) -> dict[str, Fact]:
    """Return the facts of settings.

    With ``complete`` the list has everything that the user set, so the facts also include unset
    ones.
    """
    facts: dict[str, Fact] = {}
    for name, fact in SETTING_FACTS.items():
        setting = settings.get(name)
        if setting is not None and setting.value is not None and is_of_type(fact, setting.value):
            facts[fact] = Fact(fact, setting.value, setting.source)
    for name in _ASKED:
        setting = settings.get(name)
        if setting is not None and setting.set_by_user is not None:
            facts[f"{name}_set"] = Fact(f"{name}_set", setting.set_by_user, setting.source)
        elif complete:
            facts[f"{name}_set"] = Fact(f"{name}_set", False, "printed")
    return facts


# The source of a flag of a program that is not the engine; the program may ignore it.
SCRIPT: Final = "script"
# The source of all arguments that a program gave its engine, reported from inside the engine.
ARGUMENTS: Final = "arguments"
# The start of the source text for settings from the engine's own configuration file.
CONFIG_FILE: Final = "config file"
_COMPLETE: Final = ("command", ARGUMENTS, CONFIG_FILE)
SHARE: Final = "gpu_memory_utilization"
# A host's total changes between the printed line and the start. A share that a script ignores
# differs by more.
AGREES_RATIO: Final = 0.05
_DIGITS: Final = 6


def merged_settings(
    echoed: Mapping[str, SettingInForce],
    given: Mapping[str, SettingInForce],
    *,
    echo_complete: bool,
) -> tuple[dict[str, SettingInForce], bool]:
    """Return the effective settings, and whether they are all that the user set.

    The engine's own command line is as complete as its echo. If either is complete, a script's flag
    that it does not list was ignored.

    Args:
        echoed: the engine's list of settings.
        given: the caller's settings; they take precedence, except for a script's flags.
        echo_complete: whether the end of the engine's list is visible.
    """
    stated = {}
    for name, setting in given.items():
        if setting.source != SCRIPT:
            stated[name] = setting
    settings = {**echoed, **stated}
    complete = echo_complete
    for setting in settings.values():
        complete = complete or setting.source.startswith(_COMPLETE)
    if not complete:
        # The engine may have received a script's flag; without a complete list nothing excludes it.
        flags = {}
        for name, flag in given.items():
            if flag.source == SCRIPT:
                flags[name] = flag
        settings = {**flags, **settings}
    return settings, complete


def without_contradicted(
    settings: Mapping[str, SettingInForce], printed: Mapping[str, Fact], *, complete: bool
) -> tuple[dict[str, SettingInForce], dict[str, Fact]]:
    """Drop the script's flags that ``printed`` contradicts; return the others' facts too.

    ``complete`` means that ``settings`` has everything that the user set.
    """
    kept = {}
    for name, setting in settings.items():
        if setting.source != SCRIPT or _agrees(setting, printed):
            kept[name] = setting
    return kept, setting_facts(kept, complete=complete)


def requested_share(facts: Mapping[str, Fact]) -> Fact | None:
    """Return requested ÷ total as the utilization, 0 to 1; None if one is unknown.

    Both are rounded, so the shortest number within their rounding is the most likely one.
    """
    desired = number_of(facts, "desired_bytes")
    total = number_of(facts, "device_total_bytes")
    if not desired or not total or desired < 0 or total < 0:
        return None
    around = facts["desired_bytes"].slack
    of_total = facts["device_total_bytes"].slack
    least = (desired - around) / (total + of_total)
    most = (desired + around) / max(1.0, total - of_total)
    middle = desired / total
    shortest = middle
    for n in range(1, _DIGITS + 1):
        if least <= (v := round(middle, n)) <= most:
            shortest = v
            break
    return Fact(SETTING_FACTS[SHARE], shortest, "solved", (most - least) / 2)


def _agrees(flag: SettingInForce, printed: Mapping[str, Fact]) -> bool:
    """Return whether no printed value contradicts a script's flag."""
    fact = printed.get(SETTING_FACTS.get(flag.name, flag.name))
    if flag.value is None or (fact is not None and not is_of_type(fact.name, flag.value)):
        return False
    if fact is not None:
        return _same(flag.value, fact)
    if flag.name == SHARE:
        share = requested_share(printed)
    else:
        share = None
    if share is None:
        return True
    if isinstance(flag.value, (int, float)):
        apart = abs(float(flag.value) - float(share.value))
    else:
        apart = float("inf")
    return apart <= share.slack + AGREES_RATIO * float(share.value)


def _same(value: FactValue, fact: Fact) -> bool:
    if isinstance(value, str) or isinstance(fact.value, str):
        return str(value).removeprefix("torch.") == str(fact.value).removeprefix("torch.")
    return abs(value - fact.value) <= fact.slack + 1e-9


def with_requested_share(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Add the utilization from requested ÷ total unless the facts already have it."""
    if SETTING_FACTS[SHARE] in facts:
        share = None
    else:
        share = requested_share(facts)
    if share is None:
        return dict(facts)
    return {**facts, share.name: share}


# An engine's own log reports its end in one of five ways:
#
# - ``died``: the engine itself reports it.
# - ``failing``: it lost a part while running or starting; the outcome is open.
# - ``gone``: its front end reports it, even for an engine that ended with its program.
# - ``stopping``: it stops normally.
# - ``told``: someone requested the stop.


@dataclass(slots=True, eq=False, repr=False)
class EngineEnd:
    """Track how one start of an engine ended; ``death`` is None without a line about it.

    ``missed`` means that a serving front end found the engine gone. ``stop_line`` is the line of a
    requested stop.
    """

    death: Incident | None = None
    missed: bool = False
    stop_line: int | None = None
    _only_gone: bool = False
    _failing: bool = False
    _stopping: bool = False

    def note(self, what: str, evidence: Evidence, process: str | None, framework: str) -> None:
        """Add one line about the end; after a stop request a line is not a death.

        Args:
            what: one of the five ways.
            evidence: the line as printed.
            process: the process that printed it; None if unknown.
            framework: the engine.
        """
        if what == "told" and self._only_gone:
            self.death, self._only_gone = (
                None,
                False,
            )  # a stop reaches engine and front end at once, so either may print first
        if what == "failing":
            self._failing = True
        # The rest of a failing engine stops normally, which is not a stop of the engine.
        if what == "told" or (what == "stopping" and not self._failing):
            self._stopping = self._stopping or self.death is None
        if what == "told" and self.death is None and self.stop_line is None:
            self.stop_line = evidence.line
        if what not in {"died", "gone"}:
            return
        self.missed = self.missed or (what == "gone" and not self._stopping)
        if not self._stopping and (self.death is None or (self._only_gone and what == "died")):
            location = Location(evidence.line, None, process)
            self.death = Incident(
                "engine_dead", evidence.text, framework, location=location, evidence=(evidence,)
            )
            self._only_gone = what == "gone"

    def was_stop_requested_before(self, line: int) -> bool:
        """Return whether a stop was requested before that line; later failures are not a death."""
        return self.stop_line is not None and self.stop_line < line

    def of(self, start: int) -> Incident | None:
        """Return the death as an incident of this start, or None if no line reports one."""
        if self.death is None:
            return None
        return replace(self.death, start=start)


# A traceback's frames are within this many lines before its message. A summary may name them
# directly after it.
NEAR_BEFORE_LINES: Final = 250
NEAR_AFTER_LINES: Final = 12
MAX_NEAR: Final = 400
MAX_SLEEPS: Final = 6
# Among several frames near a failure, the first phase in this order wins.
PHASE_RANK: Final = (
    # A trainer wakes the engine.
    "wake_up",
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
# Each line of such a list matches, too.
_LISTS: Final = frozenset({"device_processes"})
# These print messages but are not the engine that runs the model.
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
# A user's decisions apply to the engine's next start, but its measurements do not.
_DECIDED: Final = frozenset(SETTING_FACTS.values()) | {
    "speculative",
    "multimodal",
    "quantized",
    "lora",
    "device_share_ratio",
    "rl_framework",
    "trainer_offloads",
    "has_expandable_segments",
    "sleep_level",
    "deepspeed",
    "megatron",
    "verl_lora",
}
# No list of the user's settings contains these.
_UNLISTED: Final = frozenset({"device_share_ratio"})
# A start prints these numbers once its KV cache exists.
_SERVES: Final = frozenset({"kv_cache_capacity_tokens", "kv_cache_blocks"})


def role(process: str | None) -> str | None:
    """Return the role of a process (``Worker`` for ``Worker_TP3 pid=2081``), or None."""
    if process:
        found = _ROLE.match(process)
    else:
        found = None
    if found:
        return found.group()
    return None


def _unnumbered(process: str | None) -> str | None:
    """Return a process's name without its number, which a restart changes."""
    return process and _PID.sub("", process)


def related(one: str | None, other: str | None) -> bool:
    """Return whether a line of one process can describe another.

    It cannot between two ranks or two data-parallel replicas.
    """
    if one is None or other is None or one == other:
        return True
    replicas = []
    for found in (_REPLICA.search(one), _REPLICA.search(other)):
        if found:
            replicas.append(found.group(1))
    return role(one) != role(other) and len(set(replicas)) < 2


class Near(NamedTuple):
    """Hold a line that describes only the failure next to it: a frame, a report's clause."""

    line: int
    process: str | None
    facts: Mapping[str, Fact]
    phase: str | None
    framework: str | None
    evidence: Evidence

    def of(self, process: str | None) -> bool:
        """Return whether the line may describe a failure of ``process``."""
        return self.process == process or self.process is None or process is None


@dataclass(slots=True, eq=False, repr=False)
class Context:
    """Collect everything that one engine start printed; None is the key for unnamed processes."""

    number: int
    first_line: int | None = None
    by_process: dict[str | None, dict[str, Fact]] = field(default_factory=dict)
    later: dict[str | None, dict[str, Fact]] = field(default_factory=dict)
    lines: dict[tuple[str | None, str], Evidence] = field(default_factory=dict)
    settings: dict[str, SettingInForce] = field(default_factory=dict)
    settings_complete: bool = False
    # Repeated settings: from a sibling or the next start.
    listed_again: Echo | None = None
    frameworks: dict[str | None, str] = field(default_factory=dict)
    phases: dict[str | None, tuple[int, str]] = field(default_factory=dict)
    near: deque[Near] = field(default_factory=lambda: deque(maxlen=MAX_NEAR))
    failed: bool = False
    announced: dict[tuple[str, str | None], str | None] = field(default_factory=dict)
    ending: EngineEnd = field(default_factory=EngineEnd)
    service: str | None = None
    _sleeps: dict[str | None, _LastSleep] = field(default_factory=dict)
    _awake_line: int = -1
    # What a sleeper of an earlier start keeps in use.
    _slept_before_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """Return whether no engine printed anything, only a client or a proxy."""
        return not (self.by_process or self.settings or self.announced)

    def begun_by(self, hit: Hit, process: str | None, text: str) -> Context | None:
        """Return the context of the start that a line begins, or None if it is this one.

        Args:
            hit: the match in the line.
            process: the process that printed it; None if unknown.
            text: the printed text from the match on.
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
        """Return whether an engine's list of settings belongs to another start.

        An engine lists them before it loads anything.
        """
        return self.failed or (
            bool(self.phases and self.settings) and echo.complete and echo.settings != self.settings
        )

    def is_over(self, hit: Hit, process: str | None) -> bool:
        """Return whether a start line begins another start.

        It does after a failure, or if its process replaces an earlier one.
        """
        if self.failed:
            return True
        key = (hit.wording.anchor, _unnumbered(process))
        known = self.announced.get(key, process)
        # A container's processes have the same numbers each time, and one process runs one model.
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
        # A start is not over before its first measurement, because a logger may print its first
        # lines twice.
        measured = self.all_facts().keys() - _DECIDED - {"framework_version"}
        return bool(measured) and key in self.announced and (process is None or known != process)

    def next(self, echo: Echo | None = None) -> Context:
        """Return the context of the next start: settings stay, measurements do not.

        ``echo`` is the list of settings that it begins with; if it is complete, the start has no
        others.
        """
        if echo is not None and echo.complete:
            stays = _UNLISTED
        else:
            stays = _DECIDED
        kept = {}
        for name, fact in self.by_process.get(None, {}).items():
            if name in stays:
                kept[name] = fact
        lines = {}
        for key, line in self.lines.items():
            if key[0] is None and key[1] in kept:
                lines[key] = line
        following = Context(
            self.number + 1,
            by_process={None: kept},
            lines=lines,
            frameworks=dict(self.frameworks),
            service=self.service,
            _slept_before_bytes=self.sleeper_bytes,
        )
        if echo is None and self.listed_again is not None:
            following.take_echo(self.listed_again)
        return following

    def note(self, hit: Hit, process: str | None, evidence: Evidence) -> Near | None:
        """Add one line that is not a failure; return it if it describes only a nearby failure."""
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
            if name in _LISTS and name in mine and str(fact.value) in str(mine[name].value):
                # A row of the list that is known.
                continue
            if self.failed:
                self.later.setdefault(process, {}).setdefault(name, fact)
            mine[name] = fact
            self.lines[process, name] = evidence
        if "asleep" in facts and facts["asleep"].value is True:
            self._note_sleep(process, facts, evidence)
        elif "asleep" in facts:
            self._awake_line = line
        return None

    def _note_sleep(
        self, process: str | None, facts: Mapping[str, Fact], evidence: Evidence
    ) -> None:
        """Add one more sleep; ranks that print the same moment under one name are one sleep."""
        line = evidence.line or 0
        at_s = _seconds(evidence.text)
        used = number_of(facts, "sleep_used_bytes")
        freed = number_of(facts, "sleep_freed_bytes")
        last = self._sleeps.get(process, _LastSleep(Sleeps(), Sleeps(), None, None, -1, None))
        if at_s is None or last.at_s is None:
            is_close = line - last.line <= _SAME_SLEEP_LINES
        else:
            is_close = (at_s - last.at_s) % _DAY_S <= _SAME_SLEEP_S
        before = last.after
        if last.line >= 0 and is_close and self._awake_line < last.line:
            before = last.before
            if used is None or (last.used is not None and last.used > used):
                used = last.used
                freed = last.freed
        state = before.after(used, freed)
        self._sleeps[process] = _LastSleep(before, state, used, freed, line, at_s)
        mine = self.by_process[process]
        for name, value in state.facts().items():
            slack = facts[name].slack if name in facts else 0
            mine[name] = Fact(name, value, line=evidence.line, slack=slack)
        if process is not None:
            mine["sleep_process"] = Fact("sleep_process", process, line=evidence.line)

    @property
    def death(self) -> Incident | None:
        """Return the engine's death, or None if no line reports one.

        In a log of errors alone only a server's line counts, because it would not show the
        program's next start.
        """
        has_output = self.by_process or self.settings or self.ending.missed
        if has_output:
            return self.ending.of(self.number)
        return None

    @property
    def stands(self) -> bool:
        """Return whether the start could serve requests."""
        counted = any(_SERVES & facts.keys() for facts in self.by_process.values())
        return counted or any(phase == "decode" for _, phase in self.phases.values())

    def note_echo(self, text: str) -> None:
        """Add the settings that the engine itself listed, if the text is such a list."""
        echo = read_echo(text)
        if echo is not None:
            self.take_echo(echo)

    def take_echo(self, echo: Echo) -> None:
        """Add a list of the engine's settings.

        A complete list replaces the one of an earlier start that loaded nothing.
        """
        if self.phases and echo.settings == self.settings:
            self.listed_again = echo
        if echo.complete:
            self.settings.clear()
        self.settings.update(echo.settings)
        self.settings_complete = self.settings_complete or echo.complete

    @property
    def sleeper_bytes(self) -> int:
        """Return what stays in use on the device of an engine that sleeps; 0 if none does."""
        sizes = [self._slept_before_bytes]
        for facts in self.by_process.values():
            if "asleep" in facts and facts["asleep"].value is True:
                sizes.append(round(number_of(facts, "sleep_used_bytes") or 0))
        return max(sizes)

    def all_facts(self) -> dict[str, Fact]:
        """Return the latest facts of all processes."""
        found: dict[str, Fact] = {}
        for facts in self.by_process.values():
            found.update(facts)
        return found

    def numbers(self) -> dict[str, float]:
        """Return the latest numbers of all processes."""
        found = {}
        for name, fact in self.all_facts().items():
            if isinstance(fact.value, (int, float)) and not isinstance(fact.value, bool):
                found[name] = fact.value
        return found

    def facts_for(self, process: str | None) -> dict[str, Fact]:
        """Return the known facts for a failure of ``process``; its own lines win."""
        merged: dict[str, Fact] = {}
        # All ranks use the same settings.
        for facts in self.by_process.values():
            for name, fact in facts.items():
                if name in _DECIDED:
                    merged[name] = fact
        return merged | self._from_far_to_near(process, self.by_process)

    def later_for(self, process: str | None) -> dict[str, Fact]:
        """Return facts printed after the first incident that it did not have."""
        return self._from_far_to_near(process, self.later)

    def evidence_for(self, process: str | None, name: str) -> Evidence | None:
        """Return the line of a fact, or None if it came from no line."""
        for other in [process, None, *self.by_process]:
            if (related(other, process) or name in _DECIDED) and (other, name) in self.lines:
                return self.lines[other, name]
        return None

    def framework_for(self, process: str | None) -> str | None:
        """Return the engine of a process by its lines, or None."""
        if role(process) in ENGINE_ROLES:
            return "vllm"
        own = self.frameworks.get(process)
        if own:
            return own
        for other, framework in self.frameworks.items():
            if related(other, process):
                return framework
        return None

    def phase_for(self, process: str | None) -> str | None:
        """Return the phase of the start by the latest line that shows one, or None."""
        phases = []
        for p, at in self.phases.items():
            if related(p, process):
                phases.append(at)
        # Ranks start together, so any of them shows the phase.
        if not phases and role(process) not in _ALONE:
            phases = list(self.phases.values())
        if phases:
            return max(phases)[1]
        return None

    def near_frames(
        self,
        first_line: int,
        last_line: int,
        process: str | None,
        since: int,
        behind: int = NEAR_AFTER_LINES,
    ) -> list[Near]:
        """Return the frames that belong to a failure on these lines.

        Args:
            first_line: the first line of the failure's message.
            last_line: the last line of the failure's message.
            process: the failed process; None if unknown.
            since: the last line of the previous failure.
            behind: the largest number of lines between the message and a later frame.
        """
        before = max(since, first_line - NEAR_BEFORE_LINES - 1)
        found = []
        for frame in self.near:
            if before < frame.line <= last_line + behind and frame.of(process):
                found.append(frame)
        return found

    @staticmethod
    def _from_far_to_near(
        process: str | None, sources: Mapping[str | None, dict[str, Fact]]
    ) -> dict[str, Fact]:
        # Loose text first, then other processes in line order, then its own lines: the last value
        # counts.
        order = sorted(sources, key=lambda p: (p is not None, p == process))
        own: dict[str, Fact] = {}
        for other in order:
            if related(other, process):
                own.update(sources[other])
        if process is None or not _RANK.fullmatch(process):
            return own
        # SGLang's first rank prints for all of them, but each rank has its own free memory.
        shared: dict[str, Fact] = {}
        for rank in order:
            if rank is None or not _RANK.fullmatch(rank):
                continue
            for name, fact in sources[rank].items():
                if not name.endswith("_free_bytes"):
                    shared[name] = fact
        return {**shared, **own}


# More in use after a sleep than after the best one by these counts as a residue; the kernels and the
# context of a process grow by less.
_RESIDUE_BYTES: Final = GIB
_RESIDUE_RATIO: Final = 0.1
# A sleep that frees less than this part of what was in use released nothing that counts.
_SLEEP_FREED_RATIO: Final = 0.1
_SAME_FREED_RATIO: Final = 0.9
# The ranks of one engine print their sleep within this time, or on neighboring lines without a
# clock.
_SAME_SLEEP_S: Final = 5
_SAME_SLEEP_LINES: Final = 2
_CLOCK: Final = re.compile(r"\b(\d\d):(\d\d):(\d\d)\b")
_DAY_S: Final = 86400
# A residue grows if each of these sleeps left more than this part of the whole growth.
_LEAST_GROWING_SLEEPS: Final = 3
_GROWING_STEP_RATIO: Final = 0.05


class Sleeps(NamedTuple):
    """Hold what one process printed about its sleeps, without the memory of each one.

    ``residue`` is the first sleep after which clearly more stayed in use: its number, the bytes in
    use, and whether the engine itself kept them.
    """

    cycle: int = 0
    sizes: tuple[float, ...] = ()
    freed: float | None = None
    least: float | None = None
    most_freed: float = 0.0
    residue: tuple[int, float, bool] | None = None

    def after(self, used: float | None, freed: float | None) -> Sleeps:
        """Return the state after one more sleep; None for sizes that it did not print."""
        cycle = self.cycle + 1
        if used is None:
            return self._replace(cycle=cycle)
        if self.least is None:
            is_worse = freed is not None and freed < _SLEEP_FREED_RATIO * (freed + used)
            least = used
        else:
            is_worse = used - self.least > max(_RESIDUE_BYTES, _RESIDUE_RATIO * self.least)
            least = min(used, self.least)
        residue = self.residue
        if is_worse and residue is None:
            # An engine that freed as much as before did its part, so another program has the
            # memory.
            wanted = _SAME_FREED_RATIO * self.most_freed
            is_by_others = freed is not None and freed > 0 and freed >= wanted
            residue = (cycle, used, not is_by_others)
        return Sleeps(
            cycle,
            (*self.sizes, used)[-MAX_SLEEPS:],
            freed,
            least,
            max(self.most_freed, freed or 0.0),
            residue,
        )

    @property
    def grows(self) -> bool:
        """Return whether each of the last sleeps left clearly more than the one before."""
        if len(self.sizes) < _LEAST_GROWING_SLEEPS:
            return False
        rise = self.sizes[-1] - self.sizes[0]
        steps = [after - before for before, after in itertools.pairwise(self.sizes)]
        return rise > _RESIDUE_BYTES and min(steps) > _GROWING_STEP_RATIO * rise

    def facts(self) -> dict[str, FactValue]:
        """Return the facts for the rules."""
        found: dict[str, FactValue] = {"sleep_cycles": self.cycle}
        if self.sizes:
            found["sleep_used_bytes"] = round(self.sizes[-1])
            found["sleep_used_each"] = ", ".join(f"{size / GIB:.2f}" for size in self.sizes)
            found["sleep_least_used_bytes"] = round(self.least or 0.0)
            found["sleep_most_freed_bytes"] = round(self.most_freed)
            found["residue_grows"] = self.grows
        if self.freed is not None:
            found["sleep_freed_bytes"] = round(self.freed)
        if self.residue is not None:
            cycle, used, is_by_engine = self.residue
            found["sleep_residue_cycle"] = cycle
            found["sleep_residue_used_bytes"] = round(used)
            found["sleep_kept_by_engine"] = is_by_engine
        return found


class _LastSleep(NamedTuple):
    """Hold what a process printed before and after its last sleep, and that sleep's own line."""

    before: Sleeps
    after: Sleeps
    used: float | None
    freed: float | None
    line: int
    at_s: int | None


def _seconds(text: str) -> int | None:
    clock = _CLOCK.search(text)
    if clock is None:
        return None
    hours, minutes, seconds = map(int, clock.groups())
    return 3600 * hours + 60 * minutes + seconds


def nearest_phase(near: list[Near]) -> str | None:
    """Return the most specific phase of the frames near a failure, or None."""
    phases = set()
    for n in near:
        if n.phase:
            phases.add(n.phase)
    for phase in PHASE_RANK:
        if phase in phases:
            return phase
    return None


# Find the line of the user's own file whose call ran out of memory in a printed traceback.
#
# A traceback leads from the user's file into libraries. The deepest frame outside of libraries is
# the line that the user can change. This reads the forms of Python and IPython.

MAX_SOURCE_CHARS: Final = 160
# A traceback is printed at once, so its frames are directly above its message.
MAX_LINES_ABOVE: Final = 400
MAX_PROCESSES: Final = 64
# These patterns compile with the first traceback.
_FRAME: Final = r'^\s*File "?(?P<file>[^"\n]{1,400}?)"?(?:, line |:)(?P<line>\d+)(?:, in (?P<function>[^\s(]+))?'
_CELL: Final = (
    r"^\s*(?P<file>(?:Cell In|Input In) ?\[\d+\]|<ipython-input-[^>]{1,80}>)"
    r"(?:, line (?P<line>\d+)| in (?P<function>[^\s(]+))"
)
# Literals of the two patterns above; most lines contain none.
_FRAME_MARKS: Final = ("File ", "Cell In", "Input In", "<ipython")
_ARROW: Final = r"^\s*-{2,}> ?(?P<line>\d+) (?P<source>.*)"
_MARKERS: Final = r"^[\s~^|]*$"
_MESSAGE: Final = (
    r"(?i)^\s*(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?!\()|[\w. ]{0,20}out of memory)"
)
_MODEL_CALL: Final = (
    r"\.generate\(|\b(?:\w*model\w*|\w*pipe\w*|generator|llm|classifier|encoder|net)(?:\.\w+)?\("
)


@dataclass(slots=True, eq=False, repr=False)
class _Frame:
    # The line's number in the input.
    number: int
    file: str
    line: int | None
    function: str | None
    source: str = ""


class UserFrames:
    """Track the deepest user frame in each process's latest traceback."""

    def __init__(self) -> None:
        self._last: dict[str | None, _Frame] = {}
        # Frames whose source line comes next.
        self._waiting: dict[str | None, _Frame] = {}
        self._in_library: set[str | None] = set()

    def see(self, text: str, process: str | None, number: int) -> None:
        """Add the next line of a process, without the logger's prefix."""
        waiting = self._waiting.pop(process, None)
        is_source = not (
            re.match(_FRAME, text) or re.match(_MARKERS, text) or re.match(_MESSAGE, text)
        )
        if waiting is not None and is_source:
            waiting.source = text.strip()[:MAX_SOURCE_CHARS]
        if TRACEBACK in text:
            self._last.pop(process, None)
            return
        if any(mark in text for mark in _FRAME_MARKS):
            self._see_frame(text, process, number)
        elif (
            "->" in text
            and (arrow := re.match(_ARROW, text))
            and process in self._last
            and process not in self._in_library
        ):
            frame = self._last[process]
            frame.line, frame.source = (
                int(arrow["line"]),
                arrow["source"].strip()[:MAX_SOURCE_CHARS],
            )

    def _see_frame(self, text: str, process: str | None, number: int) -> None:
        found = re.match(_FRAME, text) or re.match(_CELL, text)
        if found is None:
            return
        if re.search(LIBRARY, found["file"]):
            self._in_library.add(process)
            return
        self._in_library.discard(process)
        if len(self._last) >= MAX_PROCESSES:
            self._last.clear()
        line = found["line"]
        frame = _Frame(number, found["file"], int(line) if line else None, found["function"])
        self._last[process] = self._waiting[process] = frame

    def facts(self, process: str | None, number: int) -> dict[str, Fact]:
        """Return the facts of the user's call for a failure at line ``number``, if known."""
        frame = self._last.get(process)
        if frame is None or not 0 <= number - frame.number <= MAX_LINES_ABOVE or not frame.source:
            return {}
        values: dict[str, str | int | bool] = {
            "call_file": PurePosixPath(frame.file.replace("\\", "/")).name,
            "call_source": frame.source,
            "calls_model": re.search(_MODEL_CALL, frame.source) is not None,
        }
        if frame.line is not None:
            values["call_line"] = frame.line
        if frame.function is not None and not frame.function.startswith("<"):
            values["call_function"] = frame.function
        if (argument := _argument(frame.source)) is not None:
            values["call_argument"] = argument
        return {name: Fact(name, value, line=frame.number) for name, value in values.items()}


def _argument(source: str) -> str | None:
    """Return the first argument of the first call in a source line, or None."""
    # What an exception is raised with holds no rows.
    if source.startswith("raise "):
        return None
    text = source.removeprefix("return ").removeprefix("with ").rstrip(":")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        for argument in node.args:
            if isinstance(argument, ast.Name):
                return argument.id
        return None
    return None
