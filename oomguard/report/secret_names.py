"""Whether a name says that its value is a secret or a prompt, and whether a value can be one."""

from __future__ import annotations

import functools
import re
from typing import Final, Literal

from oomguard.report.secret_data import names

MASK: Final = "***"
Secrecy = Literal["", "hint", "weak", "strong"]

_MAX_NAME_CHARS: Final = 100
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
# "estimated_max_model_len_tokens: not printed" is a sentence: an access token has a digit or a capital, or is longer.
_COUNTS: Final = re.compile(r"(?i)tokens\Z")
_WORD: Final = re.compile(r"[a-z]{1,15}\Z")
NUMBER: Final = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?[a-z%]{0,4}(?:/[a-z]+)?\Z", re.IGNORECASE)
_PLAIN_VALUES: Final = frozenset({"", "none", "null", "true", "false", MASK})
PROMPT: Final = re.compile(
    r"(?i)-{0,2}(?:(?:(?:system|user|negative|input|full|raw|final|formatted|encoder|decoder|rendered)[_-])?prompts?"
    r"(?:[_-](?:text|str|string|token[_-]ids))?|messages|contents?|inputs?|input[_-](?:texts?|ids)|generated[_ -]texts?"
    r"|(?:output|completion)[_-](?:text|token[_-]ids)|question|instructions?|conversations?)\Z"
)
PROMPT_IDS: Final = re.compile(r"(?i)(?:token[_-]|input[_-])ids\Z")
# DBPASS, PGPASS, dbPass: glued, which capitals tell from an everyday word that ends so.
_GLUED: Final = re.compile(r"(?:(?:\A|_)[A-Z0-9]{2,}(?:PASS|PW|PSK|JWT)|[a-z](?:Pass|Pwd|Pw))\Z")
_PATH: Final = re.compile(
    r"(?:~|\.{0,2})(?:/[a-z0-9._-]+){2,}/?\Z|[\w./\\~:-]+\.(?:pem|key|crt|cer|p12|pfx|pub|json|txt|ya?ml)\Z"
)
_VARIABLES: Final = frozenset({"AUTH", "JWT", "PSK"})  # KEY, PASS and PWD alone are everyday words
# Letters beyond f and digits, and no other sign.
_MADE: Final = re.compile(r"(?=[A-Za-z]{0,100}\d)(?=[A-Fa-f0-9]{0,100}[G-Zg-z])[A-Za-z0-9+]{20,}={0,2}\Z")
_ADDRESS: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s@?]*\Z", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """Return how sure a name is of a secret.

    ``weak`` names (--key, FOO_AUTH) hide only what can be one, a ``hint`` (key, vendor_key) only what looks like nothing else.
    """
    tail = name[-_MAX_NAME_CHARS:].lstrip("-")  # the end of a name tells what it is
    known = names()
    if known.about.search(tail):
        return ""
    if known.strong.match(tail):
        return "" if _VOCABULARY.search(tail) else "strong"
    if _GLUED.search(tail):
        return "strong"
    words = re.split(r"[_-]", tail.lower())
    is_variable = tail.isupper() and (len(words) > 1 or tail in _VARIABLES)
    if words[-1] not in known.weak or {words[0], *words[-2:-1]} & known.harmless:
        return ""
    return "weak" if name.startswith("-") or is_variable else "hint"


def tells(name: str, value: str) -> bool:
    """Return whether a value behind a secret's name is secret: not None, not a count of tokens, not a word of prose."""
    word = value.lower()
    if word in _PLAIN_VALUES:
        return False
    if (sure := secrecy(name)) == "hint":
        return is_made(value)
    if sure == "weak":
        is_small = value.isdigit() and len(value) <= 4
        return not (is_small or word in names().plain or _PATH.match(value) or _ADDRESS.match(value))
    if not _TOKEN.search(name) or _ACCESS_TOKEN.search(name):
        return True
    return not (NUMBER.match(value) or (_COUNTS.search(name) and _WORD.match(value)))


def is_made(value: str) -> bool:
    """Return whether a value can be nothing but a key: neither a hash, a UUID, a path, a model's nor a layer's name."""
    return _MADE.match(value) is not None


def looks_made(value: str, least_chars: int) -> bool:
    """Return whether a value looks made by a machine, or chosen as a password: long, with a digit."""
    return len(value) >= least_chars and any(c.isdigit() for c in value)
