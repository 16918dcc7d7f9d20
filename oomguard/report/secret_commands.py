"""Secrets in the words of a command that no name tells: ``mysql -pSECRET``, ``curl -u user:SECRET``, ``wandb login SECRET``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Final

from oomguard.report.secret_data import Program, programs
from oomguard.report.secret_names import MASK, is_made, looks_made, secrecy

_WORD: Final = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"',\\]|\\(?![nrt]))+|\n""")
_ENDS: Final = frozenset({"|", "||", "&&", ";", "&", "\n"})
_USER_FLAGS: Final = ("-u", "--user", "--proxy-user", "--userpwd", "--login")
_LITERAL: Final = "--from-literal"  # kubectl create secret --from-literal=NAME=SECRET
_MAX_DEPTH: Final = 3
_GLUED_MIN_CHARS: Final = 5
# Behind a -p of any program: no path, no port, no option of one dash (-port, -python3), no name=value.
_NO_PASSWORD: Final = re.compile(
    r"[\d.:-]+(?:/(?:tcp|udp))?\Z|.*[=/\\:\[(]|(?:ort|ython|ath|refix|arallel|ix|rofile|roc|thread|rint|ackage|y\d)|[a-z_.,]+\Z|\*\*\*"
)
_PORT: Final = re.compile(r"\d{1,5}\Z")


def hide_in_text(text: str) -> str:
    """Hide such secrets in running text, where the words that can carry one stand."""
    return _hide(text, 0) if _carriers().search(text) else text


def kept_chars(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the index of each word that holds a secret, and how many of its characters stand before it."""
    program: Program | None = None
    begun = False  # whether the program's sub-command has come
    before = ""
    lists = False  # whether a flag of secrets has come last: vLLM's --api-key takes several
    for index, word in enumerate(words):
        if word in _ENDS:
            program = None
        elif (found := programs().get(word.rpartition("/")[2])) is not None:
            program, begun = found, found.after is None
        elif program is not None and word == program.after:
            begun = True
        else:
            kept = _by_program(program, before, word) if program is not None and begun else None
            kept = _by_flag(before, word) if kept is None else kept
            if word.startswith("-"):
                lists = secrecy(word) == "strong"
            elif lists and is_made(word):
                kept = 0
            if kept is not None and kept < len(word) and not word.startswith(MASK, kept):
                yield index, kept
        before = word


def _by_program(program: Program, before: str, word: str) -> int | None:
    if before in program.next:
        return 0
    if before in program.next_token and looks_made(word, 16):
        return 0
    for flag in program.pair:
        is_short = not flag.startswith("--")
        if before == flag or (is_short and re.fullmatch(rf"-[A-Za-z]{{1,8}}{flag[1]}", before)):  # -su is -s and -u
            start = 0
        elif is_short and word.startswith(flag):
            start = len(flag)
        else:
            continue
        if pair := re.search("[:%]", word[start:]):
            return start + pair.end()
    glued = [*program.glued, *(f"{flag}=" for flag in program.next)]
    return next((len(flag) for flag in glued if word.startswith(flag) and len(word) > len(flag)), None)


def _by_flag(before: str, word: str) -> int | None:
    """Return where the secret of a flag begins that means the same to most programs."""
    flag, equals, value = word.partition("=")
    if equals and flag in _USER_FLAGS:
        begin = _after_user(value)
        return None if begin is None else len(flag) + 1 + begin
    if before in _USER_FLAGS:
        return _after_user(word)
    if _LITERAL in {before, flag}:
        named = word if before == _LITERAL else value
        return len(word) - len(named) + named.index("=") + 1 if "=" in named else None
    if before.startswith("-pass") and word.startswith("pass:"):  # openssl's -passin pass:SECRET
        return len("pass:")
    body = word[2:]
    if word.startswith("-p") and len(body) >= _GLUED_MIN_CHARS and not _NO_PASSWORD.match(body):
        return 2
    return None


def _after_user(pair: str) -> int | None:
    """Return where the password of ``user:password`` begins; a uid and gid, a user and its group or a host and port have none."""
    user, colon, password = pair.partition(":")
    if not colon or not password or not user or password.startswith("//") or password == user or "/" in user:
        return None
    if _PORT.match(password) and (user.isdigit() or "." in user or user == "localhost"):
        return None
    return len(user) + 1


def _hide(text: str, depth: int) -> str:
    spans, words = [], []
    for found in _WORD.finditer(text):
        start, end = found.span()
        while start < end - 1 and text[start] in "[({":  # of a list of words
            start += 1
        while start < end - 1 and text[end - 1] in "])}":
            end -= 1
        if text[start] in "\"'" and end - start > 1 and text[end - 1] == text[start]:
            start, end = start + 1, end - 1
        body = text[start:end]
        end -= len(body) - len(body.rstrip("\\")) if body != "\n" else 0
        spans.append((start, end))
        words.append(text[start:end])
    hidden = dict(kept_chars(words))
    pieces, position = [], 0
    for index, (start, end) in enumerate(spans):
        if index in hidden:
            pieces += [text[position : start + hidden[index]], MASK]
            position = end
        elif depth < _MAX_DEPTH and " " in words[index]:  # a command in quotes
            pieces += [text[position:start], _hide(words[index], depth + 1)]
            position = end
    return "".join([*pieces, text[position:]])


@functools.cache
def _carriers() -> re.Pattern[str]:
    """Return the words without which no text holds such a secret."""
    named = "|".join(re.escape(name) for name in sorted(programs(), key=len, reverse=True))
    return re.compile(
        rf"-p[^\s\"',]|-u|--user|--proxy-user|--login|--from-literal|-(?:keys?|tokens?)[\"']?,?[ ]|(?:\b|\\[nrt])(?:{named})\b"
    )
