"""Hide what a report must not carry: keys, tokens and passwords, text of prompts, and the names of home folders."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Final

from oomguard.report.secret_commands import hide_in_text, kept_chars
from oomguard.report.secret_names import MASK, NUMBER, PROMPT, PROMPT_IDS, looks_made, secrecy, tells
from oomguard.report.secret_scripts import hide_in_script, is_script
from oomguard.report.secret_shapes import hide_shapes
from oomguard.report.secret_yaml import hide_in_yaml
from oomguard.report.values import ValueSpan, value_at

HOME: Final = "~"
_MASKING: Final[ContextVar[bool]] = ContextVar("oomguard_masking", default=True)
_KEEPS_HOMES: Final[ContextVar[bool]] = ContextVar("oomguard_keeps_homes", default=False)
_MAX_PASSES: Final = 8
_NAME_CHARS: Final = 64
_PLAIN_CHARS: Final = 18  # the shortest token has 19
# Words that begin a sentence about a value; no value is one of them.
_PROSE: Final = frozenset({"not", "unknown", "known", "is", "was", "the", "no", "cannot", "must"})
_NO_TEXT: Final = frozenset({"none", "null", "true", "false"})
_HEADERS: Final = re.compile(r"(?i)(?:authorization|proxy-authorization|cookie|set-cookie)\Z")
_KEY: Final = re.compile(
    r"(?i)(?:(?<![\w\\-])|(?<=\\[nrt]))(?:"  # JSON inside a line writes a line break as two characters
    r"(?P<part>type\\*[\"']\s*:\s*\\*[\"']text\\*[\"']\s*,\s*\\*[\"']text)(?P<part_glue>\\*[\"']\s*:\s*)"
    r"|(?P<kube>name\\*[\"']?[ ]*[:=][ ]*\\*[\"']?(?P<variable>\w+)\\*[\"']?,?(?:\s|\\{1,8}[nrt])+\\*[\"']?value\\*[\"']?[ ]*[:=][ ]*)"
    r"|(?P<answer>generated response [^\s:]+(?: \([^)]*\))?: output: |\w*reqinput\([^'\"]{0,200}\btext=)"
    r"|(?P<name>generated text|-{0,2}[a-z_][\w-]*)(?P<glue>\\*[\"']?\]?[ \t]*[=:][ \t]*)"
    r"|(?P<flag>--?[a-z][\w-]*)(?P<space>\\*[\"']?,?[ \t]+(?!-))"
    r")"
)
_HOMES: Final = (
    # C:\Users\NAME and C:/Users/NAME, backslashes doubled or not; a name with spaces where a separator follows it
    re.compile(
        r"(?<![\w.~])[A-Za-z]:[\\/]+Users[\\/]+(?:[\w.-]+(?: [\w.-]+){1,3}(?=[\\/])|[^\\/\s\"'`:;,<>()|*?\[\]{}$]+)"
    ),
    # /home/NAME, /Users/NAME, also below a mount (/mnt/c/Users/NAME, /gpfs/home/NAME)
    re.compile(r"(?:(?<![\w.~/\\-])|(?<=file://))(?:/[\w.+-]+){0,3}?/(?:home|Users)/+[^\\/\s\"'`:;,<>()|*?\[\]{}$~]+"),
)


@contextmanager
def unmasked() -> Iterator[None]:
    """Turn masking off inside the ``with`` block, for this thread or task only."""
    token = _MASKING.set(False)
    try:
        yield
    finally:
        _MASKING.reset(token)


@contextmanager
def homes_kept() -> Iterator[None]:
    """Leave home folders inside the ``with`` block: for what is pasted into the user's own terminal, where ``~`` may stand in quotes."""
    token = _KEEPS_HOMES.set(True)
    try:
        yield
    finally:
        _KEEPS_HOMES.reset(token)


def is_masking() -> bool:
    """Return whether texts are masked in this thread or task."""
    return _MASKING.get()


def mask(text: str) -> str:
    """Replace secrets and prompts by ``***`` and home folders by ``~``; inside ``unmasked`` change nothing."""
    if not _MASKING.get() or _is_plain_word(text):
        return text
    if len(text) <= _NAME_CHARS:
        return _masked_name(text, _KEEPS_HOMES.get())
    return _masked(text)


def _is_plain_word(text: str) -> bool:
    """Return whether a text is a short name of lowercase letters, as most texts of a report are: no token is so short."""
    return len(text) <= _PLAIN_CHARS and text.isascii() and text.islower() and text.replace("_", "").isalpha()


@functools.lru_cache(maxsize=4096)
def _masked_name(text: str, _keeps_homes: bool) -> str:
    """Mask a short text: a report holds the same names of facts and settings hundreds of times."""
    return _masked(text)


def _masked(text: str) -> str:
    for _ in range(_MAX_PASSES):  # hiding may join two halves of another secret's key
        hidden = _pass(text)
        if hidden == text:
            break
        text = hidden
    return text


def mask_command(argv: Sequence[str], *, keep_homes: bool = False) -> list[str]:
    """Return a command with its secrets and prompts replaced by ``***`` and home folders by ``~``.

    Args:
        argv: the command.
        keep_homes: leave home folders, so that the command can be pasted into the user's own terminal.
    """
    if not _MASKING.get():
        return list(argv)
    words = list(argv)
    with homes_kept() if keep_homes else nullcontext():
        for _ in range(_MAX_PASSES):
            hidden = _pass_words(words)
            if hidden == words:
                break
            words = hidden
    return words


def _hides_assigned(name: str) -> bool:
    return bool(secrecy(name)) or (name.startswith("-") and PROMPT.match(name) is not None)


def _hides_next(flag: str, word: str) -> bool:
    if secrecy(flag) == "weak":  # a switch, where another flag follows
        return not word.startswith("-") and tells(flag, word)
    return bool(secrecy(flag)) or not NUMBER.match(word)


def mask_value(name: str, value: object) -> object:
    """Return the value of a setting or variable of that name: hidden if the name is a secret's, else masked as text."""
    if not _MASKING.get() or value is None or isinstance(value, bool):
        return value
    if secrecy(name) and tells(name, str(value)):
        return MASK
    if not isinstance(value, str):
        return value
    return MASK if PROMPT.match(name) and value else mask(value)


def _pass_words(words: Sequence[str]) -> list[str]:
    masked: list[str] = []
    by_program = dict(kept_chars(words))
    hide = ""  # the flag whose value the next word is
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if hide and _hides_next(hide, word):
            masked.append(MASK)
        elif any(map(str.isspace, name)) or is_script(words, index):  # a secret in it ends before the word does
            text = mask(hide_in_script(word[: by_program.get(index)]))
            masked.append(f"{text}{MASK}" if index in by_program else text)
        elif equals and _hides_assigned(name) and tells(name, value):
            masked.append(f"{name}={MASK}")
        elif index in by_program:
            masked.append(f"{word[: by_program[index]]}{MASK}")
        else:
            masked.append(mask(word))
        hide = word if word.startswith("-") and not equals and (secrecy(word) or PROMPT.match(word)) else ""
    return masked


def _pass(text: str) -> str:
    text = _mask_fields(hide_in_yaml(hide_in_text(hide_shapes(text))))
    for pattern in () if _KEEPS_HOMES.get() else _HOMES:
        text = pattern.sub(HOME, text)
    return text


def _mask_fields(text: str) -> str:
    """Hide the values of secret keys and of prompt fields, from left to right."""
    pieces, kept, position = [], 0, 0
    while found := _KEY.search(text, position):
        position = found.end()
        name = found.group("name") or found.group("flag") or found.group("variable") or "prompt"
        secret, prompt = secrecy(name), PROMPT.match(name) is not None
        if not secret and not prompt:
            if found.group("flag"):  # the word behind a flag may be a key itself
                position = found.end("flag")
            continue
        value = value_at(text, position, whole_line=bool(_HEADERS.match(name)))
        if value is None or not (_hides_secret if secret else _hides_prompt)(text, value, name, found):
            continue
        pieces += [text[kept : value.start], MASK]
        kept, position = value.end, max(value.after, position)
    return "".join([*pieces, text[kept:]]) if pieces else text


def _hides_secret(text: str, value: ValueSpan, name: str, found: re.Match[str]) -> bool:
    body = text[value.start : value.end]
    if not tells(name, body):
        return False
    if value.form == "bare" and body in _PROSE and ":" in (found.group("glue") or ""):
        return False
    if (
        secrecy(name) == "weak"
        and value.form == "bare"
        and ":" in (found.group("glue") or "")
        and not looks_made(body, 8)
    ):
        return False  # "FOO_KEY: not set" is prose
    if value.form == "list":
        return '"' in body or "'" in body
    prose = value.form == "bare" and name.lower() in {"token", "tokens"} and ":" in (found.group("glue") or "")
    # "the first token: it is late" is prose; a token is long, or mixes letters and digits.
    return not prose or len(body) >= 16 or (len(body) >= 8 and any(c.isdigit() for c in body))


def _hides_prompt(text: str, value: ValueSpan, name: str, found: re.Match[str]) -> bool:
    body = text[value.start : value.end]
    if body in {"", MASK} or (value.form == "bare" and body.lower() in _NO_TEXT):
        return False
    if value.form == "quoted":
        return True
    if value.form == "list":
        return '"' in body or "'" in body or bool(PROMPT_IDS.search(name))
    if value.form == "call":
        return bool(PROMPT_IDS.search(name))
    return name.startswith("-") and not NUMBER.match(body)
