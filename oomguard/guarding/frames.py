"""What the frames of a failure hold, looked at without making any of it live longer."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from oomguard.observe.exceptions import chain


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an exception and its chain, outermost first."""
    for link in chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            yield frame


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a frame's locals; those of a module's own code are its globals, which stay as they are."""
    seen = frame.f_locals
    copy = dict(seen)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        with contextlib.suppress(Exception):
            seen.clear()  # before Python 3.13 a function's frame keeps this copy of its locals, tensors too
    return copy


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))
