"""Show the recorded runs, and the attempts of one: changes, results, measured values."""

from __future__ import annotations

import datetime
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import REGISTRY, format_gib
from oomguard.core.incident import Attempt, Diagnosis, Effect, Incident
from oomguard.core.past_runs import (
    NOT_ENDED,
    RAN,
    REPAIRED,
    STOPPED,
    KnownSettings,
    PastAttempt,
    PastRun,
)
from oomguard.core.presentable import drawn, masked
from oomguard.core.redact import HOME, MASK, homes_kept
from oomguard.report.html import to_html
from oomguard.report.json import SCHEMA, incident_dict, json_line, patch_dict, plain_value, to_dict
from oomguard.report.markdown import cell, inline, to_markdown
from oomguard.report.panel import print_diagnosis

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# Show the attempts of a run: changes, results, and predicted compared with measured values.

# A setting, an arrow and two values fit into this width.
CHANGED_COLUMNS: Final = 24
# On a narrower terminal the column of changes gets no fixed width.
NARROW_COLUMNS: Final = 76
# Facts in the table, with their labels.
LABELS: Final = {
    "peak_bytes": "peak",
    "kv_cache_available_bytes": "KV cache",
    "kv_cache_capacity_tokens": "KV tokens",
    "desired_bytes": "claimed",
}


def attempts_table(
    attempts: Sequence[Attempt], *, columns: int = 80, not_ended: Collection[int] = ()
) -> Table:
    """Return the table of attempts for a terminal.

    Args:
        attempts: the attempts, in order; each is one row.
        columns: the width of the terminal.
        not_ended: numbers of attempts that still run, which have no result.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headings, *rows = attempt_rows(attempts, not_ended)
    table = Table(
        box=box.SIMPLE_HEAD, title="What oomguard did", title_justify="left", padding=(0, 1)
    )
    widths = {"time": max((len(row[-1]) for row in rows), default=0)}
    if columns >= NARROW_COLUMNS:
        widths["changed"] = CHANGED_COLUMNS
    for name in headings:
        table.add_column(
            "" if name == "attempt" else name,
            justify="right" if name == "time" else "left",
            no_wrap=name == "time",
            # A fixed width, because rich would cut the last column of a narrow screen.
            width=widths.get(name),
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def attempt_rows(
    attempts: Sequence[Attempt], not_ended: Collection[int] = ()
) -> list[tuple[str, ...]]:
    """Return the table as printable texts, with the headings first."""
    rows = []
    for a in drawn(tuple(attempts)):
        if a.number in not_ended:
            ended = ("not ended", "")
        else:
            ended = (_result(a), f"{a.seconds:.1f} s")
        rows.append((str(a.number), _changed(a), ended[0], checked(a), ended[1]))
    return [("attempt", "changed", "result", "predicted -> measured", "time"), *rows]


def reduction_sentence(attempts: Sequence[Attempt]) -> str | None:
    """Return the sentence about reduced settings that every such run prints.

    None if no setting was reduced, or the last attempt failed.
    """
    changes = []
    costs = []
    for attempt in attempts:
        for patch in attempt.patches:
            # An output-preserving change takes nothing from the user, so it is not mentioned.
            if patch.effect < Effect.REDUCES_CAPACITY:
                continue
            changes.append(f"{patch.setting} {patch.change}")
            costs.append(patch.tradeoff)
    if not changes or not attempts[-1].succeeded:
        return None
    return (
        f"Ran with reduced settings: {', '.join(changes)}. "
        f"{' '.join(dict.fromkeys(filter(None, costs)))}"
    )


def attempt_dict(attempt: Attempt) -> dict[str, Any]:
    """Return one attempt as an object of the JSON report, with masked texts."""
    shown = masked(attempt)
    row = {
        "number": shown.number,
        "settings": shown.settings,
        "patches": list(map(patch_dict, shown.patches)),
        "kind": shown.incident.kind if shown.incident else None,
        "exit_status": shown.exit_status,
        "seconds": round(shown.seconds, 3),
        "measured": shown.measured,
        "ranks": shown.ranks,
    }
    answer: dict[str, Any] = plain_value(row)
    return answer


def report_text(form: str, diagnosis: Diagnosis, attempts: Sequence[Attempt]) -> str:
    """Return the report of a run: the diagnosis, the attempts, and the reduced settings.

    Args:
        form: ``.json``, ``.md`` or ``.html``.
        diagnosis: the last diagnosis of the run.
        attempts: all attempts, in order.
    """
    sentence = drawn(reduction_sentence(attempts))
    if form == ".json":
        answer = to_dict(diagnosis) | {
            "attempts": list(map(attempt_dict, attempts)),
            "reduced": sentence,
        }
        return json_line(answer) + "\n"
    rows = attempt_rows(attempts)
    if form == ".md":
        lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
        lines.insert(1, f"|{'---|' * len(rows[0])}")
        return "\n".join(
            [to_markdown(diagnosis), *lines, *(["", inline(sentence)] if sentence else []), ""]
        )
    return to_html(diagnosis, table=rows, sentence=sentence)


def _changed(attempt: Attempt) -> str:
    if not attempt.patches:
        return "nothing"
    lines = []
    for patch in attempt.patches:
        arrow = ""
        # Without an old value the change is only a value, and the arrow shows that it is new.
        if patch.old is None:
            arrow = "-> "
        lines.append(f"{patch.setting} {arrow}{patch.change}")
        # A permission matters only if the change needed one.
        if patch.permitted_by is None or patch.effect == Effect.OUTPUT_PRESERVING:
            lines.append(f"({patch.effect})")
        else:
            lines.append(f"({patch.effect}, by {patch.permitted_by})")
    return "\n".join(lines)


def _result(attempt: Attempt) -> str:
    if attempt.succeeded:
        return "ran"
    if attempt.incident:
        return attempt.incident.kind.replace("_", " ")
    return attempt.error


def checked(attempt: Attempt) -> str:
    """Return predicted and measured values, one line for each figure; "" without any."""
    predicted: dict[str, float] = {}
    for patch in attempt.patches:
        predicted |= patch.predicts
    lines = []
    # Predicted figures come first, in the order of their patches.
    for name in dict.fromkeys([*predicted, *attempt.measured]):
        if name not in LABELS:
            continue
        if name in predicted:
            before = f"{figure(name, predicted[name])} -> "
        else:
            before = ""
        if name in attempt.measured:
            after = figure(name, attempt.measured[name])
        else:
            after = "not printed"
        lines.append(f"{LABELS[name]} {before}{after}")
    return "\n".join(lines)


def figure(name: str, value: float) -> str:
    """Format the value of a measurable fact with its unit."""
    if name.endswith("_bytes"):
        return format_gib(value)
    if REGISTRY[name].type == "int":
        return f"{value:,.0f}"
    return f"{value:.3g}"


# Show the runs in the journal.

# What a terminal does not show as it is: control characters, marks that change the text direction,
# and bytes that are not UTF-8.
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_ESCAPED: Final = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_paste(run: PastRun) -> tuple[str, list[str]]:
    """Return the command before any patch as a line to paste, with notes for the user.

    The line contains exactly the user's words, except secrets.
    """
    with homes_kept():
        words = [_exact(word) for word in run.command]
    notes = []
    # The line cannot run until the user fills in the secret.
    if any(MASK in word for word in words):
        notes.append(f"{MASK} replaces a secret or a prompt, which oomguard did not record")
    if any(map(_UNSEEN.search, words)):
        notes.append(
            "the command contains characters that a terminal does not show, written as $'...' for "
            "bash, zsh and ksh"
        )
    if run.folder is not None:
        with homes_kept():
            notes.append(f"the command was started in {drawn(run.folder)}")
    elif any(word.startswith(f"{HOME}/") for word in words):
        notes.append(f"{HOME} replaces a home folder that oomguard did not record")
    return " ".join(map(_quoted, words)), notes


def _exact(word: str) -> str:
    """Return a word exactly as given, but masked.

    Escapes are removed only if masking finds a secret just without them.
    """
    exact = masked(word)
    shown = drawn(word)
    if shown.count(MASK) <= exact.count(MASK):
        return exact
    return shown


def _quoted(word: str) -> str:
    """Quote a word for a shell; ``~`` stays outside the quotes, where a shell expands it."""
    begin = f"{HOME}/"
    if word.startswith(begin) and len(word) > len(begin):
        return begin + _quoted_rest(word[len(begin) :])
    return _quoted_rest(word)


def _quoted_rest(word: str) -> str:
    if _UNSEEN.search(word):
        return "$'" + "".join(map(_escaped, word)) + "'"
    return shlex.quote(word)


def _escaped(char: str) -> str:
    if _UNSEEN.match(char) and char not in _ESCAPED:
        # A byte that is not UTF-8 arrives as one of these surrogates; others came from text.
        is_byte = "\udc80" <= char <= "\udcff"
        raw = char.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
        return "".join(f"\\x{byte:02x}" for byte in raw)
    return _ESCAPED.get(char, char)


# Below this width a table would wrap each cell into many lines.
_NARROW_COLUMNS: Final = 60
_NOT_RECORDED: Final = "not recorded"
_STYLES: Final = {
    "ran": "green",
    "repaired": "yellow",
    "failed": "bold red",
    "stopped": "dim",
    NOT_ENDED: "dim",
}
# A table needs all of its rows to choose its widths, so many runs are printed in pages.
_PAGE_RUNS: Final = 100
# Date, hour and minute; seconds do not help to find a run.
_MOMENT_CHARS: Final = 16


def print_runs(console: Console, runs: Iterable[PastRun]) -> None:
    """Print one row for each run, in the given order: time, result, failures and changes.

    Runs are printed a page at a time, so that the first ones appear at once. On a narrow screen
    each run is printed below its number.
    """
    rows = iter(runs)
    pages = iter(lambda: list(islice(rows, _PAGE_RUNS)), [])
    (_print_below if console.width < _NARROW_COLUMNS else _print_table)(console, pages)


def _print_table(console: Console, pages: Iterable[Sequence[PastRun]]) -> None:
    """Print all pages with one heading, as wide as the first page."""
    widths = (0, 0)
    for page in pages:
        if not any(widths):
            console.print()
            may_go_on = len(page) >= _PAGE_RUNS
            widths = len(str(page[0].number)), max(map(len, _STYLES)) if may_go_on else 0
            _print_rows(console, page, widths, has_headings=True)
        else:
            _print_rows(console, page, widths, has_headings=False)
    console.print()


def _print_rows(
    console: Console, runs: Sequence[PastRun], widths: tuple[int, int], *, has_headings: bool
) -> None:
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_header=has_headings,
        show_edge=False,
    )
    table.add_column("run", justify="right", no_wrap=True, min_width=max(len("run"), widths[0]))
    table.add_column("began", no_wrap=True, min_width=_MOMENT_CHARS)
    table.add_column("result", no_wrap=True, min_width=max(len("result"), widths[1]))
    table.add_column("command, what failed, what was changed")
    for run in runs:
        lines = [Text(shown_command(run), style="bold"), *map(Text, happened(run))]
        result = Text(run.result, style=_STYLES[run.result]).append(
            f"\n{status_words(run)}", style="not bold dim"
        )
        table.add_row(
            str(run.number), f"{moment(run.began_at)}\n{took(run)}", result, Text("\n").join(lines)
        )
    console.print(Padding(table, (0, 1)))


def _print_below(console: Console, pages: Iterable[Sequence[PastRun]]) -> None:
    """Print the content of each row, indented below the run's number."""
    from rich.padding import Padding
    from rich.text import Text

    for run in chain.from_iterable(pages):
        console.print(Text(f"{run.number} ").append(run.result, style=_STYLES[run.result]))
        ended = ", ".join(filter(None, (moment(run.began_at), took(run), status_words(run))))
        lines = [
            Text(ended, style="dim"),
            Text(shown_command(run), style="bold"),
            *map(Text, happened(run)),
        ]
        console.print(Padding(Text("\n").join(lines), (0, 0, 0, 2)))


def print_run(console: Console, run: PastRun) -> None:
    """Print one run with its attempts and each failure as it was shown then."""
    words = ", ".join(filter(None, (run.result, status_words(run))))
    console.print(f"run {run.number}: {words}", markup=False)
    for name, text in _heading(run):
        console.print(f"  {name:<9}{text}", markup=False, soft_wrap=True)
    attempts = [past.attempt for past in run.attempts]
    not_ended = set()
    for past in run.attempts:
        if past.ended_at is None:
            not_ended.add(past.attempt.number)
    console.print(attempts_table(attempts, columns=console.width, not_ended=not_ended))
    if not not_ended and (sentence := reduction_sentence(attempts)):
        console.print(drawn(sentence), markup=False)
    for incident in run.incidents:
        print_diagnosis(console, Diagnosis("", (incident,)))


def happened(run: PastRun) -> list[str]:
    """Return failures, changes and their results as printable lines."""
    lines = []
    for past in run.attempts:
        lines += [f"{patch.setting} {patch.change}" for patch in past.attempt.patches]
        lines += checked(past.attempt).splitlines() if past.attempt.patches else ()
        if past.attempt.incident is not None:
            lines.append(failure_words(past.attempt.incident))
    others: Counter[str | None] = Counter()
    for past in run.attempts:
        if past.attempt.incident is None and (past.is_followed or past.why):
            others[past.attempt.error] += 1
    for error, count in others.items():
        lines.append(f"{_times(count)} failed: {error or 'exit status 0'}")
    return drawn(lines)


def _times(count: int) -> str:
    if count == 1:
        return "1 attempt"
    return f"{count:,} attempts"


def failure_words(incident: Incident) -> str:
    """Return the kind and the cause of a failure."""
    if incident.causes:
        cause = incident.causes[0].id
    else:
        cause = "unknown"
    return f"{incident.kind}: {cause}"


def shown_command(run: PastRun) -> str:
    """Return the command before any patch as one printable line, with secrets masked."""
    return drawn(shlex.join(run.command)).replace("\n", "\\n")


def learned_words(run: PastRun) -> str | None:
    """Return the settings that ``--reuse`` would take from a run.

    None if the run made no changes or did not work.
    """
    last = run.attempts[-1].attempt
    if run.result not in {RAN, REPAIRED, STOPPED} or not last.settings:
        return None
    settings = ", ".join(f"{name} = {value}" for name, value in last.settings.items())
    return f"run {run.number} of {moment(run.began_at)}: {settings} for {shown_command(run)}"


def moment(unix_s: float) -> str:
    """Format a time in the local time zone, to the minute."""
    return datetime.datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M")


def took(run: PastRun) -> str:
    """Return how long a run took; "" if its end is unknown."""
    if run.seconds is None:
        return ""
    return f"{run.seconds:,.1f} s"


def status_words(run: PastRun) -> str:
    """Return a run's exit status in words.

    If oomguard stopped the command, this is the command's status and not the run's.
    """
    last = run.attempts[-1]
    if last.ended_at is None:
        return ""
    return f"{'command ' if last.why else ''}exit {last.attempt.exit_status}"


def run_json(run: PastRun, *, in_full: bool = False) -> str:
    """Return a run as one line of JSON.

    Args:
        run: the run.
        in_full: whether each failure is included as the contract's object.
    """
    return json_line(run_dict(run, in_full=in_full))


def run_dict(run: PastRun, *, in_full: bool = False) -> dict[str, Any]:
    """Return a run as an object with masked texts."""
    row = {
        "schema": SCHEMA,
        "run": run.number,
        "session": run.session,
        "began_at": _utc(run.began_at),
        "seconds": None if run.seconds is None else round(run.seconds, 3),
        "result": run.result,
        "exit_status": run.attempts[-1].attempt.exit_status,
        "command": masked(list(run.command)),
        "folder": masked(run.folder),
        "engine": run.engine,
        "engine_version": run.engine_version,
        "model": masked(run.model),
        "device": run.device,
        "who": masked(run.who),
        "host": masked(run.host),
        "forgotten": run.is_forgotten,
    }
    attempts = [_attempt_dict(past, in_full=in_full) for past in run.attempts]
    answer: dict[str, Any] = plain_value(row)
    return answer | {"attempts": attempts}


def _attempt_dict(past: PastAttempt, *, in_full: bool) -> dict[str, Any]:
    incident = past.attempt.incident
    row = attempt_dict(past.attempt) | {
        "began_at": _utc(past.began_at),
        "ended_at": None if past.ended_at is None else _utc(past.ended_at),
        "result": past.result,
        "error": masked(past.attempt.error),
        "cause": incident.causes[0].id if incident is not None and incident.causes else None,
        "predicted": plain_value(past.predicted),
    }
    if past.ended_at is None:
        row["seconds"] = None
    return row | ({"incident": incident and incident_dict(incident)} if in_full else {})


def _heading(run: PastRun) -> list[tuple[str, str]]:
    if run.seconds is not None:
        length = f", took {took(run)}"
    else:
        length = ""
    engine = " ".join(filter(None, (run.engine, run.engine_version)))
    rows = [
        ("command", shown_command(run)),
        ("folder", run.folder or _NOT_RECORDED),
        ("began", f"{moment(run.began_at)}{length}"),
        ("engine", engine or "unknown"),
        ("model", run.model or "unknown"),
        ("device", run.device or "unknown"),
    ]
    return drawn(rows)


def _utc(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")


# More names would make the column wider than the settings.
_MOST_NAMED: Final = 3


def print_known_settings(console: Console, entries: Sequence[KnownSettings]) -> None:
    """Print one row for each entry, in the given order."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("held", justify="right", no_wrap=True)
    table.add_column("model, engine, device")
    table.add_column("settings")
    table.add_column("measured by, last")
    for entry in map(drawn, entries):
        engine = " ".join(filter(None, (entry.engine, entry.engine_version)))
        lines = [Text(entry.model or "model unknown", style="bold"), Text(engine)]
        what = Text("\n").join([*lines, Text(entry.device or "GPU unknown")])
        settings = (
            "\n".join(f"{name} {value}" for name, value in entry.settings.items()) or "as given"
        )
        if not entry.failed:
            style = "green"
        elif not entry.held:
            style = "bold red"
        else:
            style = "yellow"
        held = Text(f"{entry.held} of {entry.held + entry.failed}", style=style)
        table.add_row(
            held, what, Text(settings), Text(f"{_measured_by(entry)}\n{moment(entry.last_at)}")
        )
    console.print()
    console.print(Padding(table, (0, 1)))
    console.print()


def known_settings_json(entry: KnownSettings) -> str:
    """Return one entry as a line of JSON, with masked texts."""
    row = {
        "schema": SCHEMA,
        "model": masked(entry.model),
        "engine": entry.engine,
        "engine_version": entry.engine_version,
        "device": entry.device,
        "settings": plain_value(masked(dict(entry.settings))),
        "held": entry.held,
        "failed": entry.failed,
        "measured_by": [
            {"who": masked(who), "host": masked(host), "attempts": count}
            for who, host, count in entry.measured_by
        ],
        "first_at": _utc(entry.first_at),
        "last_at": _utc(entry.last_at),
    }
    return json_line(row)


def person(who: str | None, host: str | None) -> str:
    """Return a user and host as ``user@host``."""
    return "@".join(filter(None, (who, host))) or "not recorded"


def _measured_by(entry: KnownSettings) -> str:
    names = [f"{person(who, host)} {count}" for who, host, count in entry.measured_by]
    more = len(names) - _MOST_NAMED
    return "\n".join([*names[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])
