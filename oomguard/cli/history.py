"""Run ``oomguard history``: list past runs, print their commands, forget settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

import click

from oomguard.cli.options import (
    RECORDS,
    Age,
    Count,
    GroupedCommand,
    Moment,
    Option,
    color_option,
    console_of,
    format_option,
    journal_option,
    option,
)
from oomguard.core.errors import InputError, JournalError, UsageError
from oomguard.journal.location import JournalUrl, Location, default_path

if TYPE_CHECKING:
    from oomguard.core.past_runs import PastRun
    from oomguard.journal.queries import RunQuery


_HINT = "oomguard history --forget 12, --forget --all, or --forget --model MODEL"


def forget_learned(
    path: Location | None, number: int | None, model: str | None, *, everything: bool, yes: bool
) -> int:
    """Forget the settings learned by run ``number``, by runs of ``model``, or by all runs.

    The history itself stays. Later runs lose only learned settings (``--reuse``) and calibrations
    of plans. The user sees the list first and confirms it.

    Returns:
        The exit status.

    Raises:
        UsageError: if no run is named, or if no terminal is there to confirm.
        InputError: if the journal or the calibrations cannot be read or written.
    """
    if sum((number is not None, model is not None, everything)) != 1:
        raise UsageError("--forget needs a run, --all or --model", hint=_HINT)
    from oomguard.core.presentable import drawn
    from oomguard.engines.registry import launchers
    from oomguard.report.history import learned_words

    runs = _chosen(path, number, model)
    if everything:
        sessions = None
    else:
        sessions = tuple(run.session for run in runs)
    lines = list(filter(None, map(learned_words, runs)))
    for engine in launchers():
        lines += engine.measured(sessions, model)
    if not lines:
        click.echo("nothing to forget: oomguard learned nothing from " + _of(number, model))
        return 0
    for line in lines:
        click.echo(drawn(line))
    if not yes and not _is_agreed(len(lines)):
        click.echo("oomguard forgot nothing")
        return 0
    _forget(path, [run.number for run in runs])
    for engine in launchers():
        engine.forget_measured(sessions, model)
    click.echo("oomguard forgot these settings; the runs stay in the history")
    return 0


def _chosen(path: Location | None, number: int | None, model: str | None) -> list[PastRun]:
    from oomguard.core.presentable import drawn
    from oomguard.journal.queries import RunQuery, open_journal, past_runs

    with open_journal(path) as database:
        if database is None:
            runs = []
        else:
            runs = past_runs(database, RunQuery(number=number))
    if number is not None and not runs:
        raise UsageError(f"there is no run {number}", hint="oomguard history lists the runs")
    if model is not None:
        known = sorted(filter(None, {run.model for run in runs}))
        runs = [run for run in runs if run.model == model]
        # A misspelled model would otherwise look like a model without learned settings.
        if not runs and known:
            click.echo(
                drawn(f"no run of {model} is recorded; recorded models: {', '.join(known)}"),
                err=True,
            )
    remembered = []
    for run in runs:
        if not run.is_forgotten:
            remembered.append(run)
    return remembered


def _is_agreed(count: int) -> bool:
    # sys.stdin is None if the stream was closed before oomguard started.
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            "--forget needs a confirmation, but there is no terminal", hint="confirm with --yes"
        )
    return click.confirm(f"Forget {'this' if count == 1 else f'these {count}'}?")


def _forget(path: Location | None, numbers: list[int]) -> None:
    from oomguard.journal.queries import forget

    if numbers:
        forget(path or default_path(), numbers)


def _of(number: int | None, model: str | None) -> str:
    if number is not None:
        return f"run {number}"
    if model is not None:
        return f"runs of {model}"
    return "any run"


def show_fleet(
    place: Location | None,
    model: str | None,
    since: float | None,
    limit: int,
    form: str,
    color: str,
) -> int:
    """Print the settings under which each model ran, for all users of the journal.

    Returns:
        The exit status.

    Raises:
        InputError: if the journal cannot be read.
    """
    from oomguard.journal.queries import known_settings, open_journal
    from oomguard.report.history import known_settings_json, print_known_settings

    with open_journal(place) as database:
        if database is None:
            found = []
        else:
            found = known_settings(database, model=model, since=since)
    shown = list(islice(found, limit or None))
    if form == "json":
        for entry in shown:
            click.echo(known_settings_json(entry))
    elif shown:
        print_known_settings(console_of(form, color), shown)
    else:
        if model is None and since is None:
            which = "no attempt of an engine is recorded"
        else:
            which = "no recorded attempt matches these options"
        click.echo(f"no known settings: {which} in {place or default_path()}")
    if len(shown) < len(found):
        # A program that reads the rows must not get this line.
        click.echo(
            f"oomguard: showing the last {len(shown)} of {len(found)}; --limit 0 shows all",
            err=True,
        )
    return 0


def deliver_waiting(place: Location | None) -> int:
    """Deliver this machine's waiting records to a shared journal; return the exit status.

    Raises:
        UsageError: if the journal is a file.
        InputError: if the database cannot be reached or written.
    """
    if not isinstance(place, JournalUrl):
        raise UsageError(
            "--deliver needs a shared journal",
            hint="oomguard history --deliver --journal postgresql://USER@HOST/DATABASE",
        )
    from oomguard.journal.outbox import deliver_abandoned, require_tables

    try:
        require_tables(place)
        delivered = deliver_abandoned(place)
    except (JournalError, OSError) as error:
        hint = (
            getattr(error, "hint", None)
            or "the records stay on this machine; try again when the database is reachable"
        )
        raise InputError(f"{place}: {error}", hint=hint) from None
    click.echo(
        f"delivered: {_count(delivered.attempts, 'attempt')} of {_count(delivered.runs, 'run')}"
    )
    if delivered.writing:
        click.echo(f"not delivered yet, because their runs still write: {delivered.writing}")
    for path, why in (delivered.left or {}).items():
        click.echo(f"oomguard: not delivered: {path}: {why}", err=True)
    # A script must not take these records for delivered.
    if delivered.left:
        return 2
    return 0


def keep_only(place: Location | None, keep_s: float, *, yes: bool) -> int:
    """Remove runs that ended longer ago than ``keep_s`` seconds, after a confirmation.

    Returns:
        The exit status.

    Raises:
        UsageError: if no terminal is there to confirm.
        InputError: if the journal cannot be written.
    """
    from oomguard.journal.queries import old_runs, remove_old

    where = place or default_path()
    if not isinstance(where, JournalUrl) and not where.exists():
        click.echo(f"nothing to remove: no run is recorded in {where}")
        return 0
    found = old_runs(where, keep_s)
    if not found.old:
        if not found.not_ended:
            which = "all"
        else:
            which = f"all except {found.not_ended} that may still run"
        click.echo(
            f"nothing to remove: {which} of {_count(found.runs, 'run')} ended after that time"
        )
        return 0
    click.echo(f"{found.old} of {_count(found.runs, 'run')} in {where} ended before that time")
    if found.not_ended:
        click.echo(f"also kept: {_count(found.not_ended, 'run')} that may still run")
    if not yes and not _shared_history_is_agreed(found.old):
        click.echo("oomguard removed nothing")
        return 0
    click.echo(f"removed: {_count(remove_old(where, keep_s), 'run')}")
    return 0


def _shared_history_is_agreed(count: int) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            "--keep needs a confirmation, but there is no terminal", hint="confirm with --yes"
        )
    return click.confirm(
        f"Remove {'this run' if count == 1 else f'these {count}'}? You cannot undo this"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# As many as fit on a screen with their failures.
_DEFAULT_LIMIT: Final = 20
LEARNED: Final = "Learned settings"
# Mode -> the options that select it, and the options that it uses. The first mode with a given
# option counts.
_ALWAYS: Final = frozenset({"journal", "color"})
# Forgetting too much cannot be undone, so even a variable for these is refused.
_FILTERS: Final = frozenset({"words", "since", "failed"})
_MODES: Final = {
    "--deliver": (("deliver",), _ALWAYS | {"deliver"}),
    "--keep": (("keep",), _ALWAYS | {"keep", "yes"}),
    "--fleet": (("fleet",), _ALWAYS | {"fleet", "model", "since", "limit", "form"}),
    "--forget": (("forget",), _ALWAYS | {"forget", "number", "everything", "model", "yes"}),
    "--original": (("original",), _ALWAYS | {"original", "number"}),
    "the number of a run": (("number",), _ALWAYS | {"number", "form"}),
}


@click.command(
    "history",
    cls=GroupedCommand,
    common=("failed", "words", "since", "limit", "form", "original"),
    example="oomguard history --failed --since 7d",
)
@click.argument("number", metavar="[N]", required=False, type=Count(1))
@option("--failed", is_flag=True, help="Show only runs that failed in the end.")
@option(
    "--command",
    "words",
    metavar="TEXT",
    help="Show only runs whose command contains TEXT, in any case.",
    example="vllm",
)
@option(
    "--since",
    type=Moment(),
    metavar="AGE|DATE",
    help="Show only runs that began since then, such as 12h, 7d or 2026-11-20.",
    show_default="show all",
    example="7d",
)
@option(
    "--limit",
    type=Count(0),
    default=_DEFAULT_LIMIT,
    show_default=True,
    help="Show at most N runs (0 = all).",
)
@format_option("the list or the run")
@click.option(
    "--original",
    cls=Option,
    is_flag=True,
    help="Print the command of run N before any change, ready to paste.",
)
@click.option(
    "--fleet",
    cls=Option,
    is_flag=True,
    help="Show the settings under which each model ran, and how often they worked.",
    group=LEARNED,
)
@click.option(
    "--forget",
    cls=Option,
    is_flag=True,
    help="Forget the settings learned from run N, from a model or from all runs.",
    group=LEARNED,
)
@click.option(
    "--all",
    "everything",
    cls=Option,
    is_flag=True,
    help="Forget the settings of all runs (needs --forget).",
    group=LEARNED,
)
@click.option(
    "--model",
    cls=Option,
    metavar="MODEL",
    help="Use only runs of this model (needs --forget or --fleet).",
    group=LEARNED,
    example="Qwen/Qwen3-8B",
)
@click.option(
    "--yes",
    cls=Option,
    is_flag=True,
    help="Do not ask for confirmation (needs --forget or --keep).",
    group=LEARNED,
)
@journal_option("Location of the journal")
@click.option(
    "--keep",
    cls=Option,
    type=Age(),
    metavar="AGE",
    help="Remove runs that ended longer ago than AGE, such as 90d or 26w.",
    group=RECORDS,
    example="90d",
)
@click.option(
    "--deliver",
    cls=Option,
    is_flag=True,
    help="Deliver this machine's waiting records to the shared journal.",
    group=RECORDS,
)
@color_option
@click.pass_context
def command(
    ctx: click.Context,
    number: int | None,
    journal: Location | None,
    words: str | None,
    since: float | None,
    failed: bool,
    limit: int,
    form: str,
    original: bool,
    forget: bool,
    everything: bool,
    model: str | None,
    yes: bool,
    fleet: bool,
    keep: float | None,
    deliver: bool,
    color: str,
) -> int:
    """List the runs in the journal, newest first; with N, show one run in full.

    The list shows each command as you gave it, its failures and their causes, the changes, and
    predicted and measured values.

    Exit status: 0 after success, 2 after a usage error or if the journal is unreadable.
    """
    _refuse_together(ctx)
    if forget or keep is not None or deliver:
        return _change(
            journal, number, model, everything=everything, yes=yes, keep_s=keep, deliver=deliver
        )
    if fleet:
        return show_fleet(journal, model, since, limit, form, color)
    if everything or model is not None or yes:
        raise UsageError(
            "--all, --model and --yes need --forget", hint="oomguard history --forget --all"
        )
    if original:
        return _print_original(journal, number)
    if number is not None:
        return _show_one(journal, number, form, color)
    from oomguard.journal.queries import RunQuery

    return _list(journal, RunQuery(words, since, failed), limit, form, color)


def _change(
    path: Location | None,
    number: int | None,
    model: str | None,
    *,
    everything: bool,
    yes: bool,
    keep_s: float | None,
    deliver: bool,
) -> int:

    if deliver:
        return deliver_waiting(path)
    if keep_s is not None:
        return keep_only(path, keep_s, yes=yes)
    return forget_learned(path, number, model, everything=everything, yes=yes)


def _refuse_together(ctx: click.Context) -> None:
    """Refuse an option that the selected mode would ignore.

    Raises:
        UsageError: if such an option is given.
    """
    for mode, (is_of, heeded) in _MODES.items():
        if not any(_is_given(ctx, name) for name in is_of):
            continue
        for param in ctx.command.params:
            if _is_given(ctx, param.name or "") and param.name not in heeded:
                raise UsageError(
                    f"{param.opts[0]} does not work with {mode}", hint="oomguard history --help"
                )
        return


def _is_given(ctx: click.Context, name: str) -> bool:
    """Return whether the user wrote an option on the command line.

    A variable may be meant for another mode, so it counts only if it is a filter of --forget.
    """
    source = ctx.get_parameter_source(name)
    is_written = source is click.core.ParameterSource.COMMANDLINE
    is_filter = (
        name in _FILTERS
        and source is not click.core.ParameterSource.DEFAULT
        and ctx.params["forget"]
    )
    return (is_written or is_filter) and ctx.params.get(name) not in (False, None)


def _list(path: Location | None, asked: RunQuery, limit: int, form: str, color: str) -> int:
    from oomguard.report.history import print_runs, run_json

    runs = _each(path, asked, limit + 1 if limit else None)
    first = next(runs, None)
    if first is None:
        if form != "json":
            click.echo(_nothing(path, asked))
        return 0
    shown = islice(chain([first], runs), min(limit, sys.maxsize) or None)
    if form == "json":
        for run in shown:
            click.echo(run_json(run))
    else:
        print_runs(console_of(form, color), shown)
    if next(runs, None) is not None:
        if limit == 1:
            last = "the last run"
        else:
            last = f"the last {limit} runs"
        click.echo(f"oomguard: showing {last}; --limit 0 shows all", err=True)
    return 0


def _show_one(path: Location | None, number: int, form: str, color: str) -> int:
    from oomguard.report.history import print_run, run_json

    run = _run(path, number)
    if form == "json":
        click.echo(run_json(run, in_full=True))
        return 0
    screen = console_of(form, color)
    print_run(screen, run)
    if run.patches:
        without = f"command without these changes: oomguard history {run.number} --original"
        screen.print(without, markup=False, soft_wrap=True)
    return 0


def _print_original(path: Location | None, number: int | None) -> int:
    from oomguard.report.history import to_paste

    if number is None:
        raise UsageError(
            "--original needs the number of a run",
            hint="oomguard history --original 12; oomguard history lists them",
        )
    line, notes = to_paste(_run(path, number))
    click.echo(line)
    # Standard output contains only the command.
    for note in notes:
        click.echo(f"oomguard: {note}", err=True)
    return 0


def _each(path: Location | None, asked: RunQuery, limit: int | None) -> Iterator[PastRun]:
    from oomguard.journal.queries import each_run, open_journal

    with open_journal(path) as database:
        if database is not None:
            yield from each_run(database, asked, limit=limit)


def _runs(path: Location | None, asked: RunQuery, limit: int | None) -> list[PastRun]:
    from oomguard.journal.queries import open_journal, past_runs

    with open_journal(path) as database:
        if database is None:
            return []
        return past_runs(database, asked, limit=limit)


def _run(path: Location | None, number: int) -> PastRun:
    from oomguard.journal.queries import RunQuery

    found = _runs(path, RunQuery(number=number), None)
    if found:
        return found[0]
    last = _runs(path, RunQuery(), 1)
    if last:
        there = f"the last one is {last[0].number}"
    else:
        there = "no run is recorded"
    raise UsageError(f"there is no run {number}: {there}", hint="oomguard history lists the runs")


def _nothing(path: Location | None, asked: RunQuery) -> str:
    if asked.command is not None or asked.since is not None or asked.failed:
        return f"no recorded run matches these options in {path or default_path()}"
    return f"no run is recorded in {path or default_path()}; oomguard run records there"
