"""Diagnose one attempt from its recorded output, if it failed.

A stop for the host's memory is a failure too: the supervisor's record of it becomes the facts.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oomguard.analyst.attempt_settings import EnvLauncher, given_settings, with_effective_settings
from oomguard.analyst.link import AttemptResult
from oomguard.analyst.outcome import TerminationReason
from oomguard.analyst.side_effects import SideEffectMonitor
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.files import read_tables
from oomguard.core.incident import Diagnosis, Evidence, Incident
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Insight
from oomguard.engines.unwrap_command import inner_commands
from oomguard.probe.host import Cgroup, killed_for_memory, read_cgroup
from oomguard.remedy.policy import LeastValue, with_needed
from oomguard.retry import Ledger
from oomguard.scan.incidents import with_label

if TYPE_CHECKING:
    from oomguard.analyst.output import ParsedOutput
    from oomguard.rules.rule_files import RuleSet


def roll_back(ledger: Ledger, needed: Mapping[str, LeastValue], rules: RuleSet) -> Diagnosis:
    """Roll back our changes that made the engine refuse a request, and plan again.

    The result is the last failure with a new plan that respects what the request needs.

    Args:
        ledger: the run's attempts; its policy contains the new needs afterwards.
        needed: the refused values, by setting.
        rules: the rules that explain the failure.
    """
    # Without an earlier failure, the refused change was reused from an earlier run.
    if ledger.diagnosis is None:
        for patch in ledger.patches:
            if patch.setting in needed:
                fields = {
                    "setting": patch.setting,
                    "changed_to": patch.new,
                    "why_changed": patch.reason,
                }
                get_logger().warning(
                    "A setting from a previous run made the server refuse a request. Run without "
                    "--reuse, or forget it with oomguard history --forget",
                    **fields,
                )
        return Diagnosis("")
    before = ledger.diagnosis
    for name, need in needed.items():
        if math.isinf(need.value):
            need_field = {}
        else:
            need_field = {"needed": f"{need.value:.0f}"}
        changed = {"setting": name, "changed_to": ledger.settings.pop(name), **need_field}
        get_logger().warning("Rolled back a change, because a request was refused", **changed)
    ledger.policy = with_needed(ledger.policy, needed)
    failed = (before.first_cause,) if before.first_cause is not None else ()
    return ledger.diagnose(
        Diagnosis("", failed, before.notes, before.starts), rules, local_models=True
    )


def killed_by_kernel(status: int, death: Incident | None) -> Incident:
    """Return an incident for the kernel's out-of-memory kill.

    SIGKILL alone proves nothing, but the cgroup counts such kills.
    """
    whom, why = (
        ("the command", f"exit status {status}") if death is None else ("its engine", death.message)
    )
    text = (
        f"the kernel killed {whom} because memory ran out: {why}, and its cgroup counts one more "
        "oom_kill"
    )
    return Incident("host_oom", text, framework="host", evidence=(Evidence(text),))


def _program_table() -> Mapping[str, Any]:
    """Return the programs that show texts of other programs, from ``wrappers.toml``."""
    file = Path(__file__).with_name("wrappers.toml")
    return next(iter(read_tables("wrappers", [file]).values()))


def ends_by_printing_texts(argv: Sequence[str]) -> bool:
    """Return whether a command's last program only prints texts, like ``cat`` and ``echo``.

    Its status 0 is then not the status of an engine, as in ``vllm serve m || echo no server``.
    """
    table = _program_table()
    commands = inner_commands(argv)
    if not commands:
        return False
    last = commands[-1]
    if last.program in table["log_readers"]:
        return "logs" in last.args
    return last.program in table["print_texts"]


def only_compares_texts(argv: Sequence[str]) -> bool:
    """Return whether a command only compares or searches texts, so that it quotes failures.

    A shell counts if all of its text does.
    """
    table = _program_table()
    programs = {inner.program for inner in inner_commands(argv)}
    scripts = set()
    for word in argv:
        # A Python file is known by its name.
        if word.endswith(".py"):
            scripts.add(PurePath(word).stem)
    compare = programs & set(table["compare_texts"]) - scripts
    return bool(compare) and programs - compare <= set(table["beside_them"])


# A failure whose line names no process may still belong to a rank: srun's labels or torchrun's
# table of failures show it. torchrun's table repeats the error file of a worker
# (TORCHELASTIC_ERROR_FILE), so it is evidence of that worker's words. Its "root cause" is only the
# worker whose end the agent saw first, so memory figures take precedence.

_LABELS: Final = frozenset({"-l", "--label"})
# torch/distributed/elastic/multiprocessing/errors/__init__.py: an entry of the table, and its only
# line that names the rank.
_ENTRY: Final = re.compile(r"^\s*\[\d+\]:\s*$", re.MULTILINE)
_RANK: Final = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)", re.MULTILINE)
_TABLE: Final = "Root Cause (first observed failure):"


def with_ranks(diagnosis: Diagnosis, tail: str, argv: Sequence[str]) -> Diagnosis:
    """Return a diagnosis whose incidents name their rank as process.

    torchrun's table is used only if nothing else names a rank.

    Args:
        diagnosis: the diagnosis of a command's output.
        tail: the end of the output.
        argv: the command.
    """
    names = [PurePath(word).name for word in argv]
    is_labelled = "srun" in names and bool(_LABELS & set(names))
    found = []
    for incident in diagnosis.incidents:
        found.append(_named(incident, tail, is_labelled=is_labelled))
    return replace(diagnosis, incidents=tuple(found))


def _named(incident: Incident, tail: str, *, is_labelled: bool) -> Incident:
    incident = with_label(incident, is_labelled=is_labelled)
    if incident.location.process is not None or not incident.evidence:
        return incident
    rank = _in_table(incident.evidence[0].text.strip(), tail)
    if rank is None:
        return incident
    return replace(incident, location=replace(incident.location, process=f"rank {rank}"))


def _in_table(text: str, tail: str) -> str | None:
    if text and _TABLE in tail:
        at = tail.rfind(text)
    else:
        at = -1
    if at > 0:
        begins = [entry.start() for entry in _ENTRY.finditer(tail, 0, at)]
    else:
        begins = []
    if begins:
        rank = _RANK.search(tail, begins[-1], at)
    else:
        rank = None
    if rank is None:
        return None
    return rank[1]


# A failure printed longer ago than this did not end the run. A server that recovered an hour ago
# and dies of something else is not rerun for it.
RECENT_S: Final = 300.0
SIGKILL_STATUS: Final = 137


@dataclass(frozen=True, slots=True)
class AttemptDiagnosis:
    """Hold the diagnosis of an attempt.

    ``refused`` maps settings that we changed to the values that a refused request needs.
    """

    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis(""))
    refused: Mapping[str, LeastValue] = field(default_factory=dict)


@dataclass(slots=True)
class AttemptDiagnoser:
    """Read and explain the attempts of one run.

    Attributes:
        engine: the launcher of the command's engine.
        insight: knowledge about the engine beyond its command line.
        ledger: the attempts; each diagnosis is planned for in it.
        load_rules: loads the rules, when the first failure needs them.
    """

    engine: EnvLauncher
    insight: Insight
    ledger: Ledger
    load_rules: Callable[[], RuleSet]
    _rules: RuleSet | None = None

    @property
    def rules(self) -> RuleSet:
        """The rules that explain a failure."""
        if self._rules is None:
            self._rules = self.load_rules()
        return self._rules

    def read_output(
        self, ended: AttemptResult, side_effects: SideEffectMonitor, first: Launch
    ) -> ParsedOutput | None:
        """Read what the command printed.

        None if only our reader ended it, if the command only quotes, or if it succeeded without an
        engine.
        """
        recording = ended.output
        with contextlib.closing(recording):
            if ended.of_reader or only_compares_texts(first.argv):
                return None
            if ended.status == 0 and ended.host is None:
                if ends_by_printing_texts(first.argv):
                    return None
                if not recording.may_hold(self.engine.SPEAKS):
                    return None
            from oomguard.analyst.output import parse_output

            side_effects.read(recording)
            return parse_output(recording, ended.status, self.rules)

    def explain(
        self,
        output: ParsedOutput,
        status: int,
        cgroup: Cgroup | None,
        launches: tuple[Launch, Launch],
        *,
        stopped: bool,
        ended: TerminationReason | None = None,
    ) -> AttemptDiagnosis:
        """Explain how an attempt ended.

        Args:
            output: its parsed output.
            status: its exit status.
            cgroup: the counts of its control group before it began; None if unreadable.
            launches: the user's command, and the command of this attempt.
            stopped: whether the user asked to stop.
            ended: why oomguard stopped the attempt; None if it ended on its own.
        """
        first, launch = launches
        if status:
            needed = self.insight.refused_length(output.tail, self.ledger.settings)
        else:
            needed = {}
        if needed:
            return AttemptDiagnosis(roll_back(self.ledger, needed, self.rules), needed)
        # A server may end with status 0 after its engine died, or after a stop signal.
        scanner = output.scanner
        if status == 0:
            death = scanner.death()
        else:
            death = None
        if status == 0 and (stopped or (death is None and ended is None)):
            return AttemptDiagnosis()
        if ended is None and output.ended_of is not None:
            get_logger().debug(
                "The command ended with an exception without memory failure",
                exception=output.ended_of,
            )
            return AttemptDiagnosis(
                Diagnosis("", notes=(f"the command ended with {output.ended_of}",))
            )
        settings = given_settings(self.engine, launch, self.insight.started(launch))
        # An earlier patch decides the effective value. The user's command and the log still decide
        # who chose the setting.
        scanned = scanner.diagnosis("", given=settings, newer_than_s=time.monotonic() - RECENT_S)
        if status:
            scanned = output.or_engine_log(scanned, self.insight.said(launch), self.rules, settings)
            scanned = with_ranks(scanned, output.tail, first.argv)
        # Failures of an earlier start, or of a request, did not end the run.
        if death is not None:
            own = []
            for incident in scanned.incidents:
                if incident.start == death.start:
                    own.append(incident)
            scanned = replace(scanned, incidents=tuple(own) or (death,))
        # The stop itself caused what the engine printed while it ended.
        if ended is not None:
            counted = scanned.incidents
            if ended.is_hang:
                counted = _out_of_memory(scanned)
            scanned = replace(scanned, incidents=counted, notes=(ended.why, *scanned.notes))
        if ended is not None and ended.host is not None:
            scanned = with_host_stop(scanned, ended.host)
        if death is None:
            signalled = status
        else:
            signalled = SIGKILL_STATUS
        of_kernel = ended is None or not ended.is_hang
        of_memory = of_kernel and killed_for_memory(signalled, cgroup, read_cgroup())
        if of_memory and not any(i.is_oom for i in scanned.incidents):
            scanned = replace(
                scanned, incidents=(*scanned.incidents, killed_by_kernel(status, death))
            )
        settled = partial(with_effective_settings, engine=self.engine, first=first, launch=launch)
        scanned = replace(
            scanned,
            incidents=tuple(settled(i, changed=self.ledger.settings) for i in scanned.incidents),
        )
        return AttemptDiagnosis(self.ledger.diagnose(scanned, self.rules, local_models=True))


_STOP_KIND: Final = "host_oom"
_STOP_BY_LIMIT: Final = "limit"
# The curve shows these seconds before the stop.
_CURVE_POINTS_S: Final = (60, 30, 10, 5, 2, 1)


def reason_of(record: Mapping[str, Any] | None) -> TerminationReason | None:
    """Return why the supervisor stopped the command; None if it did not."""
    if record is None:
        return None
    return TerminationReason(_stop_sentence(record), is_hang=False, host=record)


def with_host_stop(found: Diagnosis, record: Mapping[str, Any]) -> Diagnosis:
    """Return the diagnosis with the stop as its first failure.

    The engine's own last words are left out unless memory ran out in it, because the stop caused
    them.

    Args:
        found: the diagnosis of the command's output.
        record: the supervisor's record of the stop.
    """
    figures = _stop_figures(record)
    # On unified memory, or on a CPU, the engine's own memory is what filled the host.
    figures["engine_in_host_memory"] = bool(found.starts) and (
        record["is_unified"] or "on_cpu" in found.starts[-1].facts
    )
    facts = {name: Fact(name, value, "measured") for name, value in figures.items()}
    curve = _stop_curve(record["curve"])
    lines = (_stop_sentence(record), curve, _killed_processes(record["killed"]))
    evidence = tuple(Evidence(line) for line in filter(None, lines))
    incident = Incident(
        _STOP_KIND,
        evidence[0].text,
        framework="host",
        facts=MappingProxyType(facts),
        evidence=evidence,
    )
    if found.starts:
        start = found.starts[-1]
        incident = replace(
            incident,
            framework=start.framework,
            framework_version=start.framework_version,
            facts=MappingProxyType({**start.facts, **facts}),
            settings=start.settings,
            settings_complete=start.settings_complete,
            start=start.number,
        )
    notes = [curve]
    for note in found.notes:
        if note != evidence[0].text:
            notes.append(note)
    incidents = (incident, *_out_of_memory(found))
    return replace(found, incidents=incidents, notes=tuple(notes))


def _out_of_memory(found: Diagnosis) -> tuple[Incident, ...]:
    """Return only the failures in which memory ran out."""
    incidents = []
    for incident in found.incidents:
        if incident.is_oom:
            incidents.append(incident)
    return tuple(incidents)


def _stop_figures(record: Mapping[str, Any]) -> dict[str, FactValue]:
    total = record["total_bytes"]
    figures: dict[str, FactValue] = {
        "host_scope": record["scope"],
        "host_available_bytes": record["available_bytes"],
        "host_reserve_bytes": record["reserve_bytes"],
        "host_room_bytes": max(0, record["begin_bytes"] - record["reserve_bytes"]),
        "host_growth_bytes": record["growth_bytes"],
        "host_machine_bytes": record["machine_bytes"],
    }
    if record["scope"] == _STOP_BY_LIMIT:
        figures["host_limit_bytes"] = total
    else:
        figures["host_total_bytes"] = total
    if record["holder"]:
        figures["host_holder"] = f"{record['holder']} (pid {record['holder_pid']})"
        figures["host_holder_bytes"] = record["holder_bytes"]
    return figures


def _stop_sentence(record: Mapping[str, Any]) -> str:
    where = {True: "below the memory limit of", False: "of"}[record["scope"] == _STOP_BY_LIMIT]
    return (
        f"oomguard stopped the command: {format_gib(record['available_bytes'])} was left {where} "
        f"{format_gib(record['total_bytes'])}, and the host reserve is "
        f"{format_gib(record['reserve_bytes'])}"
    )


def _stop_curve(curve: Sequence[Sequence[float]]) -> str:
    """Return what was left in the last minute, as one line."""
    shown = []
    for seconds in _CURVE_POINTS_S:
        earlier = []
        for at_s, left in curve:
            if at_s <= -seconds:
                earlier.append(left)
        if earlier:
            shown.append(f"{format_gib(earlier[-1])} {seconds} s before")
    shown.append(f"{format_gib(curve[-1][1])} at the stop")
    return f"Memory left: {', '.join(shown)}"


def _killed_processes(killed: Sequence[Sequence[Any]]) -> str:
    """Return the processes that did not stop in time, as one line; "" without any."""
    names = [f"{name} (pid {pid}, {format_gib(size)})" for pid, name, size in killed]
    if not names:
        return ""
    return f"oomguard killed {', '.join(names)}, because SIGTERM did not stop the command in time"
