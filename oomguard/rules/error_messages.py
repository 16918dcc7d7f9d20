"""Find a well-known error message by its text, even with other numbers or only a part of it."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

_FILE: Final = Path(__file__).with_name("error_messages.toml")
# Exit status 137 and Windows' error 1455 name a failure; any other number is an example.
_NUMBER: Final = re.compile(r"(?!(?:137|1455)\b)\d+(?:[.,]\d+)*")
_WORD: Final = re.compile(r"[a-z_#][\w#./-]*[\w#]|#")
_CLASS: Final = re.compile(r"(?:[\w.]+\.)?\w*(?:error|exception): ")
_QUOTES: Final = str.maketrans(dict.fromkeys("`'\"\u2018\u2019\u201c\u201d*", ""))
# A shorter text fits too many messages.
_LEAST_LETTERS: Final = 5
# The share of a text's words, rare ones weighted more, that a message must have.
_LEAST_SHARE: Final = 0.6
_LEAST_WORDS: Final = 3
_MOST_FOUND: Final = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """Name one group of messages, in the order of a start and of a run."""

    id: str
    title: str


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """Explain one message that programs print when memory runs out.

    Attributes:
        text: the message; its numbers are examples.
        program: who prints it.
        phase: the id of its group.
        meaning: what it means.
        do: what to do first.
        command: the text to paste; "" if nothing can be pasted.
        kind: the kind that oomguard gives for the text alone; "" if it is no failure alone.
        rule: the code of the rule of its likeliest cause; "" without a kind.
        also: other wordings of the same failure.
    """

    text: str
    program: str
    phase: str
    meaning: str
    do: str
    command: str = ""
    kind: str = ""
    rule: str = ""
    also: tuple[str, ...] = ()


@cache
def phases() -> tuple[Phase, ...]:
    """Return the groups of messages in order."""
    return tuple(Phase(**row) for row in _table()["phase"])


@cache
def error_messages() -> tuple[ErrorMessage, ...]:
    """Return all messages, in the order of their phases."""
    rows = []
    for row in _table()["message"]:
        rows.append(ErrorMessage(**row | {"also": tuple(row.get("also", ()))}))
    order = [phase.id for phase in phases()]
    return tuple(sorted(rows, key=lambda row: order.index(row.phase)))


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def normalized(text: str) -> str:
    """Return a text for comparison: small letters, no quotes, ``#`` for each number.

    >>> normalized("Tried to allocate `2.00 GiB`")
    'tried to allocate # gib'
    """
    return " ".join(_NUMBER.sub("#", text.translate(_QUOTES).lower()).split())


def find_error_messages(text: str) -> list[ErrorMessage]:
    """Return the messages that a text may be, the likeliest first; empty if there is none.

    Args:
        text: a message or a part of it, with any numbers and any log prefix.
    """
    wanted = normalized(text)
    if sum(map(str.isalpha, wanted)) < _LEAST_LETTERS:
        return []
    ranked: list[tuple[tuple[float, ...], ErrorMessage]] = []
    for message in error_messages():
        best = max(_likeness(wanted, normalized(one)) for one in (message.text, *message.also))
        if best[0] > 0:
            ranked.append((best, message))
    ranked.sort(key=lambda pair: pair[0], reverse=True)
    return [message for _, message in ranked[:_MOST_FOUND]]


def _likeness(wanted: str, known: str) -> tuple[float, float]:
    """Return how alike two normalized texts are: a rank, then a number to order equal ranks."""
    if wanted == known:
        return 4.0, 0.0
    # A line of a log, or more; the longest message fits best.
    if known.rstrip(".") in wanted:
        return 3.0, float(len(known))
    part = wanted.rstrip(".")
    if known.startswith(part) or _CLASS.sub("", known, count=1).startswith(part):
        # The text begins a message; the shortest one adds the least to it.
        return 2.5, -float(len(known))
    # The text is part of a message; the shortest one adds the least to it.
    if part in known:
        return 2.0, -float(len(known))
    weights = _weights()
    words = set(_WORD.findall(wanted))
    shared = words & set(_WORD.findall(known))
    total = sum(weights.get(word, _rarest()) for word in words)
    share = sum(weights[word] for word in shared) / total if total else 0.0
    if len(shared) < _LEAST_WORDS or share < _LEAST_SHARE:
        return 0.0, 0.0
    return 1.0, share


@cache
def _weights() -> dict[str, float]:
    """Return the weight of each word: rare words say more."""
    texts = []
    for message in error_messages():
        for one in (message.text, *message.also):
            texts.append(set(_WORD.findall(normalized(one))))
    counts = Counter(chain.from_iterable(texts))
    return {word: math.log(1 + len(texts) / count) for word, count in counts.items()}


def _rarest() -> float:
    return math.log(1 + len(error_messages()))
