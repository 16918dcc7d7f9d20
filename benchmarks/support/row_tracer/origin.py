"""Where one value of all rows is made, and what a tensor depends on through it.

As fake_generate.py this imports torch.
"""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import oomguard

# Code below these folders only carries out what a model's code says.
_INSIDE: Final = (
    str(Path(torch.__file__).parent),
    str(Path(oomguard.__file__).parent),
    str(Path(__file__).parent),
)
# What an origin is that is no operation: a row's place.
PLACE: Final = "its place"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value of all rows is made, and by which operation.

    ``counts`` says that it counts something, ``overflow`` that it asks whether numbers are infinite
    or none.
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
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line}" + (
            f" (`{self.text}`)" if self.text else ""
        )

    @property
    def text(self) -> str:
        """What stands in the line of the program."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True, slots=True)
class Of:
    """That a tensor depends on rows: on which arguments, and through which one value of all rows,
    where it holds none.

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
    """Return the file and the line of the model's code that is running; an empty name and 0 where
    none is.
    """
    frame = _frame_of_model()
    if frame is None:
        return ("", 0)
    return (frame.f_code.co_filename, frame.f_lineno)


def _frame_of_model() -> Any:
    frame: Any = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_inside(file: str) -> bool:
    """Return whether code is torch's, oomguard's or the tracer's."""
    return file.startswith((*_INSIDE, "<"))
