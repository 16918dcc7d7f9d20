"""What only tells that another rank failed: a lost connection, an aborted collective, a timeout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from oomguard.observe.engine_errors import is_of_another_rank
from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("secondary.toml")
# A failure stands at the end of what was printed.
_END_CHARS: Final = 16_384


def is_secondary(tail: str) -> bool:
    """Return whether an output ends with a failure that only passes on another rank's."""
    end = tail[-_END_CHARS:].lower()
    return is_of_another_rank(end) or any(text in end for text in _texts())


@functools.cache
def _texts() -> tuple[str, ...]:
    table = next(iter(read_tables("ranks_secondary", [_FILE]).values()))
    return tuple(text.lower() for text in table["texts"])
