"""Read a pickle of plain data, after a check of every instruction in it.

A pickle is a program. torch's dumps need few instructions: those for dicts, lists, texts and
numbers. A regular expression accepts these at the speed of ``re``. The first other instruction is
rejected by name and never runs. So nothing looks up a name, creates or calls an object, or
allocates a size that the file only claims.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

# A history of 100,000 events is about 25 MB. A file's bytes limit its memory, and so do its dicts
# and lists at one byte each: an empty dict takes 64 bytes of memory.
MOST_BYTES: Final = 512 << 20
MOST_CONTAINERS: Final = 16_000_000

_STOP = 0x2E
_FRAME = 0x95
_SHORT_TEXT = 0x8C
_TEXT = 0x58
_LONG_PUT = 0x72
_LONG: Final = b"|".join(b"\\x%02x" % size + b"." * size for size in range(10))
_INT: Final = rb"(?:K.|M..|J....|\x8a(?:" + _LONG + rb"))"
# A run of instructions with a fixed length: references to earlier objects; dicts, lists, marks,
# None and booleans; integers up to nine bytes, pairs of them (a pool's id) and floats. No other
# tuples, because the hash of nested ones may never end or may exhaust the stack. Dots instead of
# {4} and the most frequent ones first make it a third faster.
_RUN: Final = re.compile(
    rb"(?s:j....|[\x94(ue}\]Nas)\x88\x89]|[hq].|" + _INT + rb"(?:" + _INT + rb"\x86)?|G........)*+"
)
# Instructions with an argument, and the maximum of its bytes including the instruction.
_WITH_ARGUMENT: Final = b"KMJGhjqr\x8a"
_MOST_ARGUMENT_BYTES: Final = 11
_BEGINS: Final = re.compile(rb"\x80[\x00-\x1f]")
_NAME: Final = re.compile(rb"([^\n]{0,200})\n([^\n]{0,200})\n")
_SMALLER: Final = "record fewer events with _record_memory_history(max_entries=100_000)"
_SHOWN_BYTES: Final = 200
_LOOKED_AT_BYTES: Final = 64 << 10


class RefusedError(Exception):
    """Report a rejected pickle; the text says why, and what it would have run."""


class CutOffError(RefusedError):
    """Report a pickle that ends early; up to there it is plain data."""

    def __init__(self) -> None:
        super().__init__("it is truncated")


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable the cyclic garbage collector, which would traverse millions of new objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load(data: bytes) -> Any:
    """Return the plain data in a pickle: dicts, lists, texts, numbers, None.

    Raises:
        RefusedError: it has other content, is truncated or damaged, or would need more memory than
            any snapshot.
    """
    check(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except RefusedError:
        raise
    except MemoryError:
        raise RefusedError("it does not fit in this machine's memory") from None
    except Exception as error:  # noqa: BLE001
        # A damaged pickle raises any exception, and all mean the same.
        raise RefusedError(f"it is damaged: {error or type(error).__name__}") from None


class _Plain(pickle.Unpickler):
    """Reject imports and references as a second check after ``check``."""

    def find_class(self, module: str, name: str) -> Any:
        raise RefusedError(f"it would import {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedError("it refers to an object outside itself")


def check(data: bytes) -> None:
    """Check every instruction of a pickle.

    Raises:
        RefusedError: at the first instruction that plain data does not need.
    """
    if len(data) > MOST_BYTES:
        raise RefusedError(f"it has more than {MOST_BYTES >> 20} MiB: {_SMALLER}")
    if not _BEGINS.match(data):
        raise RefusedError(
            f"its protocol is 0 or 1, which torch does not write{_wanted_by_old(data)}"
        )
    if data[1] not in range(2, 6):
        raise RefusedError(f"its protocol is {data[1]}, but oomguard reads 2 to 5")
    if data.count(b"}") + data.count(b"]") > MOST_CONTAINERS:
        raise RefusedError(f"it may hold more than {MOST_CONTAINERS:,} dicts and lists: {_SMALLER}")
    at = 2
    texts = (b"", b"")
    while True:
        run = _RUN.match(data, at)
        assert run is not None  # noqa: S101 - an empty run matches too
        at = run.end()
        if at >= len(data):
            raise CutOffError
        if data[at] == _STOP:
            return
        argument = _argument(data, at)
        if (
            argument is None
            and data[at] in _WITH_ARGUMENT
            and len(data) - at < _MOST_ARGUMENT_BYTES
        ):
            raise CutOffError
        if argument is None:
            raise RefusedError(_named(data, at, texts))
        begin, size = argument
        if begin + size > len(data):
            raise CutOffError
        if data[at] in {_SHORT_TEXT, _TEXT}:
            texts = (texts[1], data[begin : begin + min(size, _SHOWN_BYTES)])
        at = begin + size


def _argument(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the start and length of the argument of a text, frame or memo, or None."""
    code = data[at]
    number = int.from_bytes(data[at + 1 : at + 5], "little")
    if code == _SHORT_TEXT:
        return at + 2, number & 0xFF
    if code == _TEXT:
        return at + 5, number
    if code == _FRAME:
        return at + 9, 0
    # A memo number above the number of objects so far would allocate everything below it.
    if code == _LONG_PUT and number <= at:
        return (at + 5, 0)
    return None


def _named(data: bytes, at: int, texts: tuple[bytes, bytes]) -> str:
    """Return which instruction is rejected and what it would run, if known."""
    import pickletools  # only a rejected pickle needs it

    found = next((op for op in pickletools.opcodes if op.code == chr(data[at])), None)
    if found is None:
        return f"byte {at} is not an instruction of a pickle"
    where = f"{found.name} at byte {at}"
    if found.name in {"GLOBAL", "INST"} and (name := _NAME.match(data, at + 1)):
        return f"it would import {_text(name[1])}.{_text(name[2])} ({where})"
    if found.name == "STACK_GLOBAL":
        names = ".".join(_text(text) for text in texts if text)
        return f"it would import {names or 'a name'} ({where})"
    if found.name in {"EXT1", "EXT2", "EXT4"}:
        return f"it needs an object from the copyreg registry ({where})"
    return f"it contains {where}, which plain data does not need"


def _wanted_by_old(data: bytes) -> str:
    """Return the first import of a protocol 0 or 1 pickle, or the next step if there is none."""
    for name, argument in old_instructions(data[:_LOOKED_AT_BYTES]):
        if name in {"GLOBAL", "INST"}:
            return f", and it would import {'.'.join(str(argument).split(' ', 1))[:401]}"
    return ": it writes 2 and newer; dump it again"


def old_instructions(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield a headerless pickle's instructions with arguments, up to the first invalid one."""
    import pickletools  # only a rejected pickle needs it

    with suppress(ValueError):  # also for an impossible number or text
        for instruction, argument, _at in pickletools.genops(data):
            yield instruction.name, argument


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
