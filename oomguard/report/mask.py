"""Hide what a report must not carry: keys, tokens and passwords, text of prompts, and the names of home folders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from oomguard.report.values import ValueSpan, value_at

MASK: Final = "***"
HOME: Final = "~"
_MASKING: Final[ContextVar[bool]] = ContextVar("oomguard_masking", default=True)
_MAX_PASSES: Final = 8
_MAX_NAME_CHARS: Final = 100

# A secret's name ends in one of these words (HF_TOKEN, --api-key), or contains one that no harmless name contains.
_SECRET: Final = re.compile(
    r"(?i)-{0,2}(?:[\w-]*(?:api[_-]?key|(?:access|private|session|signing|encryption|license|master|auth|account|ssh|"
    r"storage|shared|service)[_-]?key|token|passwd|passphrase|[_-]pwd|[_-]pass)s?|[\w-]*(?:secret|password|credential)[\w-]*"
    r"|authorization|proxy-authorization|cookie|set-cookie)\Z"
)
_HEADERS: Final = re.compile(r"(?i)(?:authorization|proxy-authorization|cookie|set-cookie)\Z")
# Names of the vocabulary's tokens, not of access tokens: pad_token, skip_special_tokens, max_num_batched_tokens.
_VOCABULARY: Final = re.compile(
    r"(?i)(?:pad|eos|bos|unk|sep|cls|mask|special|image|video|audio|stop|new|batched|prompt|speculative|max|min|num|of)"
    r"[_-]tokens?\Z"
)
# A number behind one of these is still a secret; behind any other ..._token it is a count or a time.
_ACCESS_TOKEN: Final = re.compile(
    r"(?i)(?:hf|hub|huggingface|api|access|auth|refresh|session|git|github|gitlab|bot|bearer|id|csrf|xsrf|personal|user|"
    r"wandb|slack|aws|azure|google|openai|security)[_-]?tokens?\Z"
)
_TOKEN: Final = re.compile(r"(?i)tokens?\Z")
_NUMBER: Final = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?[a-z%]{0,4}(?:/[a-z]+)?\Z", re.IGNORECASE)
_PLAIN_VALUES: Final = frozenset({"", "none", "null", "true", "false", MASK})
_PROMPT: Final = re.compile(
    r"(?i)-{0,2}(?:(?:(?:system|user|negative|input|full|raw|final|formatted|encoder|decoder|rendered)[_-])?prompts?"
    r"(?:[_-](?:text|str|string|token[_-]ids))?|messages|contents?|inputs?|input[_-](?:texts?|ids)|generated[_ -]texts?"
    r"|(?:output|completion)[_-](?:text|token[_-]ids)|question|instructions?|conversations?)\Z"
)
_PROMPT_IDS: Final = re.compile(r"(?i)(?:token[_-]|input[_-])ids\Z")
_KEY: Final = re.compile(
    r"(?i)(?<![\w-])(?:"
    r"(?P<part>type\\*[\"']\s*:\s*\\*[\"']text\\*[\"']\s*,\s*\\*[\"']text)(?P<part_glue>\\*[\"']\s*:\s*)"
    r"|(?P<kube>name\\*[\"']?[ ]*[:=][ ]*\\*[\"']?(?P<variable>\w+)\\*[\"']?,?\s+\\*[\"']?value\\*[\"']?[ ]*[:=][ ]*)"
    r"|(?P<answer>generated response [^\s:]+(?: \([^)]*\))?: output: |\w*reqinput\([^'\"]{0,200}\btext=)"
    r"|(?P<name>generated text|-{0,2}[a-z_][\w-]*)(?P<glue>\\*[\"']?\]?[ \t]*[=:][ \t]*)"
    r"|(?P<flag>--?[a-z][\w-]*)(?P<space>\\*[\"']?,?[ \t]+(?!-))"
    r")"
)
# A secret by its own shape, whatever stands before it.
_SHAPES: Final = (
    (re.compile(r"\b([a-z][a-z0-9+.-]{0,30}://[^\s/:@\"'<>]*:)(?!\*\*\*@)[^\s/\"'<>]+(?=@)"), rf"\1{MASK}"),
    (re.compile(r"\b([a-z][a-z0-9+.-]{0,30}://)[^\s/:@\"'<>]{16,}(?=@)"), rf"\1{MASK}"),
    (re.compile(r"(?i)([?&](?:key|sig|signature|x-amz-[\w-]*|sv|se)=)(?!\*\*\*)[^&\s\"'<>]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)(\bbearer\s+)(?!tokens?\b|auth|\*\*\*)[^\s\"',]{4,}"), rf"\1{MASK}"),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
            r"|nvapi-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        MASK,
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
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


def is_masking() -> bool:
    """Return whether texts are masked in this thread or task."""
    return _MASKING.get()


def mask(text: str) -> str:
    """Replace secrets and prompts by ``***`` and home folders by ``~``; inside ``unmasked`` change nothing."""
    if not _MASKING.get():
        return text
    for _ in range(_MAX_PASSES):  # hiding may join two halves of another secret's key
        hidden = _pass(text)
        if hidden == text:
            break
        text = hidden
    return text


def mask_command(argv: Sequence[str]) -> list[str]:
    """Return a command with its secrets and prompts replaced by ``***`` and home folders by ``~``."""
    if not _MASKING.get():
        return list(argv)
    masked: list[str] = []
    hide = False
    for word in argv:
        name, equals, value = word.partition("=")
        if hide and not (_NUMBER.match(word) and not _is_secret(argv[len(masked) - 1])):
            masked.append(MASK)
        elif equals and (_is_secret(name) or (name.startswith("-") and _PROMPT.match(name))) and _tells(name, value):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask(word))
        hide = word.startswith("-") and not equals and bool(_is_secret(word) or _PROMPT.match(word))
    return masked


def mask_value(name: str, value: object) -> object:
    """Return the value of a setting or variable of that name: hidden if the name is a secret's, else masked as text."""
    if not _MASKING.get() or value is None or isinstance(value, bool):
        return value
    if _is_secret(name) and _tells(name, str(value)):
        return MASK
    if not isinstance(value, str):
        return value
    return MASK if _PROMPT.match(name) and value else mask(value)


def _pass(text: str) -> str:
    for pattern, replacement in _SHAPES:
        text = pattern.sub(replacement, text)
    text = _mask_fields(text)
    for pattern in _HOMES:
        text = pattern.sub(HOME, text)
    return text


def _mask_fields(text: str) -> str:
    """Hide the values of secret keys and of prompt fields, from left to right."""
    pieces, kept, position = [], 0, 0
    while found := _KEY.search(text, position):
        position = found.end()
        name = found.group("name") or found.group("flag") or found.group("variable") or "prompt"
        secret, prompt = _is_secret(name), _PROMPT.match(name) is not None
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


def _is_secret(name: str) -> bool:
    tail = name[-_MAX_NAME_CHARS:]  # the end of a name tells what it is
    return bool(_SECRET.match(tail)) and not _VOCABULARY.search(tail)


def _tells(name: str, value: str) -> bool:
    """Return whether a value behind a secret's name is secret: not None, and not a count of tokens."""
    if value.lower() in _PLAIN_VALUES:
        return False
    return not (_NUMBER.match(value) and _TOKEN.search(name) and not _ACCESS_TOKEN.search(name))


def _hides_secret(text: str, value: ValueSpan, name: str, found: re.Match[str]) -> bool:
    body = text[value.start : value.end]
    if not _tells(name, body):
        return False
    if value.form == "list":
        return '"' in body or "'" in body
    prose = value.form == "bare" and name.lower() in {"token", "tokens"} and ":" in (found.group("glue") or "")
    # "the first token: it is late" is prose; a token is long, or mixes letters and digits.
    return not prose or len(body) >= 16 or (len(body) >= 8 and any(c.isdigit() for c in body))


def _hides_prompt(text: str, value: ValueSpan, name: str, found: re.Match[str]) -> bool:
    body = text[value.start : value.end]
    if body in {"", MASK} or (value.form == "bare" and body.lower() in _PLAIN_VALUES):
        return False
    if value.form == "quoted":
        return True
    if value.form == "list":
        return '"' in body or "'" in body or bool(_PROMPT_IDS.search(name))
    if value.form == "call":
        return bool(_PROMPT_IDS.search(name))
    return name.startswith("-") and not _NUMBER.match(body)
