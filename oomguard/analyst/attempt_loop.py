"""Run the attempts of ``oomguard run``: run, diagnose, plan, patch, and repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import DEBUG
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard.analyst.attempt_diagnosis import AttemptDiagnoser, AttemptDiagnosis, reason_of
from oomguard.analyst.attempt_hooks import (
    NO_RELAUNCH,
    NO_TIME,
    AttemptHooks,
    AttemptReport,
    Coordinator,
    DeviceAssignment,
    NoCoordinator,
    NoPlacement,
    SideEffectReport,
    Verdict,
    record_of,
)
from oomguard.analyst.attempt_settings import (
    BY_VARIABLE,
    EnvLauncher,
    report_ineffective_change,
)
from oomguard.analyst.journal_hook import JournalHook, last_start, record_calibration
from oomguard.analyst.link import Link, LiveOutput, ReceivedSignals
from oomguard.analyst.nested_run import log_exhausted
from oomguard.analyst.outcome import (
    Outcome,
    TerminationReason,
    error_of,
    outcome_of,
    step_figures,
)
from oomguard.analyst.restart_gate import RestartGate, cannot_make
from oomguard.analyst.side_effects import OwnFiles, SideEffectMonitor, of_inner_runs, of_journal
from oomguard.core.errors import DeadlineError, PlacementError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Diagnosis, Effect, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.settings import SETTINGS, surface
from oomguard.engines.command import (
    Launch,
    StartedEngine,
    changes_with,
    with_change,
    with_failed_engine,
    without_changes,
)
from oomguard.engines.protocol import Insight, Launcher
from oomguard.engines.registry import insight_of, launcher_of
from oomguard.probe.host import Cgroup, read_cgroup
from oomguard.remedy.policy import Policy, is_out_of_question, with_needed
from oomguard.retry import Ledger

if TYPE_CHECKING:
    from oomguard.analyst.output import ParsedOutput
    from oomguard.rules.rule_files import RuleSet


def to_paste(launch: Launch, engine: Launcher, settings: Mapping[str, FactValue]) -> str:
    """Return a launch with these settings as a line to paste, without parts of this run only."""
    from oomguard.core.redact import mask_command

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
    """Return the full command with each solved patch or alternative, with secrets masked.

    Args:
        launch: the user's command.
        engine: the launcher.
        changed: all changes so far.
        incident: the failure with its plan; pinned settings give no command.
        started: the engines that the command started, as far as they are known.
    """
    from oomguard.core.redact import mask_command

    first = replace(launch, argv=tuple(mask_command(launch.argv, keep_homes=True)), env={})
    solved = {}
    for patch in incident.plan:
        if not is_out_of_question(patch):
            solved[patch.setting] = patch.new
    solved |= {f"alternative:{other.setting}": other.new for other in incident.alternatives}
    members: dict[int, dict[str, FactValue]] = {}
    for patch in incident.plan:
        if patch.group is not None and patch.new is not None:
            members.setdefault(patch.group, {})[patch.setting] = patch.new
    groups = {}
    for patch in incident.plan:
        if patch.group is not None:
            groups[patch.setting] = members.get(patch.group, {})
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


def report_failure(
    diagnosis: Diagnosis,
    incident: Incident,
    launches: tuple[Launch, Launch],
    engine: tuple[EnvLauncher, Insight],
    ledger: Ledger,
    folder: Path,
    on_failure: Callable[[Diagnosis, dict[str, str]], None],
    *,
    was_refused: bool,
    wanted: Sequence[Patch] = (),
) -> tuple[bool, Mapping[str, str]]:
    """Report the last attempt's failure.

    Args:
        diagnosis: the diagnosis of the attempt.
        incident: its failure.
        launches: the user's command, and the command of the attempt.
        engine: the launcher, and the knowledge about its engine.
        ledger: the attempts.
        folder: the folder of this run, where the engine reports applied changes.
        on_failure: shows the diagnosis with its commands.
        was_refused: whether a request was refused because of our own change.
        wanted: the changes of the next attempt, which the panel names first.

    Returns:
        Whether the attempt's changes took effect, and the commands to paste by setting.
    """
    log = get_logger()
    (first, launch) = launches
    (launcher, insight) = engine
    if was_refused:
        event = "Planned again"
    elif incident.is_oom:
        event = "Out of memory"
    else:
        event = "The command failed"
    log.warning(event, kind=incident.kind, what=incident.headline, cause=incident.causes[0].id)
    took_effect = not ledger.settings or launcher.took_effect(launch, folder)
    if not took_effect:
        log.warning(
            "The change did not reach the engine: no engine in the command's Python applied it"
        )
    elif not was_refused:
        took_effect = not report_ineffective_change(ledger.attempts[-1], incident, launcher, launch)
    if took_effect:
        reached = ledger.settings
    else:
        reached = {}
    commands = commands_to_paste(first, launcher, reached, incident, insight.started(launch))
    on_failure(_with_next_first(diagnosis, incident, wanted), commands)
    return took_effect, commands


def _without_value(incident: Incident) -> dict[str, str]:
    """Return the first permitted change without a value, and what its value depends on."""
    for patch in incident.plan:
        if patch.new is None and patch.blocked_by is None and patch.reason:
            return {"no_value_for": patch.setting, "because": patch.reason}
    return {}


def _with_next_first(
    diagnosis: Diagnosis, incident: Incident, wanted: Sequence[Patch]
) -> Diagnosis:
    """Return the diagnosis as the panel shows it: what oomguard does now comes first.

    An expert may prefer another action, but the user did not permit it.
    """
    names = {patch.setting for patch in wanted}
    # sorted() is stable, so that both parts keep their order
    actions = sorted(incident.actions, key=lambda action: action.id not in names)
    shown = replace(incident, actions=tuple(actions))
    return replace(
        diagnosis,
        incidents=tuple(shown if one is incident else one for one in diagnosis.incidents),
    )


def refusal_of(
    number: int, ledger: Ledger, lost_input: str | None, folder: Path, *, dry_run: bool
) -> str | None:
    """Return why this rank's command cannot run again after an attempt; None if it can.

    Side effects are judged later, because only all ranks together know who wrote a file.

    Args:
        number: the attempt that has ended.
        ledger: the earlier attempts, with the policy.
        lost_input: why it would miss its standard input; None if it would not.
        folder: the temporary folder, which a change may need.
        dry_run: whether this is a dry run.
    """
    if dry_run:
        return "this is a dry run"
    if number >= ledger.policy.max_attempts:
        return NO_RELAUNCH
    if ledger.time_left_s() <= 0:
        return NO_TIME
    if lost_input is not None:
        return f"the command would not get the same standard input: {lost_input}"
    if (missing := cannot_make(folder)) is not None:
        return f"oomguard could not create its temporary folder: {missing}"
    return None


def chosen_in(engine: Launcher, first: Launch) -> tuple[str, ...]:
    """Return the settings in the user's command, before any change of ours."""
    chosen = []
    for name, found in engine.settings_in_force(first).items():
        if found.set_by_user:
            chosen.append(name)
    return tuple(chosen)


@dataclass(slots=True)
class AttemptLoop:
    """Run the attempts of one ``oomguard run``.

    Attributes:
        launch: the command of the current attempt.
        policy: what may be changed, how often and for how long.
        load_rules: loads the rules, when the first failure needs them.
        keeper: records each attempt.
        dry_run: whether to report the changes without a rerun.
        on_failure: receives each diagnosis, and the commands to paste by setting.
        idempotent: whether to rerun even after written files or served requests.
        companions: the hooks of each attempt.
        placing: chooses the devices of each attempt.
        begins_with: changes of the first attempt that worked in an earlier run.
        restarts: whether to rerun the command unchanged after other failures.
        ended_by_us: returns why oomguard stopped the last attempt; None if it ended on its own.
        own_files: files that oomguard itself writes; the journal is added.
        together: coordinates the ranks, if the command is one of several.
    """

    launch: Launch
    policy: Policy
    load_rules: Callable[[], RuleSet]
    keeper: JournalHook = field(default_factory=lambda: JournalHook(None))
    dry_run: bool = False
    on_failure: Callable[[Diagnosis, dict[str, str]], None] = lambda _diagnosis, _commands: None
    idempotent: bool = False
    companions: AttemptHooks = field(default_factory=AttemptHooks)
    begins_with: tuple[Patch, ...] = ()
    restarts: bool = False
    ended_by_us: Callable[[], TerminationReason | None] = lambda: None
    placing: DeviceAssignment = field(default_factory=NoPlacement)
    own_files: OwnFiles = field(default_factory=OwnFiles)
    together: Coordinator = field(default_factory=NoCoordinator)
    _first: Launch = field(init=False)
    _engine: EnvLauncher = field(init=False)
    _insight: Insight = field(init=False)
    _ledger: Ledger = field(init=False)
    _diagnoser: AttemptDiagnoser = field(init=False)
    _gate: RestartGate = field(init=False)
    _link: Link = field(init=False)
    _side_effects: SideEffectMonitor = field(init=False)
    _refused: str = field(init=False, default="")
    _is_cut: bool = field(init=False, default=False)
    _is_ended_by_us: bool = field(init=False, default=False)
    _variables: Mapping[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        engine = launcher_of(self.launch)
        self._first = self.launch
        self._insight = insight_of(engine)
        self._engine = EnvLauncher(engine, self.launch.argv)
        policy = with_needed(self.policy, self._insight.asked_length(self.launch))
        self._ledger = Ledger(policy)
        self._diagnoser = AttemptDiagnoser(
            self._engine, self._insight, self._ledger, self.load_rules
        )
        self.own_files.add(lambda: of_journal(self.keeper.path))
        self.own_files.add(lambda: of_inner_runs(self._first.argv))
        self._side_effects = SideEffectMonitor(self.own_files, idempotent=self.idempotent)

    def run(self, link: Link) -> Outcome:
        """Run the command, and rerun it after each choice of patches.

        Raises:
            LaunchError: if the command cannot be started.
            PlacementError: if it needs a device and none is free.
            DeadlineError: if the deadline passed before the first attempt.
        """
        ledger = self._ledger
        signals = link.signals
        self._link = link
        self._gate = RestartGate(
            ledger, self._engine, lambda: signals.stopped_by is not None, self._shown
        )
        ledger.pending = self.begins_with
        folder = link.session
        # The supervisor starts a plain command before the analyst exists, so the launch is adopted
        # then.
        if link.is_running:
            self.launch = self._insight.begun(self._first, link.environment())
        elif cannot_make(folder) is None:
            self.launch = self._insight.watched(self._first, folder)
        # The ledger begins an attempt with each step of this loop; choosing no change ends it.
        for number in ledger.rounds():
            if number > 1 or ledger.patches:
                self._apply(folder)
            if not self._place(number):
                break
            self._attempt(number, signals, folder)
        self.keeper.finish()
        if ledger.exhausted:
            log_exhausted(len(ledger.attempts), self.policy, is_time_over=ledger.time_left_s() <= 0)
        return outcome_of(
            ledger, signals, self._carries, is_cut=self._is_cut, is_ended_by_us=self._is_ended_by_us
        )

    def survived_steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the steps so far that ran out of memory and did not end this attempt's engine."""
        return self._insight.survived_steps(self.launch)

    def _place(self, number: int) -> bool:
        """Place the next attempt on its devices; return whether to run it.

        For the first attempt, a missing device or a passed deadline is an error.
        """
        try:
            left_s = self._ledger.time_left_s()
            if number > 1 or left_s > 0:
                self.launch = self.placing.placed(self.launch, self._gate.stopped, left_s)
            if not self._gate.stopped():
                # Choosing the changes and waiting for devices took time.
                self._ledger.require_time()
        except (DeadlineError, PlacementError, UsageError) as error:
            if number == 1:
                raise
            get_logger().warning(f"Not retried: {error}", command=self._shown())
            return False
        # Placement may have waited, and the user may have stopped it.
        return number == 1 or not self._gate.stopped()

    def _attempt(self, number: int, signals: ReceivedSignals, folder: Path) -> None:
        log = get_logger()
        ledger = self._ledger
        # A healthy run shows nothing.
        write = log.debug if number == 1 else log.info
        if number > 1 or log.isEnabledFor(DEBUG):
            write("Attempt started", number=number, command=self._shown())

        def begin(pid: int, began_at: float) -> None:
            self.keeper.begin(
                number, self.launch.argv, dict(ledger.settings), ledger.patches, began_at
            )
            self.companions.began(number, self.launch, pid)

        self._gate.begins(
            self.launch, self._link.facts["began"]["at"] if self._link.is_running else None
        )
        # Hooks come before the start, because the command inherits what they put into the
        # environment.
        self.companions.begins(number, ledger.patches)
        # Read before the start, so that the kernel's kills during the attempt can be counted.
        cgroup = _control_group(self._link)
        self._side_effects.begins(self.launch)
        with self.placing.watching(LiveOutput(self._link)):
            ended = self._link.run(self.launch.argv, self.launch.env, begin)
        # After a stop the supervisor waits about a second, which is too short for a diagnosis on a
        # busy host. Without this message, the other ranks would think that this one was killed.
        if signals.stopped_by is not None:
            self.together.stopped(number, ended.status)
        self._side_effects.ended(ended.files, ended.since_ns)
        self._is_cut |= ended.is_cut
        if signals.stopped_by is None:
            ours = reason_of(ended.host) or self.ended_by_us()
        else:
            ours = None
        # After a stop for the host's memory, the command's own status counts.
        self._is_ended_by_us = ours is not None and ours.host is None
        output = self._diagnoser.read_output(ended, self._side_effects, self._first)
        stopped = signals.stopped_by is not None
        explained = AttemptDiagnosis()
        launches = (self._first, self.launch)
        if output is not None:
            explained = self._diagnoser.explain(
                output, ended.status, cgroup, launches, stopped=stopped, ended=ours
            )
        if explained.refused:
            self._refused = "request refused"
        else:
            self._refused = ""
        # A change that the engine refused must not come back with the next change.
        self._first = without_changes(self._first, explained.refused)
        found = self.placing.moved(explained.diagnosis)
        agreed = self._agree(number, ended.status, found, output, folder)
        if agreed is None:
            diagnosis = found
        else:
            diagnosis = agreed.diagnosis
        incident = diagnosis.first_cause
        error = self._refused or (error_of(ended.status, incident) if ours is None else ours.why)
        if output is not None:
            measured = output.comparable(ledger.patches)
        else:
            measured = {}
        # An engine may run out of memory in a step and go on; the journal counts such steps too.
        survived = self.survived_steps()
        if survived:
            figures = step_figures(survived)
            measured = {**measured, **figures}
            log.info("The engine survived steps that ran out of memory", **figures)
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
        self.keeper.end(attempt, last_start(output, self._engine, self.launch), survived)
        self.companions.ended(attempt)
        # An attempt that was cut short has measured nothing that a later estimate could use.
        if signals.stopped_by is None and output is not None:
            record_calibration(output.scanner, self._engine, self.launch, self.keeper)
        if incident is not None or ours is not None:
            write = log.info
        write(
            "Attempt ended",
            number=number,
            exit_status=ended.status,
            seconds=round(ended.seconds, 1),
        )
        if incident is not None:
            self._after_failure(diagnosis, incident, signals, folder, agreed)
        if agreed is None and self._is_rerun_unchanged(attempt, signals, of_reader=ended.of_reader):
            leads_on = self._gate.permits_restart(self.launch, attempt, self.placing.devices())
        else:
            leads_on = incident is None or self._gate.permits_next(
                self.launch, attempt, folder, self.placing.devices()
            )
        if not self.together.starts_again(number + 1, agreed, self._gate.stopped, is_able=leads_on):
            ledger.stop()

    def _agree(
        self, number: int, status: int, found: Diagnosis, output: ParsedOutput | None, folder: Path
    ) -> Verdict | None:
        """Return the decision of all ranks after an attempt; None for a single process."""
        if isinstance(self.together, NoCoordinator):
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
        # A change that had no effect proves nothing, so another one on top of it would be a guess.
        if patches and self._ledger.settings and not self._engine.took_effect(self.launch, folder):
            refusal = "the change did not reach the engine"
        printed = ("", None) if output is None else (output.tail, output.scanner.found.began_s())
        chosen = chosen_in(self._engine, self._first)
        did = SideEffectReport(
            self._side_effects.seen(),
            self.idempotent,
            self.own_files.paths(),
            self._ledger.policy,
            chosen,
        )
        own = AttemptReport(
            number, status, error_of(status, incident), found, patches, refusal, *printed, did
        )
        if (agreed := self.together.agree(own, self._gate.stopped)) and agreed.diagnosis.incidents:
            self._ledger.diagnosis = agreed.diagnosis
        return agreed

    def _is_rerun_unchanged(
        self, attempt: Attempt, signals: ReceivedSignals, *, of_reader: bool
    ) -> bool:
        """Return whether to rerun the command unchanged: it failed, but not because of memory."""
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
        if not self._side_effects.permits_another(incident, self._shown()):
            return False
        return ledger.repeat()

    def _after_failure(
        self,
        diagnosis: Diagnosis,
        incident: Incident,
        signals: ReceivedSignals,
        folder: Path,
        agreed: Verdict | None,
    ) -> None:
        log = get_logger()
        started = self._insight.started(self.launch)
        self._first = with_failed_engine(self._first, incident)
        if agreed is None or agreed.is_reporter:
            context = (
                diagnosis,
                incident,
                (self._first, self.launch),
                (self._engine, self._insight),
                self._ledger,
                folder,
            )
            wanted: tuple[Patch, ...] = ()
            if agreed is None and self._ledger.leaves_another():
                wanted = self._ledger.wanted(incident, self._carries)
            took_effect, commands = report_failure(
                *context, self.on_failure, was_refused=bool(self._refused), wanted=wanted
            )
        if agreed is not None:
            self._follow(agreed, incident, started)
            return
        if took_effect and not self.dry_run and self._ledger.leaves_another():
            incident = self.placing.once_free(
                incident, self._gate.stopped, self._ledger.time_left_s()
            )
        wanted = self._ledger.wanted(incident, self._carries)
        if not took_effect:
            self._ledger.stop()
        elif not wanted:
            log.info(
                "Not retried: oomguard has no permitted change left", **_without_value(incident)
            )
        elif self.dry_run:
            would_change = ", ".join(f"{p.setting} {p.change}" for p in wanted)
            log.info("Dry run: the command does not run again", would_change=would_change)
            self._side_effects.permits_another(incident, commands[wanted[0].setting], dry_run=True)
        elif self._lacks_input():
            pass
        elif (missing := cannot_make(folder)) is not None:
            log.warning(
                "Not retried: oomguard could not create its temporary folder", reason=missing
            )
        elif signals.stopped_by is None:
            chosen = self._ledger.choose(incident, self._carries)
            if chosen:
                paste = commands.get(chosen[0].setting) or self._shown()
            else:
                paste = ""
            if chosen and not self._side_effects.permits_another(incident, paste):
                self._ledger.refuse(self._side_effects.refusal)
            self._first = with_change(self._first, incident, started, chosen)

    def _lacks_input(self) -> bool:
        """Return whether a rerun would miss its standard input, and log it."""
        lost = self._link.signals.lost_input
        if lost is not None:
            hint = "give the input as a file with --input"
            get_logger().warning(
                "Not retried: the command would not get the same standard input",
                reason=lost,
                hint=hint,
            )
        return lost is not None

    def _follow(
        self, agreed: Verdict, incident: Incident, started: Sequence[StartedEngine]
    ) -> None:
        """Apply the changes that all ranks agreed on; no failed value is tried again."""
        self._ledger.follow(agreed.patches, agreed.left, is_change_left=agreed.is_change_left)
        self._variables = agreed.variables
        self._first = with_change(self._first, incident, started, agreed.patches)

    def _carries(self, name: str) -> bool:
        return self._engine.carries(name) and (
            name in BY_VARIABLE or self._insight.carries(self._first, name)
        )

    def _shown(self) -> str:
        """Return the next attempt as a line to paste, without parts of this run only."""
        chosen = {}
        for patch in self._ledger.pending:
            if patch.new is not None:
                chosen[patch.setting] = patch.new
        return to_paste(self._first, self._engine, {**self._ledger.settings, **chosen})

    def _apply(self, folder: Path) -> None:
        """Apply all changes so far to the command of the next attempt."""
        ledger = self._ledger
        log = get_logger()
        if ledger.settings:
            self.launch = self._engine.apply(self._first, ledger.settings, folder)
        elif cannot_make(folder) is None:
            self.launch = self._insight.watched(self._first, folder)
        self.launch = replace(self.launch, env={**self.launch.env, **self._variables})
        if not ledger.patches:
            log.info("Running the command again unchanged", why=ledger.attempts[-1].error)
            return
        # for the first attempt, another event names the run that the changes come from
        if ledger.attempts:
            log.info(
                "Running the command again",
                **{patch.setting: patch.change for patch in ledger.patches},
                permitted_by=", ".join(dict.fromkeys(p.permitted_by or "" for p in ledger.patches)),
                to_forbid=" ".join(f"--pin {patch.setting}" for patch in ledger.patches),
            )
        if any(patch.effect >= Effect.REDUCES_CAPACITY for patch in ledger.patches):
            log.warning(
                "This run continues with reduced settings",
                **{p.setting: p.new for p in ledger.patches},
            )


def _control_group(link: Link) -> Cgroup | None:
    """Return the counts of our control group at the start of the first attempt.

    If the command started before this process, the supervisor has counted.
    """
    found = read_cgroup()
    kills = link.facts["began"]["kills"]
    if found is None or kills is None or not link.is_running:
        return found
    return replace(found, oom_kills=kills)
