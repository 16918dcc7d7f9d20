"""The command of a past run as a line to paste: word for word what was given, but for secrets."""

from __future__ import annotations

import re
import shlex
from typing import Final

from oomguard.past_runs import PastRun
from oomguard.report.mask import HOME, homes_kept
from oomguard.report.presentable import drawn, masked
from oomguard.report.secret_names import MASK

# What a terminal does not show as it is: control characters, marks that turn the direction of text, bytes that are no UTF-8.
_UNSEEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ESCAPED: Final = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_paste(run: PastRun) -> tuple[str, list[str]]:
    """Return the command before any patch as a line to paste, and what to know before it is pasted."""
    with homes_kept():
        words = [_exact(word) for word in run.command]
    notes = []
    if any(MASK in word for word in words):
        notes.append(f"{MASK} stands for a secret or a prompt, which is not recorded: put it in")
    if any(map(_UNSEEN.search, words)):
        notes.append(
            "it holds characters that a terminal does not show, written as $'...', which bash, zsh and ksh read"
        )
    if run.folder is not None:
        with homes_kept():
            notes.append(f"it was started in {drawn(run.folder)}")
    elif any(word.startswith(f"{HOME}/") for word in words):
        notes.append(f"{HOME} stands for the home folder that it named, which is not recorded")
    return " ".join(map(_quoted, words)), notes


def _exact(word: str) -> str:
    """Return a word as it is, masked; without its escapes only where a secret is known by that alone."""
    exact, shown = masked(word), drawn(word)
    return exact if shown.count(MASK) <= exact.count(MASK) else shown


def _quoted(word: str) -> str:
    """Return a word for a shell, which reads a home folder outside quotes only."""
    begin = f"{HOME}/"
    if word.startswith(begin) and len(word) > len(begin):
        return begin + _quoted_rest(word[len(begin) :])
    return _quoted_rest(word)


def _quoted_rest(word: str) -> str:
    return "$'" + "".join(map(_escaped, word)) + "'" if _UNSEEN.search(word) else shlex.quote(word)


def _escaped(char: str) -> str:
    if _UNSEEN.match(char) and char not in _ESCAPED:
        is_byte = "\udc80" <= char <= "\udcff"
        raw = char.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
        return "".join(f"\\x{byte:02x}" for byte in raw)
    return _ESCAPED.get(char, char)
