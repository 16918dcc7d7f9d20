"""The line of the user's own file whose call ran out of memory, read from a printed traceback.

A traceback goes from the user's file into libraries. The deepest frame that is in no library is the line the user can
change. Python's form, IPython's cells and the arrows of both are read.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from oomguard.facts import Fact
from oomguard.observe.text import TRACEBACK

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
_MESSAGE: Final = r"(?i)^\s*(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?!\()|[\w. ]{0,20}out of memory)"
_MODEL_CALL: Final = r"\.generate\(|\b(?:\w*model\w*|\w*pipe\w*|generator|llm|classifier|encoder|net)(?:\.\w+)?\("


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
        if waiting is not None and not any(re.match(other, text) for other in (_FRAME, _MARKERS, _MESSAGE)):
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
            frame.line, frame.source = int(arrow["line"]), arrow["source"].strip()[:MAX_SOURCE_CHARS]

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
        """Return the facts of the user's call for a failure that is printed at line ``number``; empty if none is known."""
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
    """Return the name of the first argument of the first call in a line of source, None if it has none."""
    text = source.removeprefix("return ").removeprefix("with ").rstrip(":")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = (argument.id for call in calls[:1] for argument in call.args if isinstance(argument, ast.Name))
    return next(names, None)
