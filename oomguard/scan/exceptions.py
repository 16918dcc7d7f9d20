"""Turn exceptions into lines for the scanner: frames and message of each link, root first."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from oomguard.scan.lines import LIBRARY
from oomguard.scan.source import Line

# A memory failure is one of these or a subclass. A KeyError that quotes such a message is not.
_CARRIERS = (RuntimeError, MemoryError, ValueError)
# These replace a failure from elsewhere. vLLM raises one for its dead core (the class differs by
# version). Ray raises one for a worker that its memory monitor or the kernel killed, and for an
# actor that failed in its constructor.
_CARRIERS_BY_NAME = frozenset(
    {"EngineDeadError", "OutOfMemoryError", "WorkerCrashedError", "ActorDiedError"}
)
_MAX_LINKS = 100
MAX_FRAMES = 60


def may_be_oom(error: BaseException) -> bool:
    """Return whether this exception may be a memory failure, by type only, which is fast."""
    return any(_carries(link) for link in chain(error))


def _carries(link: BaseException) -> bool:
    if isinstance(link, _CARRIERS):
        return True
    return any(base.__name__ in _CARRIERS_BY_NAME for base in type(link).__mro__)


def _wrapped(link: BaseException) -> BaseException | None:
    """Return another process's exception in this one (Ray's ``cause``), or None.

    It is also None if this one's own text has the other's words. The text then has the other
    process's traceback, which the exception object does not.
    """
    cause = vars(link).get("cause")
    if not isinstance(cause, BaseException) or (
        _carries(link) and _message(cause) in _message(link)
    ):
        return None
    return cause


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, latest first, like a traceback, including groups.

    An exception from another process counts as the cause of the one that brings it.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_LINKS:
        link = waiting.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += reversed(link.exceptions)
        waiting.append(_wrapped(link))
        waiting.append(link.__cause__ or (None if link.__suppress_context__ else link.__context__))


def exception_lines(error: BaseException, *, with_frames: bool = True) -> Iterator[Line]:
    """Yield the lines of each message, root first, without irrelevant exception types.

    The frames before each message show what the program did, as in a printed traceback. Most of
    the lines are frames, so messages alone (``with_frames`` False) are read much faster.
    """
    number = 1
    for link in reversed(list(chain(error))):
        if not _carries(link):
            continue
        for text in _frames(link) if with_frames else ():
            yield Line(number, 0, text)
            number += 1
        for text in f"{_printed_name(link)}: {_message(link)}".splitlines():
            yield Line(number, 0, text)
            number += 1


# These files only pass a call on, and they are half of the frames of a model's call.
_PASSING_ON = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py")


def _frames(link: BaseException) -> Iterator[str]:
    """Yield the last frames of an exception, those of the user with the source line if readable."""
    # A log does not need it.
    import traceback

    # For an unprintable traceback the message is enough.
    with contextlib.suppress(Exception):
        for frame in traceback.extract_tb(link.__traceback__)[-MAX_FRAMES:]:
            if frame.filename.replace("\\", "/").endswith(_PASSING_ON):
                continue
            yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
            if not re.search(LIBRARY, frame.filename) and frame.line:
                yield f"    {frame.line}"


def _printed_name(link: BaseException) -> str:
    """Return an exception's type name as in a traceback; torch's for its subclasses."""
    kind = type(link)
    for base in type(link).__mro__:
        if base.__name__ == "OutOfMemoryError":
            kind = base
            break
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(link: BaseException) -> str:
    """Return the exception's text, even if its ``__str__`` fails."""
    try:
        return str(link)
    except Exception:  # noqa: BLE001
        return ""
