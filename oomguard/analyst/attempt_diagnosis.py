"""What an attempt's output says of its end: heard where it may hold anything, and diagnosed where
the attempt failed.
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
from typing import TYPE_CHECKING, Final

from oomguard.analyst.effective_settings import WithVariables, as_it_ran, given_settings
from oomguard.analyst.link import Attempted
from oomguard.analyst.outcome import EndedByUs
from oomguard.analyst.side_effects import SideEffectMonitor
from oomguard.core.files import read_tables
from oomguard.core.incident import Diagnosis, Evidence, Incident
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Insight
from oomguard.engines.unwrap_command import inner_commands
from oomguard.probe.host import Cgroup, killed_for_memory, read_cgroup
from oomguard.remedy.policy import LeastValue, with_needed
from oomguard.retry.ledger import Ledger
from oomguard.scan.incidents import with_label

if TYPE_CHECKING:
    from oomguard.analyst.output import Heard
    from oomguard.rules.rule_files import RuleSet


# Take back our own change that refused a request, and plan anew for the failure before it with
# what the request needs.


def take_back(ledger: Ledger, needed: Mapping[str, LeastValue], rules: RuleSet) -> Diagnosis:
    """Take the settings back that were too small for a request, and return the last failure with
    another plan.

    Args:
        ledger: of the run; its policy holds what the request needs from here on.
        needed: what was refused, by setting.
        rules: what explains a failure.
    """
    if (
        ledger.diagnosis is None
    ):  # it did not come after a failure: an earlier run's change was reused
        for patch in ledger.patches:
            if patch.setting in needed:
                told = {
                    "setting": patch.setting,
                    "changed_to": patch.new,
                    "why_changed": patch.reason,
                }
                get_logger().warning(
                    "what was reused refused a request: run it without --reuse, or forget it",
                    **told,
                )
        return Diagnosis("")
    before = ledger.diagnosis
    for name, need in needed.items():
        if math.isinf(need.value):
            told = {}
        else:
            told = {"needed": f"{need.value:.0f}"}
        changed = {"setting": name, "changed_to": ledger.settings.pop(name), **told}
        get_logger().warning("our own change refused a request: it is taken back", **changed)
    ledger.policy = with_needed(ledger.policy, needed)
    failed = (before.first_cause,) if before.first_cause is not None else ()
    return ledger.diagnose(
        Diagnosis("", failed, before.notes, before.starts), rules, local_models=True
    )


# A kill by the kernel for memory, as an incident: the log of what was killed says nothing of it.


def killed_by_kernel(status: int, death: Incident | None) -> Incident:
    """Return the kernel's kill for memory: SIGKILL says nothing by itself, the cgroup's own count
    does.
    """
    whom, why = (
        ("the command", f"exit status {status}") if death is None else ("its engine", death.message)
    )
    text = f"the kernel ended {whom} for memory: {why}, and its cgroup counts one oom_kill more"
    return Incident("host_oom", text, framework="host", evidence=(Evidence(text),))


# Whether a command can only quote: what it prints of a failure is somebody else's.


def ends_by_printing_texts(argv: Sequence[str]) -> bool:
    """Return whether a command's last program prints texts of others, as ``cat`` and ``echo`` do.

    Its status 0 is not that of an engine. A shell's text that falls back to something else ends so:
    ``vllm serve m || echo no server``.
    """
    table = next(
        iter(read_tables("wrappers", [Path(__file__).with_name("wrappers.toml")]).values())
    )
    programs = [inner.program for inner in inner_commands(argv)]
    return bool(programs) and programs[-1] in table["print_texts"]


def only_compares_texts(argv: Sequence[str]) -> bool:
    """Return whether a command, or all of a shell's text, compares or searches texts and does
    nothing else.
    """
    table = next(
        iter(read_tables("wrappers", [Path(__file__).with_name("wrappers.toml")]).values())
    )
    programs = {inner.program for inner in inner_commands(argv)}
    scripts = {
        PurePath(word).stem for word in argv if word.endswith(".py")
    }  # a Python file goes by its name too
    compare = programs & set(table["compare_texts"]) - scripts
    return bool(compare) and programs - compare <= set(table["beside_them"])


# Which rank a failure is of, where the line itself names no process: by srun's labels, or by
# torchrun's table of failures.
#
# torchrun's table repeats what a worker left in its error file (TORCHELASTIC_ERROR_FILE). It is
# evidence of what that worker said; which worker it calls the root cause is the one whose end the
# agent saw first, which is not taken over what is known of memory.

_LABELS: Final = frozenset({"-l", "--label"})
# torch/distributed/elastic/multiprocessing/errors/__init__.py: an entry of the table, and the one
# line of it that names the rank.
_ENTRY: Final = re.compile(r"^\s*\[\d+\]:\s*$", re.MULTILINE)
_RANK: Final = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)", re.MULTILINE)
_TABLE: Final = "Root Cause (first observed failure):"


def with_ranks(diagnosis: Diagnosis, tail: str, argv: Sequence[str]) -> Diagnosis:
    """Return a diagnosis whose incidents name their rank as process where it is told; by torchrun's
    table where nothing else names one.

    Args:
        diagnosis: of a command's output.
        tail: the end of the output.
        argv: the command.
    """
    names = [PurePath(word).name for word in argv]
    is_labelled = "srun" in names and bool(_LABELS & set(names))
    found = tuple(
        _named(incident, tail, is_labelled=is_labelled) for incident in diagnosis.incidents
    )
    return replace(diagnosis, incidents=found)


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


# What reads and explains a failure is loaded when there is one: the command starts at once.

# A failure last printed longer ago than this before the end did not end the run: a server that
# recovered an hour ago and dies of something else is not run again for it.
RECENT_S: Final = 300.0
SIGKILL_STATUS: Final = 137


@dataclass(frozen=True, slots=True)
class Explained:
    """The diagnosis of an attempt; ``refused`` is what our own change refused a request of, by
    setting: it is taken back.
    """

    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis(""))
    refused: Mapping[str, LeastValue] = field(default_factory=dict)


@dataclass(slots=True)
class Explainer:
    """Reads and explains the attempts of one run.

    Attributes:
        engine: what the command starts.
        insight: what is known of it beyond its command.
        ledger: the attempts; each diagnosis is planned for in it.
        load_rules: returns what explains a failure; called when there is one.
    """

    engine: WithVariables
    insight: Insight
    ledger: Ledger
    load_rules: Callable[[], RuleSet]
    _rules: RuleSet | None = None

    @property
    def rules(self) -> RuleSet:
        """What explains a failure."""
        if self._rules is None:
            self._rules = self.load_rules()
        return self._rules

    def hear(self, ended: Attempted, witness: SideEffectMonitor, first: Launch) -> Heard | None:
        """Read what the command printed; None where it ended of our reader, can only quote, or
        ended well and no engine spoke.
        """
        recording = ended.output
        with contextlib.closing(recording):
            if ended.of_reader or only_compares_texts(first.argv):
                return None
            if ended.status == 0:
                if ends_by_printing_texts(first.argv):
                    return None
                if not recording.may_hold(self.engine.SPEAKS):
                    return None
            from oomguard.analyst.output import hear

            witness.read(recording)
            return hear(recording, ended.status, self.rules)

    def explain(
        self,
        heard: Heard,
        status: int,
        cgroup: Cgroup | None,
        launches: tuple[Launch, Launch],
        *,
        stopped: bool,
        ended: EndedByUs | None = None,
    ) -> Explained:
        """Explain how an attempt ended.

        Args:
            heard: what it printed.
            status: its exit status.
            cgroup: the counts of its control group before it began.
            launches: the command as it was first, and as this attempt ran it.
            stopped: whether the user asked to stop.
            ended: why we ended it; None: it ended by itself.
        """
        first, launch = launches
        if status:
            needed = self.insight.refused_length(heard.tail, self.ledger.settings)
        else:
            needed = {}
        if needed:
            return Explained(take_back(self.ledger, needed, self.rules), needed)
        # A server may end with status 0 after its engine died, and after a stop that it was sent.
        scanner = heard.scanner
        if status == 0:
            death = scanner.death()
        else:
            death = None
        if status == 0 and (stopped or (death is None and ended is None)):
            return Explained()
        if ended is None and heard.ended_of is not None:
            get_logger().debug("the command ended of something else", exception=heard.ended_of)
            return Explained(Diagnosis("", notes=(f"the command ended of {heard.ended_of}",)))
        settings = given_settings(self.engine, launch, self.insight.started(launch))
        # What an earlier patch set is in force; whose choice the setting was stays as the first
        # launch and the log say.
        scanned = scanner.diagnosis("", given=settings, newer_than_s=time.monotonic() - RECENT_S)
        if status:
            scanned = heard.or_said(scanned, self.insight.said(launch), self.rules, settings)
            scanned = with_ranks(scanned, heard.tail, first.argv)
        if death is not None:  # what an earlier start or a request failed of did not end the run
            own = tuple(i for i in scanned.incidents if i.start == death.start)
            scanned = replace(scanned, incidents=own or (death,))
        if ended is not None:  # what it printed while we ended it is our doing
            found = tuple(i for i in scanned.incidents if i.is_oom or not ended.is_hang)
            scanned = replace(scanned, incidents=found, notes=(ended.why, *scanned.notes))
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
        settled = partial(as_it_ran, engine=self.engine, first=first, launch=launch)
        scanned = replace(
            scanned,
            incidents=tuple(settled(i, changed=self.ledger.settings) for i in scanned.incidents),
        )
        return Explained(self.ledger.diagnose(scanned, self.rules, local_models=True))
