"""The switch that turns everything off: ``OOMGUARD_DISABLE=1``."""

from __future__ import annotations

import os
from typing import Final

_ON: Final = frozenset({"1", "true", "yes", "on"})


def disabled() -> bool:
    """Whether the user turned oomguard off; ``0``, empty and unset leave it on."""
    return os.environ.get("OOMGUARD_DISABLE", "").strip().lower() in _ON
