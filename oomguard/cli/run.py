"""Run ``oomguard run -- CMD`` in the analyst: read its options and follow the attempts."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO, cast

import click

from oomguard.analyst.attempt_hooks import AttemptHooks
from oomguard.analyst.side_effects import OwnFiles, of_journal
from oomguard.cli.options import (
    CHANGES,
    LIMITS,
    RECORDS,
    RERUN,
    CommandAfterDashes,
    Count,
    Duration,
    F,
    HostReserve,
    console,
    journal_option,
    option,
    output_options,
    policy_options,
    read_policy,
    read_rules,
    report_configuration,
    warn_of_old_name,
)
from oomguard.core.errors import InputError, UsageError
from oomguard.core.incident import Diagnosis
from oomguard.core.installation import extension
from oomguard.journal.location import JournalUrl, Location, default_path
from oomguard.remedy.policy import DEFAULT_MAX_ATTEMPTS, DEFAULT_MAX_PER_HOUR
from oomguard.supervisor.options import DEFAULT_GRACE_S

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import AttemptHook, Coordinator, DeviceAssignment
    from oomguard.analyst.attempt_loop import AttemptLoop
    from oomguard.analyst.hung_start import HungStart
    from oomguard.analyst.link import Link, ReceivedSignals
    from oomguard.analyst.outcome import Outcome, TerminationReason
    from oomguard.core.incident import Patch
    from oomguard.engines.command import Launch
    from oomguard.journal.delivery import SharedJournal
    from oomguard.journal.store import Journal
    from oomguard.remedy.policy import Policy


# Define what ``run`` needs from the optional packages, and what it does without them.


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The command of a run, and what is known before it starts.

    Attributes:
        launch: the command.
        signals: the signals that the run received.
        grace_s: the time that the command gets to end, in seconds.
        pinned: the settings that must not change.
        outer_pid: the process of a run around this one, or None.
    """

    launch: Launch
    signals: ReceivedSignals
    grace_s: float
    pinned: tuple[str, ...]
    outer_pid: int | None


class ClusterChoices(Protocol):
    """The options of the cluster package that a run was given."""

    @property
    def has_status_by_cause(self) -> bool:
        """Whether the exit status names the cause of a failure."""

    def check(self, *, is_inside: bool) -> ClusterChoices:
        """Return the options that apply to this run; raises UsageError."""

    def max_attempts(self, given: int) -> int:
        """Return the largest number of attempts."""

    def begin(self, setup: RunSetup) -> ClusterSupport:
        """Prepare a run with these options; raises UsageError."""


class ClusterSupport(Protocol):
    """The part of a run that the cluster package handles: devices, ranks, servers, schedulers."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def is_reporter(self) -> bool:
        """Whether this process reports the run; of several ranks one does."""

    @property
    def restarts(self) -> bool:
        """Whether the command also restarts after a failure that is not an out-of-memory."""

    @property
    def own_files(self) -> tuple[str | None, ...]:
        """The files that this run writes itself."""

    @property
    def companions(self) -> tuple[AttemptHook, ...]:
        """The listeners of each attempt."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that decides after each attempt."""

    def assign_devices(self) -> DeviceAssignment:
        """Return the assignment of devices to the attempts; raises UsageError."""

    def ended_by_us(self) -> TerminationReason | None:
        """Return why oomguard ended the last attempt, or None if it ended on its own."""

    def may_reuse(self) -> bool:
        """Return whether the first attempt may begin with changes from the journal."""

    def begins_with(self, policy: Policy) -> tuple[Patch, ...]:
        """Return the changes that the last start of the same job left for this one."""

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Return a context that reports an error which ends the run before its command starts."""

    def classify(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the exit status that the user chose."""

    def report_end(self, outcome: Outcome) -> None:
        """Report the end of this process's command."""

    def report_to_scheduler(self, outcome: Outcome) -> None:
        """Report the end of the whole run to the scheduler."""

    def requeue(self, outcome: Outcome) -> None:
        """Requeue the job if its next start may fit; call it last."""


class NoCluster:
    """A run without the cluster package: one process on the devices that the user chose."""

    has_status_by_cause = False
    is_reporter = True
    restarts = False
    own_files: tuple[str | None, ...] = ()
    companions: tuple[AttemptHook, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def check(self, *, is_inside: bool) -> NoCluster:
        """Return this object."""
        del is_inside
        return self

    def max_attempts(self, given: int) -> int:
        """Return the number that the user gave."""
        return given

    def begin(self, _setup: RunSetup) -> NoCluster:
        """Return this object."""
        return self

    @property
    def coordinator(self) -> Coordinator:
        """A coordinator without other ranks."""
        from oomguard.analyst.attempt_hooks import NoCoordinator

        return NoCoordinator()

    def assign_devices(self) -> DeviceAssignment:
        """Return an assignment that leaves the devices as they are."""
        from oomguard.analyst.attempt_hooks import NoPlacement

        return NoPlacement()

    def ended_by_us(self) -> None:
        """Return None."""
        return

    def may_reuse(self) -> bool:
        """Return True."""
        return True

    def begins_with(self, _policy: Policy) -> tuple[Patch, ...]:
        """Return no change."""
        return ()

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def classify(self, outcome: Outcome) -> Outcome:
        """Return the outcome unchanged."""
        return outcome

    def report_end(self, outcome: Outcome) -> None:
        """Do nothing."""

    def report_to_scheduler(self, outcome: Outcome) -> None:
        """Do nothing."""

    def requeue(self, outcome: Outcome) -> None:
        """Do nothing."""


def cluster_options(function: F) -> F:
    """Add the options of the cluster package, if it is installed."""
    module = extension("run_cluster")
    if module is None:
        return function
    decorated: F = module.cluster_options(function)
    return decorated


def metrics_option(function: F) -> F:
    """Add --metrics, if the telemetry package is installed."""
    module = extension("run_metrics")
    if module is None:
        return function
    decorated: F = module.metrics_option(function)
    return decorated


def run_attempts(
    supervision: AttemptLoop, link: Link, ctx: click.Context, metrics: str | None, *, is_inner: bool
) -> Outcome:
    """Run the command, with metrics and spans if the telemetry package is installed.

    Args:
        supervision: the run.
        link: the connection to the supervisor.
        ctx: the command line, which shows whether a flag or a variable asks for metrics.
        metrics: the target of the metrics, or None.
        is_inner: whether another run is around this one.

    Raises:
        UsageError: ``metrics`` is invalid, or prometheus-client is not installed.
        LaunchError: the command cannot be started.
    """
    module = extension("run_metrics")
    if module is None:
        return supervision.run(link)
    outcome: Outcome = module.run_with_metrics(supervision, link, ctx, metrics, is_inner=is_inner)
    return outcome


# Fields that the user pastes into a terminal. A shell does not expand ``~`` in quotes.
_TO_PASTE: Final = frozenset({"command", "path", "remove"})


class Errors:
    """Write to standard error without failing, so that the run continues without a reader."""

    encoding = getattr(sys.stderr, "encoding", "utf-8")

    def write(self, text: str) -> int:
        """Write as much as possible; return the length of the text."""
        # Standard error may be closed or have no reader. The command must not fail for that.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as much as possible."""
        # The same for what is still in the buffer.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        """Return whether standard error is a terminal."""
        return sys.stderr is not None and sys.stderr.isatty()

    def fileno(self) -> int:
        """Return the descriptor, from which rich reads the terminal's width."""
        return 2


def configure_log(form: str, *, quiet: bool, verbose: bool) -> None:
    """Send events to standard error, one line each (command line only)."""
    import logging

    from oomguard.core.log import write_events

    if quiet:
        least = logging.ERROR
    elif verbose:
        least = logging.DEBUG
    else:
        least = logging.INFO
    line = _json_line if form == "json" else _console_line
    errors = Errors()

    def write(level: int, event: str, fields: dict[str, Any]) -> None:
        from oomguard.core.presentable import drawn
        from oomguard.core.redact import homes_kept

        shown = {}
        for key, value in fields.items():
            with homes_kept() if key in _TO_PASTE else contextlib.nullcontext():
                if isinstance(value, str):
                    shown[key] = drawn(value)
                else:
                    shown[key] = value
        errors.write(f"{line(logging.getLevelName(level).lower(), event, shown)}\n")
        errors.flush()

    write_events(write, least)
    # A thread's failure must not print a traceback between the command's lines.
    threading.excepthook = _log_failed_thread


def _log_failed_thread(failed: threading.ExceptHookArgs) -> None:
    """Log in one line that a thread of oomguard failed.

    Standard error belongs to the command, so a traceback would be out of place.
    """
    from oomguard.core.log import get_logger

    if failed.thread is None:
        name = ""
    else:
        name = failed.thread.name
    reason = f"{failed.exc_type.__name__}: {failed.exc_value}"
    get_logger().warning(
        "A part of oomguard failed; the command continues without it", part=name, reason=reason
    )


def _console_line(_level: str, event: str, fields: dict[str, Any]) -> str:
    # The supervisor prints events too, so both share one form.
    from oomguard.supervisor.messages import event_line

    return event_line(event, fields)


def _json_line(level: str, event: str, fields: dict[str, Any]) -> str:
    from oomguard.report.json import json_line

    now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    return json_line(
        {**fields, "event": event, "level": level, "logger": "oomguard", "timestamp": now}
    )


def check_report(report: str | None) -> None:
    """Check before the command runs that the report can be written.

    Raises:
        UsageError: if it cannot.
    """
    if report is None:
        return
    path = Path(report)
    if path.suffix not in {".json", ".md", ".html"}:
        raise UsageError(
            f"--report {path}: unknown format", hint="end the name in .json, .md or .html"
        )
    if not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"--report {path}: oomguard cannot write to this folder",
            hint="name a folder that exists",
        )


def write_report(path: Path, outcome: Outcome) -> None:
    """Write the report. A failed write is logged and does not change the exit status."""
    from oomguard.core.log import get_logger
    from oomguard.report.history import report_text

    try:
        path.write_text(
            report_text(path.suffix, outcome.diagnosis or Diagnosis(""), outcome.attempts),
            encoding="utf-8",
        )
    except OSError as error:
        get_logger().warning("Could not write the report", path=str(path), reason=error.strerror)


class SnapshotRequest:
    """Ask all engines of the command for a memory snapshot, through their environment.

    If the command fails and no snapshot was written, ``report`` logs why.

    Raises:
        UsageError: if the folder of the snapshot cannot be written.
    """

    def __init__(self, path: Path) -> None:
        from oomguard.engines.vllm.plugin import SNAPSHOT

        if not os.access(path.parent, os.W_OK):
            raise UsageError(
                f"--snapshot {path}: oomguard cannot write to this folder",
                hint="name a folder that exists",
            )
        self._path = path.absolute()
        os.environ[SNAPSHOT] = str(self._path)
        self._before = self._files()

    def report(self, outcome: Outcome) -> None:
        """Log why there is no snapshot, if the command failed."""
        is_oom = outcome.diagnosis is not None and outcome.diagnosis.verdict == "oom"
        if (outcome.status or is_oom) and not self._files() - self._before:
            from oomguard.core.log import get_logger

            get_logger().warning(
                "No memory snapshot was written",
                why="no allocation failed in a vLLM engine with oomguard's plugin",
                other_programs=f"oomguard.guard(snapshot={str(self._path)!r})",
            )

    def files(self) -> list[Path]:
        """Return the files that may be a snapshot, because each engine writes its own file."""
        folder = self._path.parent
        stem = self._path.stem
        suffix = self._path.suffix
        # The folder may be gone after the run, and then there is no snapshot.
        with contextlib.suppress(OSError):
            files = []
            for file in folder.iterdir():
                if file.name.startswith(stem) and file.suffix == suffix:
                    files.append(file)
            return files
        return []

    def _files(self) -> set[tuple[str, int]]:
        """Return the names of these files with their modification times."""
        found = set()
        for file in self.files():
            # The file is gone.
            with contextlib.suppress(OSError):
                found.add((file.name, file.stat().st_mtime_ns))
        return found


# A journal never changes the first attempt unless --reuse asks for it.

# How long the start waits for a locked journal, or for each answer of a database. After that,
# nothing is reused.
_BUSY_S: Final = 1.0


def changes_to_reuse(
    launch: Launch, policy: Policy, place: Location | None, *, reuse: bool
) -> tuple[Patch, ...]:
    """Return the changes for the first attempt; none without ``reuse``."""
    if not reuse:
        return ()
    from oomguard.analyst.warm_start import known_changes
    from oomguard.journal.queries import open_journal

    # This run creates the journal.
    if isinstance(place, Path) and not place.exists():
        return known_changes(launch, policy, lambda: nullcontext(None))
    return known_changes(launch, policy, lambda: open_journal(place, busy_s=_BUSY_S))


# How long a run waits for a locked journal. After that, the run continues without it.
JOURNAL_BUSY_S: Final = 1.0


@click.command(
    "run",
    cls=CommandAfterDashes,
    common=("allow", "pinned", "floors", "max_attempts", "dry_run", "report"),
    example="oomguard run --report run.md -- vllm serve Qwen/Qwen3-8B",
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD …")
@policy_options
@option(
    "--max-attempts",
    type=Count(1),
    default=DEFAULT_MAX_ATTEMPTS,
    show_default=True,
    help="Maximum number of attempts, including the first.",
    group=LIMITS,
)
@option("--max-relaunches", type=Count(0), hidden=True)
@option(
    "--dry-run",
    is_flag=True,
    help="Run once, and after a failure print the changed command instead of running it.",
    group=CHANGES,
)
@option(
    "--report",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write attempts and diagnosis to FILE, whose name ends in .json, .md or .html.",
    group=RECORDS,
    example="run.md",
)
@option(
    "--idempotent",
    is_flag=True,
    help="Allow a rerun even if the command wrote files or served requests.",
    group=RERUN,
)
@option(
    "--step-recovery/--no-step-recovery",
    default=True,
    show_default="--step-recovery",
    help="Keep a vLLM engine alive if one step runs out of memory; only its requests fail.",
    group=CHANGES,
)
@option(
    "--input",
    "input_file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Use FILE as the standard input of every attempt.",
    group=RERUN,
)
@option(
    "--reuse",
    is_flag=True,
    help=(
        "Begin with the changes of this command's last run with the same model, engine version "
        "and device."
    ),
    group=RERUN,
)
@option(
    "--deadline",
    type=Duration(),
    metavar="TIME",
    help="Start no attempt after this time, such as 1h30m or 90 (seconds).",
    show_default="no deadline",
    group=LIMITS,
    example="1h30m",
)
@option(
    "--max-per-hour",
    type=Count(0),
    default=DEFAULT_MAX_PER_HOUR,
    show_default=True,
    help="Maximum number of relaunches in any hour.",
    group=LIMITS,
)
@option(
    "--grace",
    type=Duration(),
    default=DEFAULT_GRACE_S,
    show_default=f"{DEFAULT_GRACE_S:.0f}s",
    metavar="TIME",
    help="Time between a stop signal and killing the command.",
    group=LIMITS,
    example="30s",
)
@option(
    "--host-reserve",
    type=HostReserve(),
    default="auto",
    show_default="auto: 2 GiB or 4% in a container, or if the GPU shares host memory",
    metavar="SIZE",
    help="Stop the command before the free host memory falls below SIZE (0 = never).",
    group=LIMITS,
    example="4GiB",
)
@journal_option("Journal of the attempts")
@metrics_option
@option(
    "--snapshot",
    type=click.Path(dir_okay=False),
    metavar="PATH",
    help=(
        "Write torch's memory snapshot to PATH if an allocation in a vLLM engine fails; "
        "`oomguard diagnose PATH` reads it."
    ),
    group=RECORDS,
    example="oom.pickle",
)
@cluster_options
@option(
    "--pty/--no-pty",
    default=True,
    show_default="--pty",
    help="Give the command a terminal of its own if oomguard runs on one; otherwise use pipes.",
)
@option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    help="Format of oomguard's messages on standard error.",
)
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    argv: tuple[str, ...],
    allow: str | None,
    pinned: tuple[str, ...],
    floors: tuple[str, ...],
    rules: tuple[str, ...],
    max_attempts: int,
    max_relaunches: int | None,
    max_per_hour: int,
    deadline: float | None,
    dry_run: bool,
    idempotent: bool,
    report: str | None,
    step_recovery: bool,
    snapshot: str | None,
    journal: Location | None,
    reuse: bool,
    input_file: str | None,
    grace: float,
    host_reserve: int | str,
    pty: bool,
    log_format: str,
    quiet: bool,
    verbose: bool,
    color: str,
    metrics: str | None = None,
    cluster: ClusterChoices | None = None,
) -> int:
    """Run a command; if it runs out of memory, explain why, change settings, and run it again.

    By default oomguard makes changes that keep outputs the same. It lowers capacity only for
    settings that you did not set. It never changes outputs unless you allow it.

    Exit status: the command's own, or 128+n after signal n. oomguard exits with 1 instead of 0 if
    the engine's log says that the engine died, or if output was lost on a full disk. It exits with
    125 if the command could not start, and with 126 or 127 as a shell does.
    """
    if not argv:
        raise UsageError("no command to run", hint="for example: oomguard run -- python script.py")
    from oomguard.analyst.link import current_link

    link = current_link()
    if link is None:
        raise UsageError(
            "oomguard run cannot be called from another command",
            hint="for example: oomguard run -- python script.py",
        )
    from oomguard.analyst.attempt_loop import AttemptLoop
    from oomguard.analyst.host_trend import HostTrend
    from oomguard.analyst.journal_hook import JournalHook
    from oomguard.analyst.nested_run import outer_run
    from oomguard.core.log import get_logger
    from oomguard.engines.command import Launch

    signals = link.signals
    choices = cluster or NoCluster()
    configure_log(log_format, quiet=quiet, verbose=verbose)
    report_configuration(ctx, get_logger().warning, get_logger().debug)
    link.options.update(
        grace_s=grace,
        pty=pty,
        quiet=quiet,
        is_json=log_format == "json",
        status_by_cause=choices.has_status_by_cause,
        host_reserve_bytes=None if host_reserve == "auto" else host_reserve,
        input_path=None if input_file is None else str(Path(input_file).absolute()),
    )
    # A script under `oomguard run` may itself call `oomguard run`. Only the outer one changes
    # anything.
    outer = outer_run()
    if outer is not None:
        get_logger().debug("the outer run changes and runs again", outer_pid=outer)
        # The outer run watches.
        link.options["host_reserve_bytes"] = 0
    choices = choices.check(is_inside=outer is not None)
    if outer is None:
        if max_relaunches is not None:
            warn_of_old_name("--max-relaunches N", "--max-attempts N+1")
            max_attempts = max_relaunches + 1
        attempts = choices.max_attempts(max_attempts)
    else:
        attempts = 1
    limits = {"max_attempts": attempts, "max_per_hour": max_per_hour, "deadline_s": deadline}
    policy = read_policy(allow, pinned, floors, **limits)
    # A mistake in a rule or in --report must not appear after hours of work.
    _check(rules, report)

    if not step_recovery:
        from oomguard.engines.vllm.plugin import STEP_RECOVERY

        # The engine's process reads the variable, and the command inherits it.
        os.environ[STEP_RECOVERY] = "0"
    if snapshot is None:
        snapshot_request = None
    else:
        snapshot_request = SnapshotRequest(Path(snapshot))

    def on_failure(diagnosis: Diagnosis, commands: dict[str, str]) -> None:
        if not quiet:
            from oomguard.report.panel import print_diagnosis

            # The later failures follow from the first one.
            shown = Diagnosis("", tuple(filter(None, [diagnosis.first_cause])), diagnosis.notes)
            print_diagnosis(console(color, file=cast("TextIO", Errors())), shown, commands)

    launch = Launch(tuple(argv))
    support = choices.begin(RunSetup(launch, signals, grace, pinned, outer))
    start = _hung_start(link, rules, grace)
    # Of several ranks only one reports, so the others log errors alone.
    configure_log(log_format, quiet=quiet or not (support.is_reporter or verbose), verbose=verbose)
    if support.is_reporter:
        opens = partial(_journal, journal)
    else:
        opens = None
    journal_hook = JournalHook(opens, is_asked_for=journal is not None, original=launch.argv)
    supervision = AttemptLoop(
        launch,
        policy,
        lambda: read_rules(rules),
        journal_hook,
        dry_run,
        on_failure,
        idempotent,
        AttemptHooks((start, HostTrend(link.signals.reaper.pid), *support.companions)),
        restarts=support.restarts,
        ended_by_us=lambda: start.ended_by_us() or support.ended_by_us(),
        placing=support.assign_devices(),
        own_files=OwnFiles(
            report,
            *support.own_files,
            *of_journal(journal if isinstance(journal, Path) else None),
            late=[] if snapshot_request is None else [snapshot_request.files],
        ),
        together=support.coordinator,
    )
    # A run inside another one begins as the outer run decided.
    may_reuse = reuse and outer is None and support.may_reuse()
    known = changes_to_reuse(launch, policy, journal, reuse=may_reuse)
    supervision.begins_with = support.begins_with(policy) or known
    with support:
        with support.reporting_errors():
            outcome = run_attempts(supervision, link, ctx, metrics, is_inner=outer is not None)
        # The status is chosen first, because the messages below contain it.
        outcome = support.classify(outcome)
        support.report_end(outcome)
        # Of several ranks one does, and the others end after it.
        if support.is_reporter:
            _report_everywhere(outcome, support, snapshot_request, report)
            _show_attempts(outcome, color, quiet=quiet)
            support.requeue(outcome)
    return outcome.status


def _hung_start(link: Link, rules: tuple[str, ...], grace: float) -> HungStart:
    """Return the detector of a start that failed but does not end."""
    from oomguard.analyst.hung_start import HungStart
    from oomguard.analyst.link import LiveOutput
    from oomguard.analyst.outcome import END_S, CommandTerminator

    end = CommandTerminator(link.signals, min(grace, END_S))
    return HungStart(LiveOutput(link), lambda: read_rules(rules), link.signals.reaper.pid, end)


def _check(rules: tuple[str, ...], report: str | None) -> None:
    """Check the rules and the report before the command runs.

    Raises:
        UsageError: if a rule is wrong or the report cannot be written.
    """
    if rules:
        read_rules(rules)
    check_report(report)


def _report_everywhere(
    outcome: Outcome,
    support: ClusterSupport,
    snapshot_request: SnapshotRequest | None,
    report: str | None,
) -> None:
    """Report the end of the run to the scheduler, the snapshot's log line and the report file."""
    support.report_to_scheduler(outcome)
    if snapshot_request is not None:
        snapshot_request.report(outcome)
    if report is not None:
        write_report(Path(report), outcome)


def _show_attempts(outcome: Outcome, color: str, *, quiet: bool) -> None:
    """Show the attempts of a run with several, and the reduced settings that remain."""
    # The diagnosis alone says everything about a single attempt.
    if len(outcome.attempts) < 2:
        return
    from oomguard.core.presentable import drawn
    from oomguard.report.history import attempts_table, reduction_sentence

    screen = console(color, file=cast("TextIO", Errors()))
    if not quiet:
        screen.print(attempts_table(outcome.attempts, columns=screen.width))
    if text := reduction_sentence(outcome.attempts):
        screen.print(drawn(text), markup=False)


def _journal(place: Location | None) -> Journal | SharedJournal:
    """Open the journal at ``place``; None for the default one.

    Raises:
        InputError: if the journal cannot be used.
    """
    if isinstance(place, JournalUrl):
        from oomguard.journal.delivery import SharedJournal

        return SharedJournal(place)
    from oomguard.journal.store import Journal

    # Without HOME the default would be a file in the working directory.
    if place is None and not default_path().is_absolute():
        raise InputError(
            "oomguard found no home folder for the journal",
            hint="for example: oomguard run --journal runs.db -- …",
        )
    return Journal(default_path() if place is None else place, busy_s=JOURNAL_BUSY_S)
