"""Hiding secrets in what oomguard prints: values of flags and variables that name a key, token or password."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"
_NAME = r"[\w-]*(?:api[_-]?key|token|password|passwd|secret|credential)s?"
# max_new_tokens, --max-num-batched-tokens and their like are counts, not secrets: a number is never masked.
_INLINE: Final = re.compile(rf"(?i)((?<![\w-])-{{0,2}}{_NAME}[\"']?\s*[=:]\s*[\"']?)(?!\d+\b)([^\s\"',]{{4,}})")
_SPACED: Final = re.compile(rf"(?i)(?<![\w-])(--?{_NAME}\s+)(?!\d+\b)(?!-)(\S+)")
_FLAG: Final = re.compile(rf"(?i)--?{_NAME}\Z")
_KNOWN: Final = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})\b")


def mask(text: str) -> str:
    """The text with secrets replaced by ``***``."""
    text = _SPACED.sub(rf"\1{MASK}", _INLINE.sub(rf"\1{MASK}", text))
    return _KNOWN.sub(MASK, text)


def mask_command(argv: Sequence[str]) -> list[str]:
    """A command with the values of its secret flags replaced by ``***``."""
    masked, hide = [], False
    for word in argv:
        masked.append(MASK if hide and not word.isdigit() else mask(word))
        hide = bool(_FLAG.match(word))
    return masked
