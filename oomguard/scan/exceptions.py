"""Turn exceptions into lines for the scanner: frames and message of each link, root first."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from oomguard.core.facts import Fact
from oomguard.scan.lines import TRACEBACK
from oomguard.scan.source import Line

# Find the line of the user's own file whose call ran out of memory in a printed traceback.
#
# A traceback leads from the user's file into libraries. The deepest frame outside of libraries is
# the line that the user can change. This reads the forms of Python and IPython.

MAX_SOURCE_CHARS: Final = 160
# A traceback is printed at once, so its frames are directly above its message.
MAX_LINES_ABOVE: Final = 400
MAX_PROCESSES: Final = 64
# These patterns compile with the first traceback.
_FRAME: Final = r'^\s*File "?(?P<file>[^"\n]{1,400}?)"?(?:, line |:)(?P<line>\d+)(?:, in (?P<function>[^\s(]+))?'
_CELL: Final = (
    r"^\s*(?P<file>(?:Cell In|Input In) ?\[\d+\]|<ipython-input-[^>]{1,80}>)"
    r"(?:, line (?P<line>\d+)| in (?P<function>[^\s(]+))"
)
# Literals of the two patterns above; most lines contain none.
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
    number: int  # the line's number in the input
    file: str
    line: int | None
    function: str | None
    source: str = ""


class UserFrames:
    """Track the deepest user frame in each process's latest traceback."""

    def __init__(self) -> None:
        self._last: dict[str | None, _Frame] = {}
        self._waiting: dict[str | None, _Frame] = {}  # frames whose source line comes next
        self._in_library: set[str | None] = set()

    def see(self, text: str, process: str | None, number: int) -> None:
        """Add the next line of a process, without the logger's prefix."""
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
        """Return the facts of the user's call for a failure at line ``number``, if known."""
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
    """Return the first argument of the first call in a source line, or None."""
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
    return isinstance(link, _CARRIERS) or any(
        base.__name__ in _CARRIERS_BY_NAME for base in type(link).__mro__
    )


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
    import traceback  # a log does not need it

    with contextlib.suppress(Exception):  # for an unprintable traceback the message is enough
        for frame in traceback.extract_tb(link.__traceback__)[-MAX_FRAMES:]:
            if frame.filename.replace("\\", "/").endswith(_PASSING_ON):
                continue
            yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
            if not re.search(_LIBRARY, frame.filename) and frame.line:
                yield f"    {frame.line}"


def _printed_name(link: BaseException) -> str:
    """Return an exception's type name as in a traceback; torch's for its subclasses."""
    kind = next(
        (base for base in type(link).__mro__ if base.__name__ == "OutOfMemoryError"), type(link)
    )
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(link: BaseException) -> str:
    """Return the exception's text, even if its ``__str__`` fails."""
    try:
        return str(link)
    except Exception:  # noqa: BLE001
        return ""
