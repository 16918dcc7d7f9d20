"""The diagnosis log: one structured event per line, through structlog where the program configured it.

The library never configures structlog: unconfigured, structlog prints everything on standard output, which is the
user's. Then events go through the standard library's logger ``oomguard`` (warnings on standard error by default).
"""

from __future__ import annotations

import logging
from typing import Any


def get_logger() -> Any:
    """A bound structlog logger; look it up when an event happens, so that a later configuration counts."""
    import structlog

    if structlog.is_configured():
        return structlog.get_logger("oomguard")
    return structlog.wrap_logger(
        logging.getLogger("oomguard"),
        processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
