"""Where one value of all rows is made, and what a tensor depends on through it.

As fake_generate.py this imports torch.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

# Code below these folders only carries out what a model's code says.
_INSIDE: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
# Code that calculates with what it is given.
_CALLED: Final = frozenset({"numpy", "scipy", "sklearn", "pandas", "polars", "pyarrow"})
# What an origin is that is no operation: a row's place, the number of rows, values of rows that the program is told.
PLACE: Final = "its place"
NUMBER: Final = "the number of rows"
TAKEN: Final = "values of rows"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value of all rows is made, and by which operation.

    ``counts`` says that it counts something, ``overflow`` that it asks whether numbers are infinite or none.
    """

    operation: str
    file: str
    line: int
    counts: bool = False
    overflow: bool = False

    def __str__(self) -> str:
        """Return it as a reason tells it, with the line of the program."""
        return f"{self.operation} over all rows at {self.place}"

    @property
    def place(self) -> str:
        """The line of the program, and what stands there."""
        text = linecache.getline(self.file, self.line).strip()
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line}" + (f" (`{text}`)" if text else "")


@dataclass(frozen=True, slots=True)
class Of:
    """That a tensor depends on rows: on which arguments, and through which one value of all rows, where it holds none.

    ``counts`` says that it is how many entries of a row are true: its length.
    """

    names: frozenset[str]
    origin: Origin | None = None
    overflow: bool = False
    counts: bool = False

    @property
    def is_of_mask(self) -> bool:
        """Whether it depends on masks alone."""
        return all("mask" in name for name in self.names)


def line_of_model() -> tuple[str, int]:
    """Return the file and the line of the model's code that is running; an empty name and 0 where none is."""
    frame = _frame_of_model()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def own_line(is_library: Callable[[str], bool]) -> tuple[str, int] | None:
    """Return the file and the line of the code that is running, where that is no library's; None where it is."""
    frame = _frame_of_model()
    if frame is None or is_library(str(frame.f_globals.get("__name__"))):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def own_place_of(error: BaseException, is_library: Callable[[str], bool]) -> str | None:
    """Return the line of own code at which an error was raised by what it calls; None where a library's code called that."""
    found: Origin | None = None
    trace = error.__traceback__
    while trace is not None:
        code, name = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__"))
        if not _is_inside(code.co_filename) and name.partition(".")[0] not in _CALLED:
            found = None if is_library(name) else Origin(TAKEN, code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return None if found is None else found.place


def _frame_of_model() -> Any:
    frame: Any = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_inside(file: str) -> bool:
    """Return whether code is torch's or ours."""
    return file.startswith((*_INSIDE, "<"))
