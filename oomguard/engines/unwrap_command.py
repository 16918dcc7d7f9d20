"""Find the commands that a command line finally runs, and change their words.

The commands may be behind wrappers, Python, or a shell's text.
``env X=1 timeout 60 bash -c 'exec uv run vllm serve m'`` runs ``vllm`` with the arguments ``serve
m``. A change replaces these words in their place; the words around them stay unchanged.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Final

from oomguard.core.files import read_tables

# Only plain lists of simple commands are read. If a shell text contains anything else
# (substitutions, loops, functions, here-documents), it stays unread. Then nothing in it is changed,
# and oomguard reaches the program in another way.

_SEPARATORS: Final = re.compile(r"&&|\|\||;|\||&|\n")
_REDIRECTION: Final = re.compile(r"\d*(?:>>|>\||>&|<&|<>|&>>|&>|>|<)")
_BLANK: Final = re.compile(r"(?:[ \t]|\\\n)+")
_PLAIN: Final = re.compile(r"[^ \t\n'\"\\$`;&|<>(){}*?\[\]~#!]+")
_EXPANDED: Final = re.compile(r"\$(?:\{\w+\}|\w+|[@*#?])")
# The characters that a backslash escapes in double quotes.
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
    """A word that only the shell knows, because it expands something; the text is its source."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ShellWord:
    """One word of a shell's text, with its value and position.

    If the shell expands something in it, the value is ``Unread``.
    """

    value: str
    start: int
    end: int


class _NotPlainError(Exception):
    """The text contains more than simple commands."""


def simple_commands(text: str) -> list[list[ShellWord]]:
    """Return the words of each simple command in a shell's text, without redirections.

    Empty if the text cannot be read.
    """
    try:
        # An empty line, or `;;`, has no words.
        return list(filter(None, _commands(text)))
    except _NotPlainError:
        return []


def _commands(text: str) -> list[list[ShellWord]]:
    commands: list[list[ShellWord]] = [[]]
    at = 0
    redirected = False
    while at < len(text):
        if blank := _BLANK.match(text, at):
            at = blank.end()
        elif redirection := _REDIRECTION.match(text, at):
            at = redirection.end()
            redirected = True
            # In a here-document no word shows where the text continues.
            if text.startswith("<", at):
                raise _NotPlainError
        elif separator := _SEPARATORS.match(text, at):
            at = separator.end()
            redirected = False
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
    """Read one word without quotes and backslashes; a word with an expansion stays as written."""
    parts: list[str] = []
    at = start
    expands = False
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
        elif text[at] == "\\":
            # A last backslash is literal.
            parts.append(text[at])
            at += 1
        elif expanded := _EXPANDED.match(text, at):
            at = expanded.end()
            expands = True
        elif text[at] in "()`$" or (text[at] == "#" and at == start):
            raise _NotPlainError
        else:
            # A glob, a home folder or braces, which the shell expands.
            expands = expands or text[at] not in "#]!"
            parts.append(text[at])
            at += 1
    value = Unread(text[start:at]) if expands else "".join(parts)
    return ShellWord(value, start, at)


def _quoted(text: str, at: int) -> tuple[str, int, bool]:
    """Return a double-quoted text, the index after it, and whether it contains an expansion."""
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


_FILE: Final = Path(__file__).with_name("wrappers.toml")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON: Final = re.compile(r"(?:python|pypy)[\d.]*")
_MOST_DEEP: Final = 12


@dataclass(frozen=True, slots=True)
class Edit:
    """Words that replace those from ``start`` up to ``end``, or are inserted if both are equal."""

    start: int
    end: int
    words: tuple[str, ...]


Change = Callable[[Sequence[Edit]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class InnerCommand:
    """One command that a command line runs.

    Attributes:
        program: the program's name without its folder, a Python file's name without its suffix, or
            ``module:NAME``.
        args: its arguments.
        change: returns the whole command line with edits of ``args``; edits are in order and do not
            overlap.
        variables: variables that wrappers set; None for one that they unset.
        set_variables: returns the whole command line with variables set as close to the program as
            possible. None if no wrapper can set any.
        without: for each variable, a function that removes its assignments.
        has_no_others: whether a wrapper hides all inherited variables.
        is_elsewhere: whether it may run in another folder.
    """

    program: str
    args: tuple[str, ...]
    change: Change
    variables: Mapping[str, str | None] = field(default_factory=dict)
    set_variables: Callable[[Mapping[str, str]], tuple[str, ...]] | None = None
    without: Mapping[str, Callable[[], tuple[str, ...]]] = field(default_factory=dict)
    has_no_others: bool = False
    is_elsewhere: bool = False

    @property
    def has_unread(self) -> bool:
        """Whether the shell expands one of its arguments, possibly into several words."""
        return any(isinstance(word, Unread) for word in self.args)


def replaced(words: Sequence[str], edits: Sequence[Edit]) -> tuple[str, ...]:
    """Return the words after the edits."""
    found = list(words)
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        found[edit.start : edit.end] = edit.words
    return tuple(found)


@functools.cache
def _tables() -> Mapping[str, Any]:
    return next(iter(read_tables("wrappers", [_FILE]).values()))


def environment_tools() -> frozenset[str]:
    """Return the wrappers that run a command in an environment of their own choice."""
    return frozenset(_tables()["environments"]["names"])


def inner_commands(argv: Sequence[str]) -> tuple[InnerCommand, ...]:
    """Return the commands that a command line finally runs, one or those of a shell's text."""
    whole = InnerCommand("", tuple(argv), functools.partial(replaced, tuple(argv)))
    return tuple(_opened(whole, 0))


def _opened(command: InnerCommand, deep: int) -> Iterator[InnerCommand]:
    """Unwrap a command whose first argument is its program, until no wrapper is left."""
    if not command.args or deep > _MOST_DEEP:
        return
    name = PurePath(command.args[0]).name
    if isinstance(command.args[0], Unread):
        return
    table = _tables()
    if name in table["shells"]["names"]:
        inside = list(_in_shell(command, table["shells"]))
        for one in inside:
            yield from _opened(one, deep + 1)
        if not inside:
            yield replace(_behind(command, 1), program=name)
    elif _PYTHON.fullmatch(name):
        yield from _in_python(command, 1, deep)
    elif name in table and name not in {"modules", "shells", "python", "environments"}:
        yield from _in_wrapper(command, 1, table[name], name, deep)
    else:
        yield replace(_behind(command, 1), program=name.removesuffix(".py"))


def _behind(command: InnerCommand, start: int) -> InnerCommand:
    """Return the command whose arguments begin at ``start`` of this one's."""

    def change(edits: Sequence[Edit]) -> tuple[str, ...]:
        return command.change([Edit(e.start + start, e.end + start, e.words) for e in edits])

    return replace(command, args=command.args[start:], change=change)


def _in_python(command: InnerCommand, at: int, deep: int) -> Iterator[InnerCommand]:
    """Unwrap what a Python interpreter runs: a file or a module."""
    own = _tables()["python"]
    args = command.args
    while at < len(args) and args[at].startswith("-") and args[at] != "-":
        word = args[at]
        if word == "-m" and at + 1 < len(args):
            yield from _module(command, at + 1, args[at + 1], deep)
            return
        if word in own["values"]:
            at += 2
        elif set(word[1:]) <= set(own["letters"]) or (
            word.startswith(("-W", "-X")) and len(word) > 2
        ):
            at += 1
        else:
            # Text after `-c`, or an option that may take a value, cannot be read.
            break
    script = at < len(args) and not args[at].startswith("-")
    if script:
        name = PurePath(args[at]).name.removesuffix(".py")
    else:
        name = "python"
    yield replace(_behind(command, at + 1 if script else at), program=name)


def _module(command: InnerCommand, at: int, name: str, deep: int) -> Iterator[InnerCommand]:
    wrapper = _tables()["modules"].get(name)
    if wrapper is None:
        yield replace(_behind(command, at + 1), program=f"module:{name}")
        return
    command_of, *within = wrapper.split()
    table = _tables()[command_of]
    # The module is the subcommand itself.
    if within:
        table = {**table, "subcommand": []}
    yield from _in_wrapper(command, at + 1, table, name, deep)


def _in_wrapper(
    command: InnerCommand, at: int, table: Mapping[str, Any], name: str, deep: int
) -> Iterator[InnerCommand]:
    """Unwrap the command after a wrapper's options.

    If an option is unknown, the wrapper itself is the command.
    """
    args = command.args
    first = at
    closed = replace(_behind(command, first), program=name)
    subcommand = table.get("subcommand", [])
    if list(args[at : at + len(subcommand)]) != subcommand:
        yield closed
        return
    at += len(subcommand)
    variables = dict(command.variables)
    clears = command.has_no_others
    elsewhere = command.is_elsewhere
    while at < len(args) and args[at].startswith("-") and args[at] != "--":
        word = args[at]
        taken = 1
        option, value = _option(word, table)
        if option in table.get("module", ()) and (value or at + 1 < len(args)):
            yield from _module(command, at if value else at + 1, value or args[at + 1], deep)
            return
        if option in table.get("values", ()):
            taken, value = (
                (1, value) if value is not None else (2, args[at + 1] if at + 1 < len(args) else "")
            )
        elif option not in table.get("switches", ()) and not (
            name == "nice" and re.fullmatch(r"-\d+", word)
        ):
            yield closed
            return
        if option in table.get("unsets", ()) and value is not None:
            variables[value] = None
        clears = clears or option in table.get("clears", ())
        elsewhere = elsewhere or option in table.get("folder", ())
        at += taken
    at += at < len(args) and args[at] == "--"
    setter = command.set_variables
    without = command.without
    if table.get("assignments"):
        begin = at
        while at < len(args) and (found := _ASSIGNMENT.fullmatch(args[at])):
            variables[found.group(1)] = found.group(2)
            at += 1
        without = {**without, **_without(command.change, args[begin:at], begin)}
        setter = functools.partial(_assigned, command.change, at)
    at += table.get("operands", 0)
    inner = replace(
        _behind(command, at),
        variables=variables,
        set_variables=setter,
        without=without,
        has_no_others=clears,
        is_elsewhere=elsewhere,
    )
    if table.get("scripts") and inner.args and not isinstance(inner.args[0], Unread):
        yield replace(_behind(inner, 1), program=PurePath(inner.args[0]).name.removesuffix(".py"))
    else:
        yield from _opened(inner, deep + 1)


def _option(word: str, table: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return an option with its joined value; None if the value is the next word."""
    if word.startswith("--"):
        option, equals, value = word.partition("=")
        return option, value if equals else None
    if len(word) > 2 and word[:2] in table.get("values", ()):
        return word[:2], word[2:]
    return word, None


def _assigned(change: Change, at: int, variables: Mapping[str, str]) -> tuple[str, ...]:
    return change([Edit(at, at, tuple(f"{name}={value}" for name, value in variables.items()))])


def _without(
    change: Change, words: Sequence[str], begin: int
) -> dict[str, Callable[[], tuple[str, ...]]]:
    """Return a function for each variable that removes its assignments in the words."""
    places: dict[str, list[Edit]] = {}
    for at, word in enumerate(words, begin):
        if found := _ASSIGNMENT.fullmatch(word):
            places.setdefault(found.group(1), []).append(Edit(at, at + 1, ()))
    return {name: functools.partial(change, edits) for name, edits in places.items()}


def _in_shell(command: InnerCommand, table: Mapping[str, Any]) -> Iterator[InnerCommand]:
    """Return the simple commands in the text that a shell runs.

    Empty if the shell runs a file, or if the text cannot be read.
    """
    at = 1
    args = command.args
    while at < len(args) and args[at].startswith("-"):
        word = args[at]
        if re.fullmatch(r"-[a-z]*c", word) and at + 1 < len(args):
            yield from _in_text(command, at + 1)
            return
        if (
            word not in table["switches"]
            and not re.fullmatch(r"-[a-z]+", word)
            and word not in table["values"]
        ):
            return
        if word in table["values"]:
            at += 2
        else:
            at += 1


def _in_text(command: InnerCommand, index: int) -> Iterator[InnerCommand]:
    text = command.args[index]
    moved = command.is_elsewhere
    variables = dict(command.variables)
    if isinstance(text, Unread):
        return
    for words in simple_commands(text):
        values = tuple(word.value for word in words)
        first = 0
        while first < len(values) and _is_assignment(values[first]):
            first += 1
        # Assignments alone, or after `export`, last for the commands that follow.
        if first == len(values) or values[0] == "export":
            variables |= _assignments(values)
            continue
        found = _assignments(values[:first])
        moved = moved or values[0] in {"cd", "pushd"}
        change = functools.partial(_changed_text, command.change, index, text, tuple(words))
        setter = functools.partial(_assigned, change, first)
        without = {**command.without, **_without(change, values[:first], 0)}
        given = {**variables, **found}
        inner = InnerCommand(
            "", values, change, given, setter, without, command.has_no_others, moved
        )
        yield _behind(inner, first)


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that words assign; other words are skipped."""
    found: dict[str, str] = {}
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is not None:
            found[match.group(1)] = match.group(2)
    return found


def _is_assignment(value: str) -> bool:
    return not isinstance(value, Unread) and _ASSIGNMENT.fullmatch(value) is not None


def _written(word: str) -> str:
    """Return a word as a shell reads it; in an assignment only the value may be quoted."""
    found = _ASSIGNMENT.fullmatch(word)
    if found is None:
        return shlex.quote(word)
    return f"{found.group(1)}={shlex.quote(found.group(2))}"


def _changed_text(
    change: Change, index: int, text: str, words: tuple[ShellWord, ...], edits: Sequence[Edit]
) -> tuple[str, ...]:
    """Change words of a shell's text, and leave the rest of the text as it is."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        new = " ".join(map(_written, edit.words))
        if edit.start < edit.end:
            start = words[edit.start].start
            end = words[edit.end - 1].end
            # The space before removed words goes with them.
            if not edit.words and edit.start:
                start = words[edit.start - 1].end
            elif not edit.words and edit.end < len(words):
                end = words[edit.end].start
        elif edit.start < len(words):
            start = end = words[edit.start].start
            if new:
                new = f"{new} "
            else:
                new = ""
        else:
            start = end = words[-1].end
            if new:
                new = f" {new}"
            else:
                new = ""
        text = text[:start] + new + text[end:]
    return change([Edit(index, index + 1, (text,))])
