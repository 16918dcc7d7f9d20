"""Which lines of a recorded stack tell a user something: their own code and the libraries', not torch's and not C++."""

from __future__ import annotations

from typing import Any, Final

from oomguard.snapshots.records import Frame

# How many lines of a stack are kept, and how many are looked at for them: stacks with C++ begin with dozens of its frames.
KEPT_FRAMES: Final = 6
_MOST_FRAMES: Final = 256
# Whole stacks that are known again at once; a program has thousands, a file may have any number.
_MOST_STACKS: Final = 20_000
_MOST_CHARS: Final = 300
_CPP: Final = ("??", ".cpp", ".pyx", ".cc", ".c", ".h", ".o", ".so", ".cu", ".cuh")
_BEGINS_INNER: Final = ("torch/", "<frozen ", "<string>", "<eval_with_key>")
_PACKAGES: Final = ("/site-packages/torch/", "/dist-packages/torch/")

_Lines = tuple[Frame, ...]


class Stacks:
    """The stacks of one snapshot, each as the few lines that tell something; equal stacks are one and the same tuple.

    torch notes the frames of a stack once and refers to them, so what was made of a frame is kept by the object's identity: the
    snapshot must be kept as long as this.
    """

    def __init__(self) -> None:
        self._frames: dict[int, Frame | None] = {}
        self._equal: dict[Frame, Frame] = {}
        self._stacks: dict[tuple[int, ...], _Lines] = {}
        self._read_stacks: dict[tuple[int, ...], _Lines] = {}

    def of(self, frames: Any) -> _Lines:
        """Return the lines of a recorded stack, innermost first; empty for what is no stack, or has nothing but torch in it."""
        if not frames or type(frames) is not list:
            return ()
        whole = tuple(map(id, frames if len(frames) <= _MOST_FRAMES else frames[:_MOST_FRAMES]))
        lines = self._read_stacks.get(whole)
        if lines is None:
            lines = self._lines(frames)
            if len(self._read_stacks) < _MOST_STACKS:
                self._read_stacks[whole] = lines
        return lines

    def _lines(self, frames: list[Any]) -> _Lines:
        known, kept = self._frames, []
        for frame in frames[:_MOST_FRAMES]:
            key = id(frame)
            if key not in known:
                known[key] = self._read(frame)
            if (line := known[key]) is not None:
                kept.append(line)
                if len(kept) == KEPT_FRAMES:
                    break
        # Equal lines are one object, so their numbers tell a stack.
        key_of_stack = tuple(map(id, kept))
        return self._stacks.setdefault(key_of_stack, tuple(kept))

    def _read(self, frame: Any) -> Frame | None:
        """Return a frame as a line, None for one of torch's own, of C++, or of another shape."""
        read = _python_frame(frame)
        return None if read is None or _is_inner(read.file) else self._equal.setdefault(read, read)


def python_frames(frames: Any) -> _Lines:
    """Return the lines of a recorded stack that are Python, torch's own with them, innermost first."""
    if type(frames) is not list:
        return ()
    return tuple(read for frame in frames[:_MOST_FRAMES] if (read := _python_frame(frame)) is not None)


def _python_frame(frame: Any) -> Frame | None:
    if type(frame) is not dict:
        return None
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if not isinstance(file, str) or not isinstance(name, str) or not file or file.endswith(_CPP) or "::" in name:
        return None
    number = line if isinstance(line, int) and 0 <= line < 1 << 31 else 0
    return Frame(file[-_MOST_CHARS:], number, name[:_MOST_CHARS])


def _is_inner(file: str) -> bool:
    """Return whether a file is torch's own, or Python's machinery."""
    return file.startswith(_BEGINS_INNER) or any(package in file for package in _PACKAGES)
