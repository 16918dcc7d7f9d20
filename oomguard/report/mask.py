"""Hiding secrets in what oomguard prints: values of flags and variables that name a key, token or password."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"
_SECRET_WORDS = r"(?:api[_-]?key|access[_-]?key|token|password|passwd|secret|credential)s?"  # noqa: S105
# A secret's name ends in one of these words (HF_TOKEN, --api-key) or has one inside that nothing harmless has.
_NAME = rf"(?:[\w-]*{_SECRET_WORDS}|[\w-]*(?:secret|password|credential)[\w-]*)"
# Names of the vocabulary's tokens, not of access tokens: pad_token, skip_special_tokens, --max-num-batched-tokens.
_VOCABULARY: Final = re.compile(
    r"(?i)(?:pad|eos|bos|unk|sep|cls|mask|special|image|video|audio|stop|new|batched|prompt|speculative|max|min|num|of)[_-]tokens?\Z"
)
_VALUE = r"(?P<value>[^\s\"',\[\]]{4,})"
_INLINE: Final = re.compile(rf"(?i)(?<![\w-])(?P<name>-{{0,2}}{_NAME})(?P<glue>[\"']?\s*[=:]\s*\[?[\"']?){_VALUE}")
_SPACED: Final = re.compile(rf"(?i)(?<![\w-])(?P<name>--?{_NAME})(?P<glue>\s+)(?!-){_VALUE}")
_FLAG: Final = re.compile(rf"(?i)--?{_NAME}\Z")
_PLAIN_VALUES: Final = frozenset({"none", "null", "true", "false"})
_BEARER: Final = re.compile(r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+|\bbearer\s+)[^\s\"',]{4,}")
_URL: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]+:)[^\s/@]+(?=@)")
_KNOWN: Final = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})\b")


def mask(text: str) -> str:
    """The text with secrets replaced by ``***``."""
    text = _URL.sub(rf"\1{MASK}", _BEARER.sub(rf"\1{MASK}", text))
    return _KNOWN.sub(MASK, _SPACED.sub(_hide, _INLINE.sub(_hide, text)))


def mask_command(argv: Sequence[str]) -> list[str]:
    """A command with the values of its secret flags replaced by ``***``."""
    masked, hide = [], False
    for word in argv:
        flag, equals, _ = word.partition("=")
        joined = equals and _FLAG.match(flag) and not _VOCABULARY.search(flag)
        masked.append(MASK if hide else f"{flag}={MASK}" if joined else mask(word))
        hide = bool(_FLAG.match(word)) and not _VOCABULARY.search(word)
    return masked


def _hide(match: re.Match[str]) -> str:
    name, value = match.group("name"), match.group("value")
    if (
        _VOCABULARY.search(name)
        or value.lower() in _PLAIN_VALUES
        or (value.isdigit() and name.lower().endswith("tokens"))
    ):
        return match.group(0)
    return f"{name}{match.group('glue')}{MASK}"
