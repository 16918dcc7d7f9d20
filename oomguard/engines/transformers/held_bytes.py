"""What holds bytes, a place in a stream, or where a generator of random numbers stands: told, and put back, as one value each."""

from __future__ import annotations

import contextlib
import ctypes
import io
import random
from typing import Any, Final

_MOST_BYTES: Final = 1 << 20
_STREAMS: Final = (io.StringIO, io.BytesIO)


def bytes_in(value: Any) -> bytes | None:
    """Return the bytes that may be changed in their place (``bytearray``, ``array``, ``ctypes``); None of anything else."""
    view = _view(value)
    return None if view is None or view.nbytes > _MOST_BYTES else bytes(view.tobytes())


def stands_at(value: Any) -> Any:
    """Return how far a stream, an iterator or a generator of random numbers has come; None where that is not told."""
    found: Any = None
    with contextlib.suppress(Exception):  # a stream that tells nothing
        if isinstance(value, random.Random):
            found = value.getstate()
        elif hasattr(value, "bit_generator"):
            found = repr(value.bit_generator.state), value.bit_generator.state
        elif hasattr(value, "get_state") and hasattr(value, "manual_seed"):
            found = bytes(value.get_state().numpy())
        elif hasattr(value, "tell"):
            found = (value.tell(),)
        elif hasattr(value, "__next__"):
            found = repr(value), getattr(getattr(value, "gi_frame", None), "f_lasti", None)
    return found


def is_kept(value: Any) -> bool:
    """Return whether a value is told so."""
    return isinstance(value, random.Random) or hasattr(value, "bit_generator") or _view(value) is not None


def put_back(value: Any, before: Any) -> bool:
    """Give a value what it held; return whether it is one of these, and that can be done."""
    if isinstance(value, random.Random):
        value.setstate(before)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = before[1]
    elif isinstance(value, _STREAMS):
        value.seek(before[0])
        value.truncate()
    elif isinstance(value, bytearray):
        value[:] = before
    elif hasattr(value, "frombytes"):
        del value[:]
        value.frombytes(before)
    elif (view := _view(value)) is not None and view.nbytes == len(before):
        view.cast("B")[:] = before
    else:
        return False
    return True


def _view(value: Any) -> memoryview | None:
    is_ctypes = isinstance(value, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union))
    if not (is_ctypes or isinstance(value, (bytearray, memoryview)) or hasattr(value, "frombytes")):
        return None
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    return None if view.readonly or not view.c_contiguous else view
