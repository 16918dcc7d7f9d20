"""``oomguard history`` of a journal that several share: what is known to work, delivering what waits here, removing what is old."""

from __future__ import annotations

import sys
from itertools import islice

import click

from oomguard.cli.options import console
from oomguard.errors import InputError, JournalError, UsageError
from oomguard.journal.location import JournalUrl, Location, default_path


def show_fleet(
    place: Location | None, model: str | None, since: float | None, limit: int, form: str, color: str
) -> int:
    """Print under which settings each model ran, for all who write the journal; return the exit status.

    Raises:
        InputError: the journal cannot be read.
    """
    from oomguard.journal.known_good import known_settings
    from oomguard.journal.read import open_journal
    from oomguard.report.known_settings import known_settings_json, print_known_settings

    with open_journal(place) as database:
        found = [] if database is None else known_settings(database, model=model, since=since)
    shown = list(islice(found, limit or None))
    if form == "json":
        for entry in shown:
            click.echo(known_settings_json(entry))
    elif shown:
        print_known_settings(console(color), shown)
    else:
        which = (
            "no attempt of an engine" if model is None and since is None else "no attempt that these options ask for"
        )
        click.echo(f"nothing is known to work: {which} is recorded in {place or default_path()}")
    if len(shown) < len(found):
        click.echo(f"oomguard: the last {len(shown)} of {len(found)}; --limit 0 shows all", err=True)
    return 0


def deliver_waiting(place: Location | None) -> int:
    """Bring what waits on this machine into a shared journal; return the exit status.

    Raises:
        UsageError: the journal is a file.
        InputError: the database cannot be reached or written.
    """
    if not isinstance(place, JournalUrl):
        raise UsageError(
            "--deliver is for a journal that several share",
            hint="oomguard history --deliver --journal postgresql://USER@HOST/DATABASE",
        )
    from oomguard.journal.delivery import deliver_left_behind, require_tables

    try:
        require_tables(place)
        delivered = deliver_left_behind(place)
    except (JournalError, OSError) as error:
        hint = getattr(error, "hint", None) or "what waits here stays; try again when the database is there"
        raise InputError(f"{place}: {error}", hint=hint) from None
    click.echo(f"delivered: {_count(delivered.attempts, 'attempt')} of {_count(delivered.runs, 'run')}")
    if delivered.writing:
        click.echo(f"left to runs that go on: {delivered.writing}")
    for path, why in (delivered.left or {}).items():
        click.echo(f"oomguard: left where it is: {path}: {why}", err=True)
    return 2 if delivered.left else 0


def keep_only(place: Location | None, keep_s: float, *, yes: bool) -> int:
    """Remove runs that ended longer ago, after saying how many; return the exit status.

    Raises:
        UsageError: nobody can be asked.
        InputError: the journal cannot be written.
    """
    from oomguard.journal.maintenance import old_runs, remove_old

    where = place or default_path()
    if not isinstance(where, JournalUrl) and not where.exists():
        click.echo(f"nothing to remove: no run is recorded in {where}")
        return 0
    found = old_runs(where, keep_s)
    if not found.old:
        which = "all" if not found.not_ended else f"all but {found.not_ended} that may still go on"
        click.echo(f"nothing to remove: {which} of {_count(found.runs, 'run')} ended since")
        return 0
    click.echo(f"{found.old} of {_count(found.runs, 'run')} in {where} ended before")
    if found.not_ended:
        click.echo(f"kept beside those that ended since: {_count(found.not_ended, 'run')} that may still go on")
    if not yes and not _is_agreed(found.old):
        click.echo("nothing is removed")
        return 0
    click.echo(f"removed: {_count(remove_old(where, keep_s), 'run')}")
    return 0


def _is_agreed(count: int) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("nobody can be asked whether to remove that", hint="--yes asks nothing")
    return click.confirm(f"Remove {'this run' if count == 1 else f'these {count}'}? It cannot be taken back")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
