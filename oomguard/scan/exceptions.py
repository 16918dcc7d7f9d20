"""Exceptions as lines for the scanner: frames and message of each link of the chain, the first
cause first.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from oomguard.core.facts import Fact
from oomguard.scan.log_prefixes import TRACEBACK
from oomguard.scan.source import Line

# The line of the user's own file whose call ran out of memory, read from a printed traceback.
#
# A traceback goes from the user's file into libraries. The deepest frame that is in no library is
# the line the user can change. Python's form, IPython's cells and the arrows of both are read.

MAX_SOURCE_CHARS: Final = 160
# A traceback is printed in one piece: its frames stand close above its message.
MAX_LINES_ABOVE: Final = 400
MAX_PROCESSES: Final = 64
# Patterns as texts are compiled when the first traceback needs them.
_FRAME: Final = r'^\s*File "?(?P<file>[^"\n]{1,400}?)"?(?:, line |:)(?P<line>\d+)(?:, in (?P<function>[^\s(]+))?'
_CELL: Final = (
    r"^\s*(?P<file>(?:Cell In|Input In) ?\[\d+\]|<ipython-input-[^>]{1,80}>)"
    r"(?:, line (?P<line>\d+)| in (?P<function>[^\s(]+))"
)
# Literals of the two patterns above: most lines hold none.
_FRAME_MARKS: Final = ("File ", "Cell In", "Input In", "<ipython")
_ARROW: Final = r"^\s*-{2,}> ?(?P<line>\d+) (?P<source>.*)"
_LIBRARY: Final = (
    r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python\d|^<(?!ipython)"
    r"|[/\\](?:torch|transformers|accelerate|vllm|sglang|peft|oomguard[/\\](?:testing|guarding|engines|mapping))[/\\]"
)
_MARKERS: Final = r"^[\s~^|]*$"
_MESSAGE: Final = (
    r"(?i)^\s*(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?!\()|[\w. ]{0,20}out of memory)"
)
_MODEL_CALL: Final = (
    r"\.generate\(|\b(?:\w*model\w*|\w*pipe\w*|generator|llm|classifier|encoder|net)(?:\.\w+)?\("
)


@dataclass(slots=True)
class _Frame:
    number: int  # of the line in the input
    file: str
    line: int | None
    function: str | None
    source: str = ""


class UserFrames:
    """The deepest frame of a user's file in the latest traceback of each process."""

    def __init__(self) -> None:
        self._last: dict[str | None, _Frame] = {}
        self._waiting: dict[str | None, _Frame] = {}  # frames whose line of source comes next
        self._in_library: set[str | None] = set()

    def see(self, text: str, process: str | None, number: int) -> None:
        """Take the next line of a process, without the logger's prefix."""
        waiting = self._waiting.pop(process, None)
        if waiting is not None and not any(
            re.match(other, text) for other in (_FRAME, _MARKERS, _MESSAGE)
        ):
            waiting.source = text.strip()[:MAX_SOURCE_CHARS]
        if TRACEBACK in text:
            self._last.pop(process, None)
            return
        if any(mark in text for mark in _FRAME_MARKS):
            self._see_frame(text, process, number)
        elif (
            "->" in text
            and (arrow := re.match(_ARROW, text))
            and process in self._last
            and process not in self._in_library
        ):
            frame = self._last[process]
            frame.line, frame.source = (
                int(arrow["line"]),
                arrow["source"].strip()[:MAX_SOURCE_CHARS],
            )

    def _see_frame(self, text: str, process: str | None, number: int) -> None:
        found = re.match(_FRAME, text) or re.match(_CELL, text)
        if found is None:
            return
        if re.search(_LIBRARY, found["file"]):
            self._in_library.add(process)
            return
        self._in_library.discard(process)
        if len(self._last) >= MAX_PROCESSES:
            self._last.clear()
        line = found["line"]
        frame = _Frame(number, found["file"], int(line) if line else None, found["function"])
        self._last[process] = self._waiting[process] = frame

    def facts(self, process: str | None, number: int) -> dict[str, Fact]:
        """Return the facts of the user's call for a failure that is printed at line ``number``;
        empty if none is known.
        """
        frame = self._last.get(process)
        if frame is None or not 0 <= number - frame.number <= MAX_LINES_ABOVE or not frame.source:
            return {}
        values: dict[str, str | int | bool] = {
            "call_file": PurePosixPath(frame.file.replace("\\", "/")).name,
            "call_source": frame.source,
            "calls_model": re.search(_MODEL_CALL, frame.source) is not None,
        }
        if frame.line is not None:
            values["call_line"] = frame.line
        if frame.function is not None and not frame.function.startswith("<"):
            values["call_function"] = frame.function
        if (argument := _argument(frame.source)) is not None:
            values["call_argument"] = argument
        return {name: Fact(name, value, line=frame.number) for name, value in values.items()}


def _argument(source: str) -> str | None:
    """Return the name of the first argument of the first call in a line of source, None if it has
    none.
    """
    text = source.removeprefix("return ").removeprefix("with ").rstrip(":")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = (
        argument.id
        for call in calls[:1]
        for argument in call.args
        if isinstance(argument, ast.Name)
    )
    return next(names, None)


# A memory failure is one of these or a subclass; a KeyError that quotes such a message is a
# KeyError.
_CARRIERS = (RuntimeError, MemoryError, ValueError)
# What stands in place of a failure elsewhere: vLLM's for what its core died of (its classes differ
# by version); Ray's for a worker that its memory monitor killed, that the kernel killed, and for an
# actor that failed while it was made.
_CARRIERS_BY_NAME = frozenset(
    {"EngineDeadError", "OutOfMemoryError", "WorkerCrashedError", "ActorDiedError"}
)
_MAX_LINKS = 100
MAX_FRAMES = 60


def may_be_oom(error: BaseException) -> bool:
    """Return whether a memory failure may come as this exception, by type alone: cheap, before
    anything is scanned.
    """
    return any(_carries(link) for link in chain(error))


def _carries(link: BaseException) -> bool:
    return isinstance(link, _CARRIERS) or any(
        base.__name__ in _CARRIERS_BY_NAME for base in type(link).__mro__
    )


def _wrapped(link: BaseException) -> BaseException | None:
    """Return the exception of another process that this one brings (Ray's ``cause``), unless its
    own text has that one's words too.

    The text has the other process's traceback, which an exception that was sent does not.
    """
    cause = vars(link).get("cause")
    if not isinstance(cause, BaseException) or (
        _carries(link) and _message(cause) in _message(link)
    ):
        return None
    return cause


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and what it was raised from, latest first, as a traceback shows them,
    groups included.

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
    """Yield the lines of each message, the first cause first; exceptions whose type no memory
    failure has are left out.

    Before each message come the frames that led to it, as in a printed traceback: they tell what
    was being done.
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

    with contextlib.suppress(
        Exception
    ):  # a traceback that cannot be shown: the message alone will do
        for frame in traceback.extract_tb(link.__traceback__)[-MAX_FRAMES:]:
            yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
            if frame.line:
                yield f"    {frame.line}"


def _printed_name(link: BaseException) -> str:
    """Return the name of an exception's type as a traceback has it; of a subclass of torch's error,
    torch's name.
    """
    kind = next(
        (base for base in type(link).__mro__ if base.__name__ == "OutOfMemoryError"), type(link)
    )
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(link: BaseException) -> str:
    """Return the exception's text; a ``__str__`` that fails must not take the exception's place."""
    try:
        return str(link)
    except Exception:  # noqa: BLE001
        return ""
