"""What an attempt's output says of its end: heard where it may hold anything, and diagnosed where the attempt failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from oomguard.analyst.link import Attempted
from oomguard.attempting.ledger import Ledger
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Insight
from oomguard.incident import Diagnosis
from oomguard.log import get_logger
from oomguard.observe.host import Cgroup, killed_for_memory, read_cgroup
from oomguard.remedy.policy import Need
from oomguard.supervise.by_variable import WithVariables
from oomguard.supervise.ended_by_us import EndedByUs
from oomguard.supervise.in_force import as_it_ran, given_settings
from oomguard.supervise.kernel_kill import killed_by_kernel
from oomguard.supervise.rank_in_text import with_ranks
from oomguard.supervise.side_effects import Witness
from oomguard.supervise.taking_back import take_back

# What reads and explains a failure is loaded when there is one: the command starts at once.
if TYPE_CHECKING:
    from oomguard.rules.load import RuleSet
    from oomguard.supervise.heard import Heard

# A failure last printed longer ago than this before the end did not end the run: a server that recovered an hour ago
# and dies of something else is not run again for it.
RECENT_S: Final = 300.0
SIGKILL_STATUS: Final = 137


@dataclass(frozen=True, slots=True)
class Explained:
    """The diagnosis of an attempt; ``refused`` is what our own change refused a request of, by setting: it is taken back."""

    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis(""))
    refused: Mapping[str, Need] = field(default_factory=dict)


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

    def hear(self, ended: Attempted, witness: Witness, first: Launch) -> Heard | None:
        """Read what the command printed; None where it ended of our reader, can only quote, or ended well and no engine spoke."""
        recording = ended.output
        with contextlib.closing(recording):
            if ended.of_reader or (ended.status == 0 and not recording.may_hold(self.engine.SPEAKS)):
                return None
            from oomguard.supervise.quoting import only_compares_texts

            if only_compares_texts(first.argv):
                return None
            from oomguard.supervise.heard import hear

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
        needed = self.insight.refused_length(heard.tail, self.ledger.settings) if status else {}
        if needed:
            return Explained(take_back(self.ledger, needed, self.rules), needed)
        # A server may end with status 0 after its engine died, and after a stop that it was sent.
        scanner = heard.scanner
        death = scanner.death() if status == 0 else None
        if status == 0 and (stopped or (death is None and ended is None)):
            return Explained()
        if ended is None and heard.ended_of is not None:
            get_logger().debug("the command ended of something else", exception=heard.ended_of)
            return Explained(Diagnosis("", notes=(f"the command ended of {heard.ended_of}",)))
        settings = given_settings(self.engine, launch, self.insight.started(launch))
        # What an earlier patch set is in force; whose choice the setting was stays as the first launch and the log say.
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
        signalled = status if death is None else SIGKILL_STATUS
        of_kernel = ended is None or not ended.is_hang
        of_memory = of_kernel and killed_for_memory(signalled, cgroup, read_cgroup())
        if of_memory and not any(i.is_oom for i in scanned.incidents):
            scanned = replace(scanned, incidents=(*scanned.incidents, killed_by_kernel(status, death)))
        settled = partial(as_it_ran, engine=self.engine, first=first, launch=launch)
        scanned = replace(scanned, incidents=tuple(settled(i, changed=self.ledger.settings) for i in scanned.incidents))
        return Explained(self.ledger.diagnose(scanned, self.rules, local_models=True))
