"""Exceptions as lines for the scanner: frames and message of each link of the chain, the first cause first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from oomguard.observe.source import Line

# A memory failure is one of these or a subclass; a KeyError that quotes such a message is a KeyError.
_CARRIERS = (RuntimeError, MemoryError, ValueError)
# What stands in place of a failure elsewhere: vLLM's for what its core died of (its classes differ by version); Ray's for a worker
# that its memory monitor killed, that the kernel killed, and for an actor that failed while it was made.
_CARRIERS_BY_NAME = frozenset({"EngineDeadError", "OutOfMemoryError", "WorkerCrashedError", "ActorDiedError"})
_MAX_LINKS = 100
MAX_FRAMES = 60


def may_be_oom(error: BaseException) -> bool:
    """Return whether a memory failure may come as this exception, by type alone: cheap, before anything is scanned."""
    return any(_carries(link) for link in chain(error))


def _carries(link: BaseException) -> bool:
    return isinstance(link, _CARRIERS) or any(base.__name__ in _CARRIERS_BY_NAME for base in type(link).__mro__)


def _wrapped(link: BaseException) -> BaseException | None:
    """Return the exception of another process that this one brings (Ray's ``cause``), unless its own text has that one's words too.

    The text has the other process's traceback, which an exception that was sent does not.
    """
    cause = vars(link).get("cause")
    if not isinstance(cause, BaseException) or (_carries(link) and _message(cause) in _message(link)):
        return None
    return cause


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and what it was raised from, latest first, as a traceback shows them, groups included.

    What another process raised counts as that from which the exception that brings it was raised.
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


def exception_lines(error: BaseException) -> Iterator[Line]:
    """Yield the lines of each message, the first cause first; exceptions whose type no memory failure has are left out.

    Before each message come the frames that led to it, as in a printed traceback: they tell what was being done.
    """
    number = 1
    for link in reversed(list(chain(error))):
        if not _carries(link):
            continue
        for text in _frames(link):
            yield Line(number, 0, text)
            number += 1
        for text in f"{_printed_name(link)}: {_message(link)}".splitlines():
            yield Line(number, 0, text)
            number += 1


def _frames(link: BaseException) -> Iterator[str]:
    """Yield the last frames of one exception, each with its line of source if that can be read."""
    import traceback  # a log has no use for it

    with contextlib.suppress(Exception):  # a traceback that cannot be shown: the message alone will do
        for frame in traceback.extract_tb(link.__traceback__)[-MAX_FRAMES:]:
            yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
            if frame.line:
                yield f"    {frame.line}"


def _printed_name(link: BaseException) -> str:
    """Return the name of an exception's type as a traceback has it; of a subclass of torch's error, torch's name."""
    kind = next((base for base in type(link).__mro__ if base.__name__ == "OutOfMemoryError"), type(link))
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(link: BaseException) -> str:
    """Return the exception's text; a ``__str__`` that fails must not take the exception's place."""
    try:
        return str(link)
    except Exception:  # noqa: BLE001
        return ""
