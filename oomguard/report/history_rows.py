"""Many past runs summed up as rows of texts: by command, by what was changed, predicted beside measured."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from oomguard.past_runs import FAILED, NOT_ENDED, RAN, REPAIRED, STOPPED, PastRun
from oomguard.report.attempts import LABELS, figure
from oomguard.report.history import happened, moment, shown_command, status_words, took
from oomguard.report.presentable import drawn
from oomguard.report.wording import arrow

Rows = list[tuple[str, ...]]
_MOST_CAUSES: Final = 3
_ENDS: Final = (FAILED, REPAIRED, RAN, STOPPED, NOT_ENDED)
_THEN: Final = (RAN, FAILED, STOPPED, NOT_ENDED)
_SELDOM: Final = (STOPPED, NOT_ENDED)


def command_rows(runs: Iterable[PastRun]) -> Rows:
    """Return a row a command, the ones that failed most first, headings first."""
    by_command: dict[tuple[str, ...], list[PastRun]] = {}
    for run in runs:
        by_command.setdefault(run.command, []).append(run)
    rows = []
    for same in by_command.values():
        counts = Counter(run.result for run in same)
        causes = Counter(i.causes[0].id if i.causes else "unknown" for run in same for i in run.incidents)
        most = "\n".join(f"{cause} {times}" for cause, times in causes.most_common(_MOST_CAUSES))
        numbers = (len(same), *(counts[result] for result in _ENDS))
        rows.append((numbers, (shown_command(same[0]), *(f"{n:,}" for n in numbers), most, moment(same[0].began_at))))
    rows.sort(key=lambda row: (-row[0][1], -row[0][2], -row[0][0], row[1][0]))
    headings = ("command", "runs", *_ENDS, "causes", "last")
    return _without_zeros([headings, *(drawn(texts) for _numbers, texts in rows)])


def change_rows(runs: Iterable[PastRun]) -> Rows:
    """Return a row for each change that was made, the most frequent first: how often it ran and failed under it."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for run in runs:
        for past in run.attempts:
            for patch in past.attempt.patches:
                key = patch.setting, arrow(patch), str(patch.effect)
                counts.setdefault(key, Counter())[past.result] += 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
    rows = [(*key, f"{n.total():,}", *(f"{n[result]:,}" for result in _THEN)) for key, n in ordered]
    headings = ("setting", "change", "effect", "made", *(f"then {result}" for result in _THEN))
    return _without_zeros([headings, *drawn(rows)])


def _without_zeros(rows: Rows) -> Rows:
    """Leave out the columns of what seldom happens, where it did not."""
    headings, texts = rows[0], rows[1:]
    columns = [
        i for i, name in enumerate(headings) if not name.endswith(_SELDOM) or any(row[i] != "0" for row in texts)
    ]
    return [tuple(row[i] for i in columns) for row in rows]


def prediction_rows(runs: Iterable[PastRun], *, most: int) -> tuple[Rows, str]:
    """Return a row for each of the first ``most`` predictions, in the order of the runs, headings first, and a sentence on all."""
    rows: Rows = []
    errors, unmeasured = [], 0
    for run in runs:
        for past in run.attempts:
            for name, value in past.predicted.items():
                got = past.attempt.measured.get(name)
                unmeasured += got is None
                if got is None or name not in LABELS:
                    continue
                error = (got - value) / value if value else None
                if error is not None:
                    errors.append(abs(error))
                if len(rows) == most:
                    continue
                texts = (LABELS[name], figure(name, value), figure(name, got))
                rows.append((str(run.number), moment(run.began_at), *texts, "" if error is None else f"{error:+.1%}"))
    sentence = (
        f"Of {len(errors):,} predictions half are off by at most {statistics.median(errors):.1%}. " if errors else ""
    )
    if unmeasured:
        sentence += f"Of {unmeasured:,}{' more' if errors else ' predictions'} nothing was measured."
    return [("run", "began", "figure", "predicted", "measured", "measured beyond it"), *drawn(rows)], sentence.strip()


def run_rows(runs: Sequence[PastRun]) -> Rows:
    """Return a row a run, headings first."""
    rows = [
        (
            str(run.number),
            f"{moment(run.began_at)}\n{took(run)}",
            f"{run.result}\n{status_words(run)}",
            shown_command(run),
            "\n".join(happened(run)),
        )
        for run in runs
    ]
    return [("run", "began", "result", "command", "what failed, what was changed, predicted -> measured"), *rows]
