"""The attempts of ``oomguard run``: run, diagnose, plan, patch, run again, until it fits or nothing
is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import DEBUG
from pathlib import Path
from typing import TYPE_CHECKING

from oomguard.analyst.attempt_diagnosis import Explained, Explainer
from oomguard.analyst.attempt_hooks import Companions
from oomguard.analyst.coordination import Agreed, Alone, OwnDeed, OwnEnd, Together, record_of
from oomguard.analyst.effective_settings import (
    BY_VARIABLE,
    WithVariables,
    tell_places,
    tell_unheeded,
)
from oomguard.analyst.journal_hook import JournalHook, last_start, learn
from oomguard.analyst.link import Link, LiveOutput, ReceivedSignals
from oomguard.analyst.nested_run import tell_exhausted
from oomguard.analyst.outcome import EndedByUs, Outcome, error_of, outcome_of
from oomguard.analyst.placed_runs import AsGiven, DeviceAssignment
from oomguard.analyst.refusals import chosen_in, refusal_of
from oomguard.analyst.restart_gate import Between, cannot_make
from oomguard.analyst.side_effects import OwnFiles, SideEffectMonitor, of_inner_runs, of_journal
from oomguard.core.errors import DeadlineError, PlacementError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Diagnosis, Effect, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.setting_spellings import surface
from oomguard.core.settings import SETTINGS
from oomguard.engines.command import Launch, with_change, with_failed_engine, without_changes
from oomguard.engines.protocol import Insight, Launcher
from oomguard.engines.registry import insight_of, launcher_of
from oomguard.engines.start_attempt import StartedEngine, changes_with
from oomguard.probe.host import Cgroup, read_cgroup
from oomguard.remedy.policy import Policy, is_out_of_question, with_needed
from oomguard.report.wording import arrow
from oomguard.retry.ledger import Ledger

if TYPE_CHECKING:
    from oomguard.analyst.output import Heard
    from oomguard.rules.rule_files import RuleSet


# Tell a failure of memory: the event, the diagnosis with commands to paste, the places of the
# settings; and whether our change arrived.

# The commands to paste after a failure: the user's own, with each solved patch and alternative
# applied.


def to_paste(launch: Launch, engine: Launcher, settings: Mapping[str, FactValue]) -> str:
    """Return a launch with these settings as a line to read and paste, without what only this run
    needs.
    """
    from oomguard.report.redact import mask_command

    return engine.shown(
        replace(launch, argv=tuple(mask_command(launch.argv, keep_homes=True)), env={}), settings
    )


def commands_to_paste(
    launch: Launch,
    engine: Launcher,
    changed: Mapping[str, FactValue],
    incident: Incident,
    started: Sequence[StartedEngine],
) -> dict[str, str]:
    """Return the full command with each solved patch and alternative applied, its secrets masked.

    Args:
        launch: the command as the user gave it.
        engine: how it is started.
        changed: what was changed so far.
        incident: the failure, planned for; what is pinned in it is no command.
        started: the engines that the command started, as far as they were told.
    """
    from oomguard.report.redact import mask_command

    first = replace(launch, argv=tuple(mask_command(launch.argv, keep_homes=True)), env={})
    solved = {patch.setting: patch.new for patch in incident.plan if not is_out_of_question(patch)}
    solved |= {f"alternative:{other.setting}": other.new for other in incident.alternatives}
    groups = {
        patch.setting: {
            p.setting: p.new for p in incident.plan if p.group == patch.group and p.new is not None
        }
        for patch in incident.plan
        if patch.group is not None
    }
    commands = {}
    for key, value in solved.items():
        if value is None:
            continue
        new = {**groups.get(key, {}), key.removeprefix("alternative:"): value}
        if all(_has(engine, name, launch) for name in new):
            meant = replace(
                first, engine_changes=changes_with(first.engine_changes, incident, started, new)
            )
            commands[key] = engine.shown(meant, {**changed, **new})
    return commands


def _has(engine: Launcher, name: str, launch: Launch) -> bool:
    """Return whether the engine has a setting, in the version of this launch."""
    own = surface(name, engine.NAME, launch.engine_version)
    return engine.carries(name) and bool(own.flags or own.kwarg or SETTINGS[name].env)


def tell_failure(
    diagnosis: Diagnosis,
    incident: Incident,
    launches: tuple[Launch, Launch],
    engine: tuple[WithVariables, Insight],
    ledger: Ledger,
    folder: Path,
    on_failure: Callable[[Diagnosis, dict[str, str]], None],
    *,
    was_refused: bool,
) -> tuple[bool, Mapping[str, str]]:
    """Tell what the attempt that ended last failed of; return whether its changes took effect, and
    the commands to paste by setting.

    Args:
        diagnosis: of the attempt.
        incident: what it failed of.
        launches: the command as it was first, and as the attempt ran it.
        engine: what the command starts, and what is known of it.
        ledger: the attempts.
        folder: of this run, where the engine tells which change it took.
        on_failure: shows the diagnosis with its commands.
        was_refused: whether a request was refused for our own change.
    """
    log = get_logger()
    (first, launch) = launches
    (launcher, insight) = engine
    log.warning(
        "planned again" if was_refused else "out of memory" if incident.is_oom else "failed",
        kind=incident.kind,
        what=incident.headline,
        cause=incident.causes[0].id,
    )
    heeded = not ledger.settings or launcher.took_effect(launch, folder)
    if not heeded:
        log.warning(
            "the change did not reach the engine: no engine in the command's Python took it"
        )
    elif not was_refused:
        heeded = not tell_unheeded(ledger.attempts[-1], incident, launcher, launch)
    if heeded:
        reached = ledger.settings
    else:
        reached = {}
    commands = commands_to_paste(first, launcher, reached, incident, insight.started(launch))
    on_failure(diagnosis, commands)
    tell_places(first.argv, incident)
    return heeded, commands


# What reads and explains a failure is loaded when there is one: the command starts at once.


@dataclass(slots=True)
class Supervision:
    """What the attempts of one ``oomguard run`` share; ``run`` makes them.

    Attributes:
        launch: the command of the attempt under way.
        policy: what may be changed, how often and for how long.
        load_rules: returns what explains a failure; called when there is one.
        keeper: records each attempt.
        dry_run: say what would change, and run nothing again.
        on_failure: gets each diagnosis, and the commands to paste by setting.
        idempotent: run the command again also where it had written files or served requests.
        companions: what is told of each attempt.
        placing: which devices each attempt gets.
        begins_with: what is changed in the first attempt already, as an earlier run found it to
            work.
        restarts: run the command again as it was where it failed of something else than memory.
        ended_by_us: returns why we ended the last attempt; None where it ended by itself.
        own_files: what oomguard itself writes; the journal is added.
        together: the other ranks of its job, where it is one of several.
    """

    launch: Launch
    policy: Policy
    load_rules: Callable[[], RuleSet]
    keeper: JournalHook = field(default_factory=lambda: JournalHook(None))
    dry_run: bool = False
    on_failure: Callable[[Diagnosis, dict[str, str]], None] = lambda _diagnosis, _commands: None
    idempotent: bool = False
    companions: Companions = field(default_factory=Companions)
    begins_with: tuple[Patch, ...] = ()
    restarts: bool = False
    ended_by_us: Callable[[], EndedByUs | None] = lambda: None
    placing: DeviceAssignment = field(default_factory=AsGiven)
    own_files: OwnFiles = field(default_factory=OwnFiles)
    together: Together = field(default_factory=Alone)
    _first: Launch = field(init=False)
    _engine: WithVariables = field(init=False)
    _insight: Insight = field(init=False)
    _ledger: Ledger = field(init=False)
    _explainer: Explainer = field(init=False)
    _between: Between = field(init=False)
    _link: Link = field(init=False)
    _witness: SideEffectMonitor = field(init=False)
    _refused: str = field(init=False, default="")
    _is_cut: bool = field(init=False, default=False)
    _is_ended_by_us: bool = field(init=False, default=False)
    _variables: Mapping[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        engine = launcher_of(self.launch)
        self._first = self.launch
        self._insight = insight_of(engine)
        self._engine = WithVariables(engine, self.launch.argv)
        policy = with_needed(self.policy, self._insight.asked_length(self.launch))
        self._ledger = Ledger(policy)
        self._explainer = Explainer(self._engine, self._insight, self._ledger, self.load_rules)
        self.own_files.add(lambda: of_journal(self.keeper.path))
        self.own_files.add(lambda: of_inner_runs(self._first.argv))
        self._witness = SideEffectMonitor(self.own_files, idempotent=self.idempotent)

    def run(self, link: Link) -> Outcome:
        """Run the command, and again after each choice of patches.

        Raises:
            LaunchError: the command cannot be started at all.
            PlacementError: it was to be placed, and no device is there for it.
            DeadlineError: the time was over before the first attempt.
        """
        ledger = self._ledger
        signals = link.signals
        self._link = link
        self._between = Between(
            ledger, self._engine, lambda: signals.stopped_by is not None, self._shown
        )
        ledger.pending = self.begins_with
        folder = link.session
        if link.is_running:
            self.launch = self._insight.begun(self._first, link.environment())
        elif cannot_make(folder) is None:
            self.launch = self._insight.watched(self._first, folder)
        for number in ledger.rounds():
            if number > 1 or ledger.patches:
                self._apply(folder)
            if not self._place(number):
                break
            self._attempt(number, signals, folder)
        self.keeper.finish()
        if ledger.exhausted:
            tell_exhausted(
                len(ledger.attempts), self.policy, is_time_over=ledger.time_left_s() <= 0
            )
        return outcome_of(
            ledger, signals, self._carries, is_cut=self._is_cut, is_ended_by_us=self._is_ended_by_us
        )

    def _place(self, number: int) -> bool:
        """Give the attempt that begins its devices; return whether to make it: a first one that has
        none, or no time, is an error.
        """
        try:
            left_s = self._ledger.time_left_s()
            if number > 1 or left_s > 0:
                self.launch = self.placing.placed(self.launch, self._between.stopped, left_s)
            if not self._between.stopped():
                self._ledger.require_time()  # looking and waiting took some
        except (DeadlineError, PlacementError, UsageError) as error:
            if number == 1:
                raise
            get_logger().warning(f"not run again: {error}", command=self._shown())
            return False
        return (
            number == 1 or not self._between.stopped()
        )  # it may have waited, and been stopped there

    def _attempt(self, number: int, signals: ReceivedSignals, folder: Path) -> None:
        log = get_logger()
        ledger = self._ledger
        tell = log.debug if number == 1 else log.info  # while all is well we show nothing
        if number > 1 or log.isEnabledFor(DEBUG):
            tell("attempt started", number=number, command=self._shown())

        def begin(pid: int, began_at: float) -> None:
            self.keeper.begin(
                number, self.launch.argv, dict(ledger.settings), ledger.patches, began_at
            )
            self.companions.began(number, self.launch, pid)

        self._between.begins(
            self.launch, self._link.facts["began"]["at"] if self._link.is_running else None
        )
        self.companions.begins(number, ledger.patches)
        witness = self._witness
        cgroup = _control_group(self._link)
        witness.begins(self.launch)
        with self.placing.watching(LiveOutput(self._link)):
            ended = self._link.run(self.launch.argv, self.launch.env, begin)
        witness.ended(ended.files, ended.since_ns)
        self._is_cut |= ended.is_cut
        if signals.stopped_by is None:
            ours = self.ended_by_us()
        else:
            ours = None
        self._is_ended_by_us = ours is not None
        heard = self._explainer.hear(ended, witness, self._first)
        stopped = signals.stopped_by is not None
        explained = Explained()
        launches = (self._first, self.launch)
        if heard is not None:
            explained = self._explainer.explain(
                heard, ended.status, cgroup, launches, stopped=stopped, ended=ours
            )
        if explained.refused:
            self._refused = "request refused"
        else:
            self._refused = ""
        self._first = without_changes(self._first, explained.refused)
        found = self.placing.moved(explained.diagnosis)
        agreed = self._agree(number, ended.status, found, heard, folder)
        if agreed is None:
            diagnosis = found
        else:
            diagnosis = agreed.diagnosis
        incident = diagnosis.first_cause
        error = self._refused or (error_of(ended.status, incident) if ours is None else ours.why)
        if heard is not None:
            measured = heard.comparable(ledger.patches)
        else:
            measured = {}
        if self._refused:
            failed = None
        else:
            failed = incident
        status = ended.status
        ranks = record_of(agreed)
        attempt = ledger.end(
            failed,
            error=error,
            exit_status=status,
            seconds=ended.seconds,
            measured=measured,
            ranks=ranks,
        )
        self.keeper.end(attempt, last_start(heard, self._engine, self.launch))
        self.companions.ended(attempt)
        if signals.stopped_by is None and heard is not None:
            learn(heard.scanner, self._engine, self.launch, self.keeper)
        if incident is not None or ours is not None:
            tell = log.info
        tell(
            "attempt ended",
            number=number,
            exit_status=ended.status,
            seconds=round(ended.seconds, 1),
        )
        if incident is not None:
            self._after_failure(diagnosis, incident, signals, folder, agreed)
        if agreed is None and self._goes_on_as_it_was(attempt, signals, of_reader=ended.of_reader):
            leads_on = self._between.restarts(self.launch, attempt, self.placing.devices())
        else:
            leads_on = incident is None or self._between.leads_on(
                self.launch, attempt, folder, self.placing.devices()
            )
        if not self.together.starts_again(
            number + 1, agreed, self._between.stopped, is_able=leads_on
        ):
            ledger.stop()

    def _agree(
        self, number: int, status: int, found: Diagnosis, heard: Heard | None, folder: Path
    ) -> Agreed | None:
        """Return what all ranks do after an attempt; None where this process is the only one."""
        if isinstance(self.together, Alone):
            return None
        incident = found.first_cause
        patches = (
            ()
            if incident is None or self._refused
            else self._ledger.wanted(incident, self._carries)
        )
        refusal = refusal_of(
            number, self._ledger, self._link.signals.lost_input, folder, dry_run=self.dry_run
        )
        if patches and self._ledger.settings and not self._engine.took_effect(self.launch, folder):
            refusal = "the change did not reach the engine"
        told = ("", None) if heard is None else (heard.tail, heard.scanner.found.began_s())
        chosen = chosen_in(self._engine, self._first)
        did = OwnDeed(
            self._witness.seen(),
            self.idempotent,
            self.own_files.paths(),
            self._ledger.policy,
            chosen,
        )
        own = OwnEnd(
            number, status, error_of(status, incident), found, patches, refusal, *told, did
        )
        if (
            agreed := self.together.agree(own, self._between.stopped)
        ) and agreed.diagnosis.incidents:
            self._ledger.diagnosis = agreed.diagnosis
        return agreed

    def _goes_on_as_it_was(
        self, attempt: Attempt, signals: ReceivedSignals, *, of_reader: bool
    ) -> bool:
        """Return whether the command is to run again as it was: it failed, not of memory, and
        nothing is to be changed.
        """
        incident = attempt.incident
        ledger = self._ledger
        is_wanted = (
            self.restarts and not self.dry_run and not ledger.pending and signals.stopped_by is None
        )
        of_memory = incident is not None and incident.is_oom
        if not is_wanted or attempt.succeeded or of_memory or of_reader or self._refused:
            return False
        if self._lacks_input():
            return False
        if not self._witness.permits_another(incident, self._shown()):
            return False
        return ledger.repeat()

    def _after_failure(
        self,
        diagnosis: Diagnosis,
        incident: Incident,
        signals: ReceivedSignals,
        folder: Path,
        agreed: Agreed | None,
    ) -> None:
        log = get_logger()
        started = self._insight.started(self.launch)
        self._first = with_failed_engine(self._first, incident)
        if agreed is None or agreed.tells:
            told = (
                diagnosis,
                incident,
                (self._first, self.launch),
                (self._engine, self._insight),
                self._ledger,
                folder,
            )
            heeded, commands = tell_failure(*told, self.on_failure, was_refused=bool(self._refused))
        if agreed is not None:
            self._follow(agreed, incident, started)
            return
        if heeded and not self.dry_run and self._ledger.leaves_another():
            incident = self.placing.once_free(
                incident, self._between.stopped, self._ledger.time_left_s()
            )
        wanted = self._ledger.wanted(incident, self._carries)
        if not heeded:
            self._ledger.stop()
        elif not wanted:
            log.info("nothing more to change by itself")
        elif self.dry_run:
            would_change = ", ".join(f"{p.setting} {arrow(p)}" for p in wanted)
            log.info("dry run: nothing is run again", would_change=would_change)
            self._witness.permits_another(incident, commands[wanted[0].setting], dry_run=True)
        elif self._lacks_input():
            pass
        elif (missing := cannot_make(folder)) is not None:
            log.warning("not run again: it needs a temporary folder", reason=missing)
        elif signals.stopped_by is None:
            chosen = self._ledger.choose(incident, self._carries)
            if chosen:
                paste = commands.get(chosen[0].setting) or self._shown()
            else:
                paste = ""
            if chosen and not self._witness.permits_another(incident, paste):
                self._ledger.refuse(self._witness.refusal)
            self._first = with_change(self._first, incident, started, chosen)

    def _lacks_input(self) -> bool:
        """Return whether the command, run again, would not read what it read; say so."""
        lost = self._link.signals.lost_input
        if lost is not None:
            hint = "give it as a file, with --input"
            get_logger().warning(
                "not run again: it would not have the same standard input", reason=lost, hint=hint
            )
        return lost is not None

    def _follow(self, agreed: Agreed, incident: Incident, started: Sequence[StartedEngine]) -> None:
        """Change what all ranks change; what any of them failed with is not tried again."""
        self._ledger.follow(agreed.patches, agreed.left, is_change_left=agreed.is_change_left)
        self._variables = agreed.variables
        self._first = with_change(self._first, incident, started, agreed.patches)

    def _carries(self, name: str) -> bool:
        return self._engine.carries(name) and (
            name in BY_VARIABLE or self._insight.carries(self._first, name)
        )

    def _shown(self) -> str:
        """Return the attempt, the next one where it is chosen, as a line to read and paste, without
        what only this run needs.
        """
        chosen = {
            patch.setting: patch.new for patch in self._ledger.pending if patch.new is not None
        }
        return to_paste(self._first, self._engine, {**self._ledger.settings, **chosen})

    def _apply(self, folder: Path) -> None:
        """Carry the settings changed so far into the command of the attempt that begins."""
        ledger = self._ledger
        log = get_logger()
        if ledger.settings:
            self.launch = self._engine.apply(self._first, ledger.settings, folder)
        elif cannot_make(folder) is None:
            self.launch = self._insight.watched(self._first, folder)
        self.launch = replace(self.launch, env={**self.launch.env, **self._variables})
        if not ledger.patches:
            log.info("running again as it was", why=ledger.attempts[-1].error)
            return
        if ledger.attempts:  # of the first attempt it is told which run it takes them from
            log.info("running again", **{patch.setting: arrow(patch) for patch in ledger.patches})
        if any(patch.effect >= Effect.REDUCES_CAPACITY for patch in ledger.patches):
            log.warning(
                "this run goes on with reduced settings",
                **{p.setting: p.new for p in ledger.patches},
            )


def _control_group(link: Link) -> Cgroup | None:
    """Return the counts of our control group, those of before the first attempt where it was
    started before they could be read.
    """
    found = read_cgroup()
    kills = link.facts["began"]["kills"]
    if found is None or kills is None or not link.is_running:
        return found
    return replace(found, oom_kills=kills)
