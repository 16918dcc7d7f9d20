"""The words of failing for memory, weighed: how a message is told whose wording no signature has.

The weights are fitted by benchmarks/fit_lexicon.py and are never edited by hand; those of words lie in a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oomguard.kinds import KINDS
from oomguard.rules.account import AccountWords, read_account
from oomguard.rules.table import Table
from oomguard.rules.word_weights import WordWeights

# Where a feature is looked for: observe/new_wording.py says what each part is.
PARTS: Final = ("line", "before", "behind", "raw", "above", "below", "around", "phrase", "in_place", "amid")


@dataclass(frozen=True, slots=True)
class Feature:
    """A sign for or against a failure: what is looked for in a part of the text, and its weight (log odds)."""

    name: str
    pattern: Any
    part: str
    weight: float


@dataclass(frozen=True, slots=True)
class TitleWords:
    """What tells that the title of a report tells a failure.

    Attributes:
        phrase: what a title calls it.
        harmless: words of a title that asks for something, or tells of something else.
        change: words of a title that tells a change; it tells a failure only above frames.
        frames: what only a failed run prints; below it a line without a tracker's marks is a title too.
        run: what a run prints, or who reports one says; enough below a title that a tracker marked.
        other_error: the body tells another error.
        certainty_ratio: how sure it is that such a title tells a failure.
    """

    phrase: Any
    harmless: Any
    change: Any
    frames: Any
    run: Any
    other_error: Any
    certainty_ratio: float


@dataclass(frozen=True, slots=True)
class Lexicon:
    """What tells a message of a new wording.

    Attributes:
        anchors: literals in lower case; a line without any of them is not looked at.
        phrases: what speaks of memory that is short, whether or not anything failed.
        harmless: what is known to speak of memory without a failure, or of other memory: a part of the text, and a pattern on it.
        features: the signs, weighed.
        bias: log odds of a phrase without any sign.
        least_ratio: the least certainty with which a message is taken for a failure.
        kinds: what the nearest kind is told by, the first that is found.
        clauses: what sizes are read by.
        classes: the kind of each word that has one, for the order of kinds on a line.
        words: the weights of words, pairs and orders; None where the file names none.
        title: what tells that a report's title tells the failure; None where the file says nothing of titles.
        account: what tells that a sentence of a report tells it; None where the file says nothing of sentences.
    """

    anchors: tuple[str, ...]
    phrases: tuple[Any, ...]
    harmless: tuple[tuple[str, Any], ...]
    features: tuple[Feature, ...]
    bias: float
    least_ratio: float
    kinds: tuple[tuple[str, Any], ...]
    clauses: tuple[Any, ...]
    classes: Mapping[str, str] = field(default_factory=dict)
    words: WordWeights | None = None
    title: TitleWords | None = None
    account: AccountWords | None = None

    def check_words(self) -> None:
        """Read the weights of words now; raises RuleError for a file that cannot be used."""
        if self.words is not None:
            self.words.odds(())


def read_lexicon(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> Lexicon:
    """Read the file of the lexicon; ``make`` turns a pattern's text into a pattern. Raises RuleError for a mistake in it."""
    table = Table(raw, path, "", "lexicon")

    def pattern(row: Table, name: str = "pattern") -> Any:
        key = ".".join(part for part in (row.key, name) if part)
        return make(row.get(name), path=str(path), key=key)

    others = [make(text, path=str(path), key="other_phrases") for text in table.get("other_phrases", ())]
    return Lexicon(
        anchors=tuple(table.get("anchors")),
        phrases=(pattern(table, "phrase"), *others),
        harmless=tuple(
            (row.choice("part", PARTS, "line"), pattern(row)) for row in table.tables("harmless", "harmless")
        ),
        features=tuple(
            Feature(row.get("name"), pattern(row), row.choice("part", PARTS), float(row.get("weight", 0.0)))
            for row in table.tables("feature", "feature")
        ),
        bias=float(table.get("bias")),
        least_ratio=float(table.get("least_ratio")),
        kinds=tuple((row.choice("kind", KINDS), pattern(row)) for row in table.tables("nearest", "nearest")),
        clauses=tuple(pattern(row) for row in table.tables("clause", "clause")),
        classes={word: row.get("name") for row in table.tables("class", "class") for word in row.get("words").split()},
        words=_words(table),
        title=next((_title(row, pattern) for row in table.tables("title", "title")), None),
        account=next((_account(row, path, make) for row in table.tables("account", "account")), None),
    )


def _words(table: Table) -> WordWeights | None:
    name = table.get("words")
    if name is None:
        return None
    if Path(name).name != name:
        raise table.error("expected the name of a file beside this one", "words")
    return WordWeights(table.path.with_name(name))


def _title(row: Table, pattern: Callable[[Table, str], Any]) -> TitleWords:
    parts = {name: pattern(row, name) for name in ("phrase", "harmless", "change", "frames", "run", "other_error")}
    return TitleWords(**parts, certainty_ratio=float(row.get("certainty_ratio")))


def _account(row: Table, path: Path, make: Callable[..., Any]) -> AccountWords:
    return read_account(row, lambda text, name: make(text, path=str(path), key=".".join(filter(None, (row.key, name)))))
