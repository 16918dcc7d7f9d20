"""The variables that the command inherits: those oomguard was started with, and not what Python has made of them."""

from __future__ import annotations

import os
from pathlib import Path

# Python sets it for itself where the locale is C (PEP 538), and so for every child.
_COERCED = "LC_CTYPE"


def inherited() -> dict[str, str]:
    """Return the variables as oomguard found them; without /proc, as Python has them."""
    variables = dict(os.environ)
    try:
        given = Path("/proc/self/environ").read_bytes()
    except OSError:
        return variables
    if not any(entry.startswith(_COERCED.encode() + b"=") for entry in given.split(b"\0")):
        variables.pop(_COERCED, None)
    return variables
