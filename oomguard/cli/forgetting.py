"""``oomguard history --forget``: drop what runs learned, after saying what that is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from oomguard.errors import UsageError
from oomguard.journal.location import Location, default_path

if TYPE_CHECKING:
    from oomguard.past_runs import PastRun

_HINT = "oomguard history --forget 12, --forget --all, or --forget --model MODEL"


def forget_learned(path: Location | None, number: int | None, model: str | None, *, everything: bool, yes: bool) -> int:
    """Drop what run ``number``, runs of ``model`` or all learned; return the exit status.

    What happened stays written. Dropped is what later runs would take from it: settings for ``--reuse``, and calibrations of plans.

    Raises:
        UsageError: it is not said of which runs, or nobody can be asked.
        InputError: the journal or the calibrations cannot be read or written.
    """
    if sum((number is not None, model is not None, everything)) != 1:
        raise UsageError("--forget what?", hint=_HINT)
    from oomguard.engines.known import launchers
    from oomguard.report.history import learned_words
    from oomguard.report.presentable import drawn

    runs = _chosen(path, number, model)
    sessions = None if everything else tuple(run.session for run in runs)
    lines = [words for run in runs if (words := learned_words(run)) is not None]
    for engine in launchers():
        lines += engine.measured(sessions, model)
    if not lines:
        click.echo("nothing to forget: nothing was learned from " + _of(number, model))
        return 0
    for line in lines:
        click.echo(drawn(line))
    if not yes and not _is_agreed(len(lines)):
        click.echo("nothing is forgotten")
        return 0
    _forget(path, [run.number for run in runs])
    for engine in launchers():
        engine.forget_measured(sessions, model)
    click.echo("forgotten; the runs stay in the history")
    return 0


def _chosen(path: Location | None, number: int | None, model: str | None) -> list[PastRun]:
    from oomguard.journal.read import Asked, open_journal, past_runs
    from oomguard.report.presentable import drawn

    with open_journal(path) as database:
        runs = [] if database is None else past_runs(database, Asked(number=number))
    if number is not None and not runs:
        raise UsageError(f"there is no run {number}", hint="oomguard history lists the runs")
    if model is not None:
        known = sorted({run.model for run in runs if run.model})
        runs = [run for run in runs if run.model == model]
        if not runs and known:
            click.echo(drawn(f"no run of {model} is recorded; of these: {', '.join(known)}"), err=True)
    return [run for run in runs if not run.is_forgotten]


def _is_agreed(count: int) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("nobody can be asked whether to forget that", hint="--yes asks nothing")
    return click.confirm(f"Forget {'this' if count == 1 else f'these {count}'}?")


def _forget(path: Location | None, numbers: list[int]) -> None:
    from oomguard.journal.maintenance import forget

    if numbers:
        forget(path or default_path(), numbers)


def _of(number: int | None, model: str | None) -> str:
    return f"run {number}" if number is not None else f"runs of {model}" if model is not None else "any run"
