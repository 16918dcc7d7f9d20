"""What tells that somebody tells a failure in a sentence of a report: the words of rules/lexicon.toml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomguard.rules.table import Table

_ONE = ("phrase", "line", "report", "document", "note", "form")
_MANY = ("tells", "denies")


@dataclass(frozen=True, slots=True)
class AccountWords:
    """What tells that a sentence of a report tells a failure.

    Attributes:
        phrase: what people call it.
        line: a line that no person wrote as a sentence: a log's, a command's, a quotation's.
        tells: sentences that tell it as something that happened, a null character in the phrase's place; one is enough.
        denies: sentences that suppose it, deny it, advise on it or tell how it was solved; one is enough against it.
        report: that somebody reports or asks.
        form: the fields of a tracker's form for reports.
        document: that the text is a change to code, a page or a request: it tells no failure.
        note: the same, but where a tracker's form for reports is filled in.
        certainty_ratio: how sure it is that such a sentence tells a failure.
    """

    phrase: Any
    line: Any
    tells: tuple[Any, ...]
    denies: tuple[Any, ...]
    report: Any
    form: Any
    document: Any
    note: Any
    certainty_ratio: float


def read_account(row: Table, make: Callable[[str, str], Any]) -> AccountWords:
    """Read the table of an account; ``make`` turns a pattern's text and its key into a pattern."""
    many = {name: tuple(make(text, name) for text in row.get(name)) for name in _MANY}
    return AccountWords(
        **{name: make(row.get(name), name) for name in _ONE}, **many, certainty_ratio=float(row.get("certainty_ratio"))
    )
