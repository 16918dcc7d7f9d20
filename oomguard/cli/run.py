"""``oomguard run -- CMD``: the command with its streams untouched, watched, and run again where
that helps.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar, cast

import click

from oomguard.analyst.side_effects import OwnFiles, of_journal
from oomguard.cli.options import (
    CommandAfterDashes,
    Duration,
    console,
    journal_option,
    option,
    output_options,
    policy_options,
    read_policy,
    read_rules,
    tell_configuration,
)
from oomguard.cli.run_extensions import (
    ClusterChoices,
    ClusterSupport,
    NoCluster,
    RunSetup,
    cluster_options,
    metrics_option,
    run_attempts,
)
from oomguard.core.errors import InputError, UsageError
from oomguard.core.incident import Diagnosis
from oomguard.journal.location import JournalUrl, Location, default_path
from oomguard.remedy.policy import DEFAULT_MAX_PER_HOUR, DEFAULT_MAX_RELAUNCHES
from oomguard.supervisor.options import DEFAULT_GRACE_S

if TYPE_CHECKING:
    from oomguard.analyst.hung_start import HungStart
    from oomguard.analyst.link import Link
    from oomguard.analyst.outcome import Outcome
    from oomguard.core.incident import Patch
    from oomguard.engines.command import Launch
    from oomguard.journal.shared import SharedJournal
    from oomguard.journal.store import Journal
    from oomguard.remedy.policy import Policy


# The events of ``oomguard run`` on standard error, one line each, as text or as JSON.

# What is pasted into the user's own terminal: in quotes, a shell leaves ``~`` as it is.
_TO_PASTE: Final = frozenset({"command", "path", "remove"})


class Errors:
    """Standard error that cannot fail: the run goes on when nobody reads it any more."""

    encoding = getattr(sys.stderr, "encoding", "utf-8")

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return sys.stderr is not None and sys.stderr.isatty()

    def fileno(self) -> int:
        """Return the descriptor, for the terminal's width."""
        return 2


def configure_log(form: str, *, quiet: bool, verbose: bool) -> None:
    """Send events to standard error, one line each; only the command line does, never
    the library.
    """
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
        from oomguard.report.presentable import drawn
        from oomguard.report.redact import homes_kept

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
    threading.excepthook = _tell_of_thread


def _tell_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Tell in one line that a thread of our own failed: standard error is the command's, and no
    place for a traceback of ours.
    """
    from oomguard.core.log import get_logger

    if failed.thread is None:
        name = ""
    else:
        name = failed.thread.name
    reason = f"{failed.exc_type.__name__}: {failed.exc_value}"
    get_logger().warning(
        "a part of oomguard failed: the run goes on without", part=name, reason=reason
    )


def _console_line(_level: str, event: str, fields: dict[str, Any]) -> str:
    extra = " ".join(f"{key}={value}" for key, value in fields.items()).replace(
        "\n", "\\n"
    )  # one line each
    return f"oomguard: {event}" + (f": {extra}" if extra else "")


def _json_line(level: str, event: str, fields: dict[str, Any]) -> str:
    from oomguard.report.json import json_line

    now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    return json_line(
        {**fields, "event": event, "level": level, "logger": "oomguard", "timestamp": now}
    )


# The report of a run: whether it can be written is known before the command runs, it is written
# when all has ended.


def check_report(report: str | None) -> None:
    """Raise UsageError where a report is asked for that cannot be written."""
    if report is None:
        return
    path = Path(report)
    if path.suffix not in {".json", ".md", ".html"}:
        raise UsageError(
            f"--report {path}: unknown form", hint="end the name in .json, .md or .html"
        )
    if not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"--report {path}: the folder cannot be written", hint="name a folder that exists"
        )


def write_report(path: Path, outcome: Outcome) -> None:
    """Write the report; a failure by now is told and leaves the command's own exit status alone."""
    from oomguard.core.log import get_logger
    from oomguard.report.attempts import report_text

    try:
        path.write_text(
            report_text(path.suffix, outcome.diagnosis or Diagnosis(""), outcome.attempts),
            encoding="utf-8",
        )
    except OSError as error:
        get_logger().warning(
            "the report could not be written", path=str(path), reason=error.strerror
        )


# ``run --snapshot``: engines are asked for one in their environment; where a command fails and none
# came, one line says so.


class AskedSnapshot:
    """A snapshot that all engines take which the command starts: they find where to in their
    environment, wherever they run.

    Raises:
        UsageError: its folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        from oomguard.engines.vllm.plugin import SNAPSHOT

        if not os.access(path.parent, os.W_OK):
            raise UsageError(
                f"--snapshot {path}: the folder cannot be written", hint="name a folder that exists"
            )
        self._path = path.absolute()
        os.environ[SNAPSHOT] = str(self._path)
        self._before = self._files()

    def tell(self, outcome: Outcome) -> None:
        """Say why there is none, where the command failed; whether it did of memory is not always
        known.
        """
        is_oom = outcome.diagnosis is not None and outcome.diagnosis.verdict == "oom"
        if (outcome.status or is_oom) and not self._files() - self._before:
            from oomguard.core.log import get_logger

            get_logger().warning(
                "no memory snapshot was taken",
                why="no allocation failed in a vLLM engine with oomguard's plugin",
                other_programs=f"oomguard.guard(snapshot={str(self._path)!r})",
            )

    def files(self) -> list[Path]:
        """Return the files that a snapshot may have become: each engine writes one of its own."""
        folder = self._path.parent
        stem = self._path.stem
        suffix = self._path.suffix
        with contextlib.suppress(OSError):
            return [
                file
                for file in folder.iterdir()
                if file.name.startswith(stem) and file.suffix == suffix
            ]
        return []

    def _files(self) -> set[tuple[str, int]]:
        """Return their names, with the time of their last change."""
        found = set()
        for file in self.files():
            with contextlib.suppress(OSError):  # it is gone since
                found.add((file.name, file.stat().st_mtime_ns))
        return found


# ``run --reuse``: begin with what the journal knows to work; off unless asked, since a journal
# never changes a first attempt by itself.

# How long the command's start waits for others that hold the journal locked, or for each answer of
# a database; after it nothing is reused.
_BUSY_S: Final = 1.0
F = TypeVar("F", bound=Callable[..., Any])


def reuse_option(function: F) -> F:
    """Add --reuse."""
    what = (
        "Begin with the changes under which this command ran last with the same model, engine "
        "version and device. The journal tells them, "
        "--allow, --pin and --min hold."
    )
    return option("--reuse", is_flag=True, help=what)(function)


def reused(
    launch: Launch, policy: Policy, place: Location | None, *, reuse: bool
) -> tuple[Patch, ...]:
    """Return the changes that the first attempt begins with; none unless ``reuse`` asks
    for them.
    """
    if not reuse:
        return ()
    from oomguard.analyst.warm_start import known_changes
    from oomguard.journal.queries import open_journal

    if isinstance(place, Path) and not place.exists():  # this run makes it
        return known_changes(launch, policy, lambda: nullcontext(None))
    return known_changes(launch, policy, lambda: open_journal(place, busy_s=_BUSY_S))


# How long a run waits for others that write the journal; after it the run goes on without.
JOURNAL_BUSY_S: Final = 1.0


@click.command("run", cls=CommandAfterDashes)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD …")
@policy_options
@option(
    "--max-relaunches",
    type=click.IntRange(min=0),
    default=DEFAULT_MAX_RELAUNCHES,
    show_default=True,
    help="Attempts after the first, at most.",
)
@option(
    "--max-per-hour",
    type=click.IntRange(min=0),
    default=DEFAULT_MAX_PER_HOUR,
    show_default=True,
    help="Of these within any hour, at most.",
)
@option(
    "--deadline",
    type=Duration(),
    metavar="TIME",
    help=(
        "Start no attempt, the first one included, after this time, such as 1h30m or 90 (seconds); "
        "no wait goes beyond it."
    ),
)
@option(
    "--dry-run",
    is_flag=True,
    help="Run once; on failure print the plan and the changed command, run nothing again.",
)
@option(
    "--idempotent",
    is_flag=True,
    help=(
        "The command may be repeated from the beginning even after it wrote files or served "
        "requests."
    ),
)
@option(
    "--report",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help=(
        "Write attempts and diagnosis to FILE, also after a success. Its name ends in .json, .md "
        "or .html."
    ),
)
@metrics_option
@option(
    "--snapshot",
    type=click.Path(dir_okay=False),
    metavar="PATH",
    help="Write torch's memory snapshot to PATH where an allocation of a vLLM engine fails; "
    "`oomguard diagnose PATH` reads it. A program "
    "without vLLM is not reached: oomguard.guard(snapshot=PATH) is for it.",
)
@journal_option("Where attempts are recorded")
@reuse_option
@option(
    "--input",
    "input_file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Give FILE to the command as its standard input, at each attempt from its beginning.",
)
@option(
    "--grace",
    type=Duration(),
    default=DEFAULT_GRACE_S,
    show_default=True,
    metavar="TIME",
    help="After a stop signal, time before the command is killed.",
)
@option(
    "--pty/--no-pty",
    default=True,
    show_default=True,
    help="On a terminal, give the command a terminal of its own, not pipes.",
)
@option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    help="Form of the events on standard error.",
)
@cluster_options
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    argv: tuple[str, ...],
    allow: str | None,
    pinned: tuple[str, ...],
    floors: tuple[str, ...],
    rules: tuple[str, ...],
    max_relaunches: int,
    max_per_hour: int,
    deadline: float | None,
    dry_run: bool,
    idempotent: bool,
    report: str | None,
    snapshot: str | None,
    journal: Location | None,
    reuse: bool,
    input_file: str | None,
    grace: float,
    pty: bool,
    log_format: str,
    quiet: bool,
    verbose: bool,
    color: str,
    metrics: str | None = None,
    cluster: ClusterChoices | None = None,
) -> int:
    """Run a command; when it dies of memory, say why with numbers, change the least that fits, and
    run it again.

    The exit status is the command's own, whatever happens inside oomguard; 1 where that is 0 though
    the engine's log says that it died, or a full disk did not take its output; 128+n after a
    signal; 125 where the command could not be started; 126 and 127 as a shell; see --exit-status.
    """
    if not argv:
        raise UsageError("no command to run", hint="oomguard run -- python script.py")
    from oomguard.analyst.link import current_link

    link = current_link()
    if link is None:
        raise UsageError(
            "oomguard run is a command of its own", hint="oomguard run -- python script.py"
        )
    from oomguard.analyst.attempt_hooks import Companions
    from oomguard.analyst.journal_hook import JournalHook
    from oomguard.analyst.loop import Supervision
    from oomguard.analyst.nested_run import outer_run
    from oomguard.core.log import get_logger
    from oomguard.engines.command import Launch

    signals = link.signals
    choices = cluster or NoCluster()
    configure_log(log_format, quiet=quiet, verbose=verbose)
    tell_configuration(ctx, get_logger().warning, get_logger().debug)
    link.options.update(
        grace_s=grace,
        pty=pty,
        quiet=quiet,
        is_json=log_format == "json",
        status_by_cause=choices.has_status_by_cause,
        input_path=None if input_file is None else str(Path(input_file).absolute()),
    )
    outer = outer_run()
    if outer is not None:
        get_logger().debug("the outer run changes and runs again", outer_pid=outer)
    choices = choices.check(is_inside=outer is not None)
    if outer is None:
        relaunches = choices.max_relaunches(max_relaunches)
    else:
        relaunches = 0
    limits = {"max_relaunches": relaunches, "max_per_hour": max_per_hour, "deadline_s": deadline}
    policy = read_policy(allow, pinned, floors, **limits)
    _check(rules, report)

    if snapshot is None:
        asked = None
    else:
        asked = AskedSnapshot(Path(snapshot))

    def on_failure(diagnosis: Diagnosis, commands: dict[str, str]) -> None:
        if not quiet:
            from oomguard.report.terminal import print_diagnosis

            shown = Diagnosis("", tuple(filter(None, [diagnosis.first_cause])), diagnosis.notes)
            print_diagnosis(console(color, file=cast("TextIO", Errors())), shown, commands)

    launch = Launch(tuple(argv))
    support = choices.begin(RunSetup(launch, signals, grace, pinned, outer))
    start = _hung_start(link, rules, grace)
    configure_log(log_format, quiet=quiet or not (support.is_reporter or verbose), verbose=verbose)
    if support.is_reporter:
        opens = partial(_journal, journal)
    else:
        opens = None
    keeper = JournalHook(opens, is_asked_for=journal is not None, original=launch.argv)
    supervision = Supervision(
        launch,
        policy,
        lambda: read_rules(rules),
        keeper,
        dry_run,
        on_failure,
        idempotent,
        Companions((start, *support.companions)),
        restarts=support.restarts,
        ended_by_us=lambda: start.ended_by_us() or support.ended_by_us(),
        placing=support.assign_devices(),
        own_files=OwnFiles(
            report,
            *support.own_files,
            *of_journal(journal if isinstance(journal, Path) else None),
            late=[] if asked is None else [asked.files],
        ),
        together=support.coordinator,
    )
    known = reused(launch, policy, journal, reuse=reuse and outer is None and support.may_reuse())
    supervision.begins_with = support.begins_with(policy) or known
    with support:
        with support.reporting_errors():
            outcome = run_attempts(supervision, link, ctx, metrics, is_inner=outer is not None)
        outcome = support.classify(outcome)
        support.report_end(outcome)
        if support.is_reporter:  # of several ranks one does, and the others end after it
            _tell_all(outcome, support, asked, report)
            _tell(outcome, color, quiet=quiet)
            support.requeue(outcome)
    return outcome.status


def _hung_start(link: Link, rules: tuple[str, ...], grace: float) -> HungStart:
    """Return what looks for a start that has failed and does not end."""
    from oomguard.analyst.hung_start import HungStart
    from oomguard.analyst.link import LiveOutput
    from oomguard.analyst.outcome import END_S, CommandTerminator

    end = CommandTerminator(link.signals, min(grace, END_S))
    return HungStart(LiveOutput(link), lambda: read_rules(rules), link.signals.watcher.pid, end)


def _check(rules: tuple[str, ...], report: str | None) -> None:
    """Raise UsageError where something is wrong in the rules, or the report cannot be written:
    before the command runs.
    """
    if rules:
        read_rules(rules)
    check_report(report)


def _tell_all(
    outcome: Outcome, support: ClusterSupport, asked: AskedSnapshot | None, report: str | None
) -> None:
    """Tell how the run ended where others read it."""
    support.report_to_scheduler(outcome)
    if asked is not None:
        asked.tell(outcome)
    if report is not None:
        write_report(Path(report), outcome)


def _tell(outcome: Outcome, color: str, *, quiet: bool) -> None:
    """Show the attempts of a run that needed several, and what it goes on with."""
    if len(outcome.attempts) < 2:
        return
    from oomguard.report.attempts import attempts_table, reduced
    from oomguard.report.presentable import drawn

    screen = console(color, file=cast("TextIO", Errors()))
    if not quiet:
        screen.print(attempts_table(outcome.attempts, columns=screen.width))
    if text := reduced(outcome.attempts):
        screen.print(drawn(text), markup=False)


def _journal(place: Location | None) -> Journal | SharedJournal:
    """Open the journal at ``place``, else the default one; raise InputError where it cannot be
    used.
    """
    if isinstance(place, JournalUrl):
        from oomguard.journal.shared import SharedJournal

        return SharedJournal(place)
    from oomguard.journal.store import Journal

    if place is None and not default_path().is_absolute():
        raise InputError("no home folder is known")
    return Journal(default_path() if place is None else place, busy_s=JOURNAL_BUSY_S)
