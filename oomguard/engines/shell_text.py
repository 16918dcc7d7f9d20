"""The commands in a shell's text: what ``bash -c TEXT`` runs, told word by word, and where each word stands.

Only plain lists of simple commands are read. Whatever else a shell knows (substitutions, loops, functions, here-documents) makes
the text unread: then nothing in it is changed, and the program is reached in another way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SEPARATORS: Final = re.compile(r"&&|\|\||;|\||&|\n")
_REDIRECTION: Final = re.compile(r"\d*(?:>>|>\||>&|<&|<>|&>>|&>|>|<)")
_BLANK: Final = re.compile(r"(?:[ \t]|\\\n)+")
_PLAIN: Final = re.compile(r"[^ \t\n'\"\\$`;&|<>(){}*?\[\]~#!]+")
_EXPANDED: Final = re.compile(r"\$(?:\{\w+\}|\w+|[@*#?])")
# What a double-quoted text escapes with a backslash.
_ESCAPED_IN_QUOTES: Final = '$`"\\\n'
_RESERVED: Final = frozenset(
    {
        "if",
        "then",
        "elif",
        "else",
        "fi",
        "for",
        "in",
        "do",
        "done",
        "while",
        "until",
        "case",
        "esac",
        "function",
        "select",
    }
    | {"time", "[[", "]]", "{", "}", "!", "coproc"}
)


class Unread(str):
    """A word that only the shell knows, since it expands something; the text is how it is written."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ShellWord:
    """One word, what the shell makes of it (``Unread``: as it is written), and where it stands in the text."""

    value: str
    start: int
    end: int


class _NotPlainError(Exception):
    """The text is more than a list of simple commands."""


def simple_commands(text: str) -> list[list[ShellWord]]:
    """Return the words of each simple command in a shell's text, without redirections; empty where it is not read."""
    try:
        return [words for words in _commands(text) if words]
    except _NotPlainError:
        return []


def _commands(text: str) -> list[list[ShellWord]]:
    commands: list[list[ShellWord]] = [[]]
    at, redirected = 0, False
    while at < len(text):
        if blank := _BLANK.match(text, at):
            at = blank.end()
        elif redirection := _REDIRECTION.match(text, at):
            at, redirected = redirection.end(), True
            if text.startswith("<", at):  # a here-document: the text goes on where no word tells it
                raise _NotPlainError
        elif separator := _SEPARATORS.match(text, at):
            at, redirected = separator.end(), False
            commands.append([])
        else:
            word = _word(text, at)
            at = word.end
            if redirected:
                redirected = False
                continue
            if not commands[-1] and word.value in _RESERVED:
                raise _NotPlainError
            commands[-1].append(word)
    return commands


def _word(text: str, start: int) -> ShellWord:
    """Read one word; quotes and backslashes go, what expands leaves it as it is written."""
    parts: list[str] = []
    at, expands = start, False
    while at < len(text) and text[at] not in " \t\n;&|<>":
        if plain := _PLAIN.match(text, at):
            parts.append(plain.group())
            at = plain.end()
        elif text[at] == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise _NotPlainError
            parts.append(text[at + 1 : end])
            at = end + 1
        elif text[at] == '"':
            inside, at, some = _quoted(text, at + 1)
            parts.append(inside)
            expands = expands or some
        elif text[at] == "\\" and at + 1 < len(text):
            parts.append("" if text[at + 1] == "\n" else text[at + 1])
            at += 2
        elif text[at] == "\\":  # the last character stands for itself
            parts.append(text[at])
            at += 1
        elif expanded := _EXPANDED.match(text, at):
            at, expands = expanded.end(), True
        elif text[at] in "()`$" or (text[at] == "#" and at == start):
            raise _NotPlainError
        else:  # a pattern of names, a home folder, braces
            expands = expands or text[at] not in "#]!"
            parts.append(text[at])
            at += 1
    value = Unread(text[start:at]) if expands else "".join(parts)
    return ShellWord(value, start, at)


def _quoted(text: str, at: int) -> tuple[str, int, bool]:
    """Return a double-quoted text from behind its quote, where it ends, and whether the shell expands something in it."""
    inside: list[str] = []
    expands = False
    while at < len(text) and text[at] != '"':
        expanded = _EXPANDED.match(text, at)
        if text[at] == "`" or (expanded is None and text.startswith(("$(", "${"), at)):
            raise _NotPlainError
        if text[at] == "\\" and text[at + 1 : at + 2] in tuple(_ESCAPED_IN_QUOTES):
            inside.append("" if text[at + 1] == "\n" else text[at + 1])
            at += 2
            continue
        expands = expands or expanded is not None
        inside.append(text[at])
        at += 1
    if at >= len(text):
        raise _NotPlainError
    return "".join(inside), at + 1, expands
