"""Libraries that are loaded while a program of the user's runs: its random numbers stay as they
are.

rich draws from Python's generator as it is loaded, and structlog loads rich: a program that has
called ``random.seed`` would draw other numbers after it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def undrawn(library: str) -> Iterator[None]:
    """Put Python's generator back to where it stood, where ``library`` is loaded inside; do no more
    than that inside.

    Other threads draw from it too: it is not touched where the library is loaded already, or draws
    nothing.
    """
    if library in sys.modules:
        yield
        return
    import random  # of the standard library's larger modules

    before = random.getstate()
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)
