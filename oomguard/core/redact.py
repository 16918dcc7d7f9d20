"""Redact keys, tokens, passwords, prompts and the names of home folders.

The steps are: secrets with a known shape, words of a command, YAML blocks, and fields with a
secret's or a prompt's name. The lists of names and patterns are in secrets.toml.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from oomguard.core.files import read_tables

_FILE: Final = Path(__file__).with_name("secrets.toml")


class Names(NamedTuple):
    """Hold the name endings that classify a value; patterns are compiled."""

    strong: re.Pattern[str]
    about: re.Pattern[str]
    weak: frozenset[str]
    harmless: frozenset[str]
    plain: frozenset[str]


class Program(NamedTuple):
    """Describe the flags of one program that carry a secret.

    Attributes:
        after: the sub-command after which the flags count; None if they always count.
        glued: flags followed by the secret in the same word.
        next: flags followed by the secret as the next word.
        next_token: flags whose next word is secret if it looks like a token.
        pair: flags with the secret after the first ``:`` or ``%`` of the same word or the next.
    """

    after: str | None
    glued: tuple[str, ...]
    next: frozenset[str]
    next_token: frozenset[str]
    pair: tuple[str, ...]


@functools.cache
def names() -> Names:
    """Return the patterns of secret names."""
    table = _data()["names"]
    contains = "|".join(table["contains"])
    return Names(
        re.compile(rf"(?i)(?:.*(?:{'|'.join(table['strong'])})|.*(?:{contains}).*)\Z"),
        re.compile(rf"(?i)(?:{'|'.join(table['about'])})\Z"),
        *(frozenset(table[name]) for name in ("weak", "harmless", "plain")),
    )


@functools.cache
def programs() -> dict[str, Program]:
    """Return the programs by name."""
    found: dict[str, Program] = {}
    for row in _data()["program"]:
        pair = (*row.get("glued_pair", ()), *row.get("next_pair", ()))
        program = Program(
            row.get("after"),
            tuple(row.get("glued", ())),
            frozenset(row.get("next", ())),
            frozenset(row.get("next_token", ())),
            pair,
        )
        found |= dict.fromkeys(row["names"], program)
    return found


@functools.cache
def interpreters() -> frozenset[str]:
    """Return the interpreters whose ``-c`` takes a program, without version numbers."""
    return frozenset(_data()["script"]["interpreters"])


@functools.cache
def token_rests() -> dict[str, str]:
    """Return the pattern that must follow each token prefix."""
    found = {}
    for row in _data()["token"]:
        for prefix in row["prefix"]:
            found[prefix] = row["rest"]
    return found


@functools.cache
def parts() -> tuple[tuple[str, str], ...]:
    """Return pairs of a required lower-case text and a pattern that keeps only its first group."""
    return tuple((row["needs"], row["pattern"]) for row in _data()["part"])


@functools.cache
def _data() -> dict[str, Any]:
    return next(iter(read_tables("secrets", [_FILE]).values()))


MASK: Final = "***"
Secrecy = Literal["", "hint", "weak", "strong"]

_MAX_NAME_CHARS: Final = 100
# Names of vocabulary tokens, not of access tokens: pad_token, skip_special_tokens,
# max_num_batched_tokens.
_VOCABULARY: Final = re.compile(
    r"(?i)(?:pad|eos|bos|unk|sep|cls|mask|special|image|video|audio|stop|new|batched|prompt|speculative|max|min|num|of)"
    r"[_-]tokens?\Z"
)
# After one of these names even a number is a secret; after any other ..._token it is a count or a
# time.
_ACCESS_TOKEN: Final = re.compile(
    r"(?i)(?:hf|hub|huggingface|api|access|auth|refresh|session|git|github|gitlab|bot|bearer|id|csrf|xsrf|personal|user|"
    r"wandb|slack|aws|azure|google|openai|security)[_-]?tokens?\Z"
)
_TOKEN: Final = re.compile(r"(?i)tokens?\Z")
# "estimated_max_model_len_tokens: not printed" is a sentence. An access token has a digit or a
# capital letter, or is longer.
_COUNTS: Final = re.compile(r"(?i)tokens\Z")
_SECRET_NAMES_WORD: Final = re.compile(r"[a-z]{1,15}\Z")
NUMBER: Final = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?[a-z%]{0,4}(?:/[a-z]+)?\Z", re.IGNORECASE)
_PLAIN_VALUES: Final = frozenset({"", "none", "null", "true", "false", MASK})
PROMPT: Final = re.compile(
    r"(?i)-{0,2}(?:(?:(?:system|user|negative|input|full|raw|final|formatted|encoder|decoder|rendered)[_-])?prompts?"
    r"(?:[_-](?:text|str|string|token[_-]ids))?|messages|contents?|inputs?|input[_-](?:texts?|ids)|generated[_ -]texts?"
    r"|(?:output|completion)[_-](?:text|token[_-]ids)|question|instructions?|conversations?)\Z"
)
PROMPT_IDS: Final = re.compile(r"(?i)(?:token[_-]|input[_-])ids\Z")
# DBPASS, PGPASS, dbPass: the capital letters distinguish these from everyday words.
_GLUED: Final = re.compile(r"(?:(?:\A|_)[A-Z0-9]{2,}(?:PASS|PW|PSK|JWT)|[a-z](?:Pass|Pwd|Pw))\Z")
_PATH: Final = re.compile(
    r"(?:~|\.{0,2})(?:/[a-z0-9._-]+){2,}/?\Z|[\w./\\~:-]+\.(?:pem|key|crt|cer|p12|pfx|pub|json|txt|ya?ml)\Z"
)
# KEY, PASS and PWD alone are everyday words.
_VARIABLES: Final = frozenset({"AUTH", "JWT", "PSK"})
# Letters beyond f and digits, without any other sign.
_MADE: Final = re.compile(
    r"(?=[A-Za-z]{0,100}\d)(?=[A-Fa-f0-9]{0,100}[G-Zg-z])[A-Za-z0-9+]{20,}={0,2}\Z"
)
_ADDRESS: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s@?]*\Z", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """Return how likely a name belongs to a secret.

    ``weak`` names (--key, FOO_AUTH) hide a value only if it can be a secret. A ``hint`` (key,
    vendor_key) hides only a value that looks generated.
    """
    # The end of a name says what it is.
    tail = name[-_MAX_NAME_CHARS:].lstrip("-")
    known = names()
    if known.about.search(tail):
        return ""
    if known.strong.match(tail):
        if _VOCABULARY.search(tail):
            return ""
        return "strong"
    if _GLUED.search(tail):
        return "strong"
    words = re.split(r"[_-]", tail.lower())
    is_variable = tail.isupper() and (len(words) > 1 or tail in _VARIABLES)
    if words[-1] not in known.weak or {words[0], *words[-2:-1]} & known.harmless:
        return ""
    if name.startswith("-") or is_variable:
        return "weak"
    return "hint"


def is_secret_value(name: str, value: str) -> bool:
    """Return whether the value of a secret's name is secret.

    None, counts of tokens and words of prose are not.
    """
    word = value.lower()
    if word in _PLAIN_VALUES:
        return False
    if (sure := secrecy(name)) == "hint":
        return is_generated(value)
    if sure == "weak":
        is_small = value.isdigit() and len(value) <= 4
        return not (
            is_small or word in names().plain or _PATH.match(value) or _ADDRESS.match(value)
        )
    if not _TOKEN.search(name) or _ACCESS_TOKEN.search(name):
        return True
    return not (NUMBER.match(value) or (_COUNTS.search(name) and _SECRET_NAMES_WORD.match(value)))


def is_generated(value: str) -> bool:
    """Return whether a value can only be a key, not a hash, UUID, path or model name."""
    return _MADE.match(value) is not None


def looks_generated(value: str, least_chars: int) -> bool:
    """Return whether a value is long and has a digit, like a token or a password."""
    return len(value) >= least_chars and any(c.isdigit() for c in value)


# Secrets in a command without a telling name: ``mysql -pSECRET``, ``curl -u user:SECRET``, ``wandb
# login SECRET``.

_WORD: Final = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"',\\]|\\(?![nrt]))+|\n""")
_ENDS: Final = frozenset({"|", "||", "&&", ";", "&", "\n"})
_USER_FLAGS: Final = ("-u", "--user", "--proxy-user", "--userpwd", "--login")
# kubectl create secret --from-literal=NAME=SECRET.
_LITERAL: Final = "--from-literal"
_MAX_DEPTH: Final = 3
_GLUED_MIN_CHARS: Final = 5
# A word after -p of any program that is not a password: a path, a port, an option with one dash
# (-port, -python3), or name=value.
_NO_PASSWORD: Final = re.compile(
    r"[\d.:-]+(?:/(?:tcp|udp))?\Z|.*[=/\\:\[(]|(?:ort|ython|ath|refix|arallel|ix|rofile|roc|thread|rint|ackage|y\d)|[a-z_.,]+\Z|\*\*\*"
)
_PORT: Final = re.compile(r"\d{1,5}\Z")


def hide_in_text(text: str) -> str:
    """Hide such secrets in running text, if it contains a word that can carry one."""
    if _carriers().search(text):
        return _hide(text, 0)
    return text


def secret_starts(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the index of each word with a secret, and where in the word the secret begins."""
    program: Program | None = None
    # Whether the program's sub-command has appeared.
    begun = False
    before = ""
    # Whether the last flag takes several secrets, as vLLM's --api-key does.
    lists = False
    for index, word in enumerate(words):
        if word in _ENDS:
            program = None
        elif (found := programs().get(word.rpartition("/")[2])) is not None:
            program = found
            begun = found.after is None
        elif program is not None and word == program.after:
            begun = True
        else:
            if program is not None and begun:
                kept = _by_program(program, before, word)
            else:
                kept = None
            if kept is None:
                kept = _by_flag(before, word)
            if word.startswith("-"):
                lists = secrecy(word) == "strong"
            elif lists and is_generated(word):
                kept = 0
            if kept is not None and kept < len(word) and not word.startswith(MASK, kept):
                yield index, kept
        before = word


def _by_program(program: Program, before: str, word: str) -> int | None:
    if before in program.next:
        return 0
    if before in program.next_token and looks_generated(word, 16):
        return 0
    for flag in program.pair:
        is_short = not flag.startswith("--")
        if before == flag or (
            is_short and re.fullmatch(rf"-[A-Za-z]{{1,8}}{flag[1]}", before)
        ):  # -su is -s and -u
            start = 0
        elif is_short and word.startswith(flag):
            start = len(flag)
        else:
            continue
        if pair := re.search("[:%]", word[start:]):
            return start + pair.end()
    glued = [*program.glued, *(f"{flag}=" for flag in program.next)]
    for flag in glued:
        if word.startswith(flag) and len(word) > len(flag):
            return len(flag)
    return None


def _by_flag(before: str, word: str) -> int | None:
    """Return where a secret begins after a flag with the same meaning in most programs."""
    flag, equals, value = word.partition("=")
    if equals and flag in _USER_FLAGS:
        begin = _after_user(value)
        if begin is None:
            return None
        return len(flag) + 1 + begin
    if before in _USER_FLAGS:
        return _after_user(word)
    if _LITERAL in {before, flag}:
        if before == _LITERAL:
            named = word
        else:
            named = value
        if "=" in named:
            return len(word) - len(named) + named.index("=") + 1
        return None
    # openssl's -passin pass:SECRET.
    if before.startswith("-pass") and word.startswith("pass:"):
        return len("pass:")
    body = word[2:]
    if word.startswith("-p") and len(body) >= _GLUED_MIN_CHARS and not _NO_PASSWORD.match(body):
        return 2
    return None


def _after_user(pair: str) -> int | None:
    """Return where the password of ``user:password`` begins; None if there is no password.

    A uid and gid, a user and group, or a host and port have no password.
    """
    user, colon, password = pair.partition(":")
    if (
        not colon
        or not password
        or not user
        or password.startswith("//")
        or password == user
        or "/" in user
    ):
        return None
    if _PORT.match(password) and (user.isdigit() or "." in user or user == "localhost"):
        return None
    return len(user) + 1


def _hide(text: str, depth: int) -> str:
    spans = []
    words = []
    for found in _WORD.finditer(text):
        start, end = found.span()
        # A list of words loses its brackets.
        while start < end - 1 and text[start] in "[({":
            start += 1
        while start < end - 1 and text[end - 1] in "])}":
            end -= 1
        if text[start] in "\"'" and end - start > 1 and text[end - 1] == text[start]:
            start = start + 1
            end = end - 1
        body = text[start:end]
        end -= len(body) - len(body.rstrip("\\")) if body != "\n" else 0
        spans.append((start, end))
        words.append(text[start:end])
    hidden = dict(secret_starts(words))
    pieces = []
    position = 0
    for index, (start, end) in enumerate(spans):
        if index in hidden:
            pieces += [text[position : start + hidden[index]], MASK]
            position = end
        elif depth < _MAX_DEPTH and " " in words[index]:
            # A command in quotes.
            pieces += [text[position:start], _hide(words[index], depth + 1)]
            position = end
    return "".join([*pieces, text[position:]])


@functools.cache
def _carriers() -> re.Pattern[str]:
    """Return the pattern of words without which no text contains such a secret."""
    named = "|".join(re.escape(name) for name in sorted(programs(), key=len, reverse=True))
    return re.compile(
        rf"-p[^\s\"',]|-u|--user|--proxy-user|--login|--from-literal|-(?:keys?|tokens?)[\"']?,?[ ]|(?:\b|\\[nrt])(?:{named})\b"
    )


# Secrets in a program inside one word: ``sh -c 'export API_KEY=SECRET; sh job.sh'``.

# NAME=, --flag=, and a flag whose value is the next word.
_SECRET_SCRIPTS_KEY: Final = re.compile(r"(?<![\w-])(-{0,2}\w[\w-]*)(\+?=|[ \t]+(?=[^\s-]))")
_RUNS_WORD: Final = re.compile(r"-[A-Za-z]*c\Z")
_SECRET_SCRIPTS_ENDS: Final = frozenset(" \t\n\r;&|<>)")
_CLOSING: Final = {"(": ")", "{": "}"}
# One shell word, with the scheme of a header before it.
_ONE_WORD: Final = re.compile(r"(?:(?:Bearer|Basic|Token) +)?[^\s;&|]*\Z", re.IGNORECASE)


def is_script(words: Sequence[str], index: int) -> bool:
    """Return whether a word is a program: it follows the ``-c`` of a shell or of Python."""
    if index == 0 or not _RUNS_WORD.match(words[index - 1]):
        return False
    names = (word.rpartition("/")[2].rstrip("0123456789.") for word in words[: index - 1])
    return any(name in interpreters() for name in names)


def hide_in_script(text: str) -> str:
    """Hide each value of a secret's or prompt's name, up to the end of the shell's word."""
    pieces = []
    kept = 0
    position = 0
    quotes: list[str] = []
    while found := _SECRET_SCRIPTS_KEY.search(text, position):
        name, glue = found.groups()
        position = found.end(1)
        begin = found.end()
        if not (secrecy(name) or (name.startswith("-") and PROMPT.match(name))):
            continue
        if not glue.endswith("=") and not name.startswith("-"):
            continue
        quotes = quotes or _open_quotes(text)
        end = _word_end(text, begin, quotes[begin])
        value = text[begin:end].strip("\"'\\")
        if (
            not value
            or value == MASK
            or not is_secret_value(name, value)
            or (not secrecy(name) and NUMBER.match(value))
        ):
            continue
        pieces += [text[kept:begin], MASK]
        kept = position = end
    return "".join([*pieces, text[kept:]])


def hides_secrets_alone(words: Sequence[str], masked: Sequence[str]) -> bool:
    """Return whether masking hid only whole words of a command or of its shell script.

    If it hid more, two different commands may look the same after masking.
    """
    return len(words) == len(masked) and all(map(_hides_one_word_each, words, masked))


def _hides_one_word_each(word: str, masked: str) -> bool:
    if masked in {word, MASK}:
        return True
    kept = masked.split(MASK)
    if not word.startswith(kept[0]):
        return False
    position = len(kept[0])
    for i, part in enumerate(kept[1:], 1):
        if part:
            at = len(word) - len(part) if i == len(kept) - 1 else word.find(part, position)
        else:
            at = len(word)
        if at < position or not word.startswith(part, at):
            return False
        hidden = word[position:at]
        quote = word[position - 1 : position]
        is_quoted = quote in {'"', "'"} and quote not in hidden and word.startswith(quote, at)
        if not is_quoted and not _is_one_word(hidden):
            return False
        position = at + len(part)
    return True


def _is_one_word(hidden: str) -> bool:
    return _word_end(hidden, 0, "") == len(hidden) or _ONE_WORD.match(hidden) is not None


def _open_quotes(text: str) -> list[str]:
    """Return for each position the open quote; "" if none is open."""
    quote = ""
    is_escaped = False
    found = [""]
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            if char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        found.append(quote)
    return found


def _word_end(text: str, begin: int, around: str) -> int:
    """Return where a shell's word ends that begins inside the quote ``around``.

    A word without an end lasts to the end of the text.
    """
    quote = ""
    closing = list[str]()
    i = begin
    while i < len(text):
        char = text[i]
        if char == "\\" and quote != "'" and around != "'":
            i += 1
        elif quote:
            if char == quote:
                quote = ""
        elif char == around:
            return i
        elif char in "\"'`":
            quote = char
        elif char in _CLOSING and (char == "(" or text[i - 1 : i] == "$"):
            closing.append(_CLOSING[char])
        elif closing:
            if char == closing[-1]:
                closing.pop()
        elif char in _SECRET_SCRIPTS_ENDS:
            return i
        i += 1
    return len(text)


# Secrets with a shape of their own: tokens with a known prefix, URLs, headers, private keys.

_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
# The form in JSON inside a line.
_BREAKS: Final = frozenset({"\\n", "\\r", "\\t"})
_PEM: Final = "-----BEGIN "


def hide_shapes(text: str) -> str:
    """Replace every secret with a known shape by ``***``."""
    lowered = text.lower()
    for needed, pattern in parts():
        if needed in lowered:
            text = _compiled(pattern).sub(rf"\1{MASK}", text)
    text = _hide_tokens(text)
    if _PEM in text:
        return _PRIVATE_KEY.sub(MASK, text)
    return text


def _hide_tokens(text: str) -> str:
    find = _prefixes()
    rests = token_rests()
    pieces = []
    kept = 0
    position = 0
    while found := find.search(text, position):
        start = found.start()
        position = start + 1
        if _is_within_word(text, start):
            continue
        rest = _compiled(rests[found.group()]).match(text, found.end())
        if rest is not None:
            pieces += [text[kept:start], MASK]
            kept = position = rest.end()
    if pieces:
        return "".join([*pieces, text[kept:]])
    return text


def _is_within_word(text: str, start: int) -> bool:
    if start == 0 or not (text[start - 1].isalnum() or text[start - 1] == "_"):
        return False
    return text[max(0, start - 2) : start] not in _BREAKS


@functools.cache
def _prefixes() -> re.Pattern[str]:
    """Return all prefixes as one pattern, longer ones first, grouped by first character."""
    by_first: dict[str, list[str]] = {}
    for prefix in sorted(token_rests(), key=len, reverse=True):
        by_first.setdefault(prefix[0], []).append(re.escape(prefix[1:]))
    return re.compile(
        "|".join(f"{re.escape(first)}(?:{'|'.join(ends)})" for first, ends in by_first.items())
    )


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


# Secrets in YAML whose value follows on the lines below its key: a list, or a block of text.

_SECRET_YAML_KEY: Final = re.compile(
    r"^(?P<indent>[ ]{0,40})(?:- )?(?P<name>[\w.-]{1,100}):[ ]*(?P<block>[|>][+-]?\d?[+-]?)?[ ]*$"
)
_ITEM: Final = re.compile(r"^(?P<lead>[ ]*- )(?P<value>[^\s#].*)$")


def hide_in_yaml(text: str) -> str:
    """Replace the lines below a secret's key by ``***``."""
    if ":\n" not in text and "|" not in text and ">" not in text:
        return text
    lines = text.split("\n")
    key: re.Match[str] | None = None
    for number, line in enumerate(lines):
        if key is not None and _is_below(line, key):
            lines[number] = _hidden(line, key)
            continue
        found = _SECRET_YAML_KEY.match(line)
        if found is not None and secrecy(found["name"]):
            key = found
        else:
            key = None
    return "\n".join(lines)


def _is_below(line: str, key: re.Match[str]) -> bool:
    """Return whether a line belongs to a key's value.

    It does if it is indented further, or is a list item with the same indentation.
    """
    indent = len(line) - len(line.lstrip(" "))
    own = len(key["indent"])
    is_item = not key["block"] and line.lstrip(" ").startswith("- ")
    return bool(line.strip()) and (indent > own or (indent == own and is_item))


def _hidden(line: str, key: re.Match[str]) -> str:
    if key["block"]:
        return f"{line[: len(line) - len(line.lstrip(' '))]}{MASK}"
    item = _ITEM.match(line)
    if item is not None and is_secret_value(key["name"], item["value"]):
        return f"{item['lead']}{MASK}"
    return line


# Find the end of a value in any notation: Python, JSON, JSON inside JSON, shell, YAML.

_OPENER: Final = re.compile(r"[bBrRuUfF]{0,2}(\\*)([\"'])")
_QUOTES_AND_BRACKETS: Final = re.compile(r"(\\*)([\"'])|[\[\](){}]")
_BARE: Final = re.compile(r"[^\s\"',;\[\](){}<>|&\\]+(?:,(?=[^\s\"',=:]+(?:\s|\Z))[^\s\"',]+)*")
# A longer list counts as lasting to the end of the text.
_MAX_LIST_CHARS: Final = 4096
_LINE: Final = re.compile(r"[^\"'\\\n]+")
# The beginning of a call or of an item in Python. A name with a digit may be a password.
_CALL: Final = re.compile(r"[ ]*[A-Za-z_]+(?:\.\w+)*[(\[]")


class ValueSpan(NamedTuple):
    """Locate a value: ``text[start:end]`` is inside its quotes or brackets.

    ``after`` is the position behind them. ``form`` is ``quoted``, ``list``, ``call`` or ``bare``.
    """

    start: int
    end: int
    after: int
    form: str


def value_at(text: str, position: int, *, whole_line: bool = False) -> ValueSpan | None:
    """Find the value that begins at a position; None if no value begins there.

    Args:
        text: the text; a value without an end lasts to its end.
        position: where the value begins.
        whole_line: whether a value without quotes is the rest of the line, as in a header.
    """
    if opener := _OPENER.match(text, position):
        start = opener.end()
        end = _quote_end(text, start, opener.group(2), len(opener.group(1)))
        after = min(len(text), end + len(opener.group(1)) + 1)
        while (
            not opener.group(1) and after < len(text) and text[after] in "\"'"
        ):  # 'it'"'"'s' is one shell word
            end = _quote_end(text, after + 1, text[after], 0)
            after = min(len(text), end + 1)
        return ValueSpan(start, end, after, "quoted")
    if text[position : position + 1] in {"[", "(", "{"}:
        end = _bracket_end(text, position)
        return ValueSpan(position + 1, end, min(len(text), end + 1), "list")
    bare = (_LINE if whole_line else _BARE).match(text, position)
    if bare is None:
        return None
    end = bare.end()
    if (
        text[end : end + 1] == "(" and text[bare.start() : end].isidentifier()
    ):  # SecretStr('...'), tensor([...])
        end = min(len(text), _bracket_end(text, end) + 1)
        return ValueSpan(position, end, end, "call")
    return ValueSpan(position, end, end, "bare")


def _quote_end(text: str, start: int, quote: str, escapes: int) -> int:
    """Return where a string ends that ``quote`` opened after ``escapes`` backslashes.

    The position is before the closing backslashes.
    """
    position = start
    while (found := text.find(quote, position)) >= 0:
        before = found
        while before > start and text[before - 1] == "\\":
            before -= 1
        count = found - before
        if (count % 2 == 0) if escapes == 0 else (count <= escapes):
            return found - (min(count, escapes) if escapes else 0)
        position = found + 1
    return len(text)


def _bracket_end(text: str, start: int) -> int:
    """Return where the bracket at ``start`` closes; brackets inside quotes do not count."""
    depth = 0
    position = start
    limit = start + _MAX_LIST_CHARS
    while (found := _QUOTES_AND_BRACKETS.search(text, position)) and found.start() < limit:
        position = found.end()
        if found.group(2):
            # An apostrophe inside a word opens nothing.
            if found.group(2) == '"' or found.start() == 0 or not text[found.start() - 1].isalnum():
                escapes = len(found.group(1))
                position = min(
                    len(text), _quote_end(text, position, found.group(2), escapes) + escapes + 1
                )
        elif found.group() in "[({":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return found.start()
    return len(text)


HOME: Final = "~"
_MASKING: Final[ContextVar[bool]] = ContextVar("oomguard_masking", default=True)
_KEEPS_HOMES: Final[ContextVar[bool]] = ContextVar("oomguard_keeps_homes", default=False)
_MAX_PASSES: Final = 8
_NAME_CHARS: Final = 64
# The shortest token has 19.
_PLAIN_CHARS: Final = 18
# Words that begin a sentence about a value and are never a value.
_PROSE: Final = frozenset({"not", "unknown", "known", "is", "was", "the", "no", "cannot", "must"})
_NO_TEXT: Final = frozenset({"none", "null", "true", "false"})
_HEADERS: Final = re.compile(r"(?i)(?:authorization|proxy-authorization|cookie|set-cookie)\Z")
_KEY: Final = re.compile(
    # JSON inside a line writes a line break as two characters
    r"(?i)(?:(?<![\w\\-])|(?<=\\[nrt]))(?:"
    r"(?P<part>type\\*[\"']\s*:\s*\\*[\"']text\\*[\"']\s*,\s*\\*[\"']text)(?P<part_glue>\\*[\"']\s*:\s*)"
    r"|(?P<kube>name\\*[\"']?[ ]*[:=][ ]*\\*[\"']?(?P<variable>\w+)\\*[\"']?,?(?:\s|\\{1,8}[nrt])+\\*[\"']?value\\*[\"']?[ ]*[:=][ ]*)"
    r"|(?P<answer>generated response [^\s:]+(?: \([^)]*\))?: output: |\w*reqinput\([^'\"]{0,200}\btext=)"
    r"|(?P<name>generated text|-{0,2}[a-z_][\w-]*)(?P<glue>\\*[\"']?\]?[ \t]*[=:][ \t]*)"
    r"|(?P<flag>--?[a-z][\w-]*)(?P<space>\\*[\"']?,?[ \t]+(?!-))"
    r")"
)
_HOMES: Final = (
    # C:\Users\NAME and C:/Users/NAME, backslashes doubled or not; a name may contain spaces if a
    # separator follows it
    re.compile(
        r"(?<![\w.~])[A-Za-z]:[\\/]+Users[\\/]+(?:[\w.-]+(?: [\w.-]+){1,3}(?=[\\/])|[^\\/\s\"'`:;,<>()|*?\[\]{}$]+)"
    ),
    # /home/NAME, /Users/NAME, also below a mount (/mnt/c/Users/NAME, /gpfs/home/NAME)
    re.compile(
        r"(?:(?<![\w.~/\\-])|(?<=file://))(?:/[\w.+-]+){0,3}?/(?:home|Users)/+[^\\/\s\"'`:;,<>()|*?\[\]{}$~]+"
    ),
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
    """Keep home folders inside the ``with`` block.

    The user pastes such text into a terminal, where ``~`` may be in quotes.
    """
    token = _KEEPS_HOMES.set(True)
    try:
        yield
    finally:
        _KEEPS_HOMES.reset(token)


def is_masking() -> bool:
    """Return whether texts are masked in this thread or task."""
    return _MASKING.get()


def mask(text: str) -> str:
    """Replace secrets and prompts by ``***`` and home folders by ``~``.

    Inside ``unmasked`` this returns the text unchanged.

        >>> mask("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzabcdefgh")
        'HF_TOKEN=***'
    """
    if not _MASKING.get() or _is_plain_word(text):
        return text
    if len(text) <= _NAME_CHARS:
        return _masked_name(text, _KEEPS_HOMES.get())
    return _masked(text)


def _is_plain_word(text: str) -> bool:
    """Return whether a text is a short name in lower case, like most texts of a report.

    No token is so short.
    """
    return (
        len(text) <= _PLAIN_CHARS
        and text.isascii()
        and text.islower()
        and text.replace("_", "").isalpha()
    )


@functools.lru_cache(maxsize=4096)
def _masked_name(text: str, _keeps_homes: bool) -> str:
    """Mask a short text, with a cache, because a report repeats names hundreds of times."""
    return _masked(text)


def _masked(text: str) -> str:
    # Hiding may join two halves of another secret's key.
    for _ in range(_MAX_PASSES):
        hidden = _pass(text)
        if hidden == text:
            break
        text = hidden
    return text


def mask_command(argv: Sequence[str], *, keep_homes: bool = False) -> list[str]:
    """Return a command with secrets and prompts as ``***`` and home folders as ``~``.

    Args:
        argv: the command.
        keep_homes: whether to keep home folders, so that the user can paste the command.
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


# These flags take a file in most programs, also in ``oomguard run``. A prompt has spaces.
_FILE_FLAGS: Final = frozenset({"--input", "--inputs"})


def _is_file(flag: str, value: str) -> bool:
    """Return whether the value of a flag is a file, which is shown."""
    return flag in _FILE_FLAGS and not any(map(str.isspace, value))


def _hides_assigned(name: str, value: str) -> bool:
    if secrecy(name):
        return True
    return name.startswith("-") and PROMPT.match(name) is not None and not _is_file(name, value)


def _hides_next(flag: str, word: str) -> bool:
    if _is_file(flag, word):
        return False
    # A switch, if another flag follows.
    if secrecy(flag) == "weak":
        return not word.startswith("-") and is_secret_value(flag, word)
    return bool(secrecy(flag)) or not NUMBER.match(word)


def mask_value(name: str, value: object) -> object:
    """Return the masked value of a setting or variable.

    A secret's name hides the whole value; any other value is masked as text.
    """
    if not _MASKING.get() or value is None or isinstance(value, bool):
        return value
    if secrecy(name) and is_secret_value(name, str(value)):
        return MASK
    if not isinstance(value, str):
        return value
    if PROMPT.match(name) and value:
        return MASK
    return mask(value)


# Flags that take several values in one program: vllm serve --api-key KEY KEY.
_LISTS: Final = frozenset({"--api-key"})


def _pass_words(words: Sequence[str]) -> list[str]:
    masked: list[str] = []
    by_program = dict(secret_starts(words))
    # The flag whose value is the next word.
    hide = ""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if hide and words[index - 1] != hide and word.startswith("-"):
            # The values of a list have ended.
            hide = ""
        if hide and _hides_next(hide, word):
            masked.append(MASK)
        elif any(map(str.isspace, name)) or is_script(
            words, index
        ):  # a secret in it ends before the word does
            text = mask(hide_in_script(word[: by_program.get(index)]))
            masked.append(f"{text}{MASK}" if index in by_program else text)
        elif equals and _hides_assigned(name, value) and is_secret_value(name, value):
            masked.append(f"{name}={MASK}")
        elif index in by_program:
            masked.append(f"{word[: by_program[index]]}{MASK}")
        else:
            masked.append(mask(word))
        if word.startswith("-") and not equals and (secrecy(word) or PROMPT.match(word)):
            hide = word
        elif hide not in _LISTS or "serve" not in words[:index]:
            hide = ""
    return masked


def _pass(text: str) -> str:
    text = _mask_fields(hide_in_yaml(hide_in_text(hide_shapes(text))))
    for pattern in () if _KEEPS_HOMES.get() else _HOMES:
        text = pattern.sub(HOME, text)
    return text


def _mask_fields(text: str) -> str:
    """Hide the values of secret keys and prompt fields, from left to right."""
    pieces = []
    kept = 0
    position = 0
    while found := _KEY.search(text, position):
        position = found.end()
        name = found.group("name") or found.group("flag") or found.group("variable") or "prompt"
        secret = secrecy(name)
        prompt = PROMPT.match(name) is not None
        if not secret and not prompt:
            # The word after a flag may be a key itself.
            if found.group("flag"):
                position = found.end("flag")
            continue
        value = value_at(text, position, whole_line=bool(_HEADERS.match(name)))
        if value is None or not (_hides_secret if secret else _hides_prompt)(
            text, value, name, found
        ):
            continue
        pieces += [text[kept : value.start], MASK]
        kept = value.end
        position = max(value.after, position)
    if pieces:
        return "".join([*pieces, text[kept:]])
    return text


def _hides_secret(text: str, value: ValueSpan, name: str, found: re.Match[str]) -> bool:
    body = text[value.start : value.end]
    if not is_secret_value(name, body):
        return False
    counts_tokens = _TOKEN.search(name) and not _ACCESS_TOKEN.search(name)
    if counts_tokens and _is_expression(text, value, found.group("glue") or ""):
        return False
    if value.form == "bare" and body in _PROSE and ":" in (found.group("glue") or ""):
        return False
    if (
        secrecy(name) == "weak"
        and value.form == "bare"
        and ":" in (found.group("glue") or "")
        and not looks_generated(body, 8)
    ):
        # "FOO_KEY: not set" is prose.
        return False
    if value.form == "list":
        return '"' in body or "'" in body
    prose = (
        value.form == "bare"
        and name.lower() in {"token", "tokens"}
        and ":" in (found.group("glue") or "")
    )
    # "the first token: it is late" is prose; a token is long, or mixes letters and digits.
    return not prose or len(body) >= 16 or (len(body) >= 8 and any(c.isdigit() for c in body))


def _is_expression(text: str, value: ValueSpan, glue: str) -> bool:
    """Return whether a line of Python computes the value: ``tokens = model.generate(**inputs)``.

    A quote between the brackets may hold the secret itself, so such a value is hidden.
    """
    if glue.strip() != "=" or value.form not in {"bare", "call"}:
        return False
    begin = value.start
    if value.form == "call":
        begin = text.rfind("=", 0, value.start) + 1
    call = _CALL.match(text, begin)
    if call is None:
        return False
    arguments = text[call.end() : _bracket_end(text, call.end() - 1)]
    return not any(quote in arguments for quote in "\"'")


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
    return name.startswith("-") and not NUMBER.match(body) and not _is_file(name, body)
