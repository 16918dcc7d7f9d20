"""Read a pickle of plain data, and nothing else: before it is loaded, every instruction in it is
looked at.

A pickle is a program. What torch dumps needs few of the instructions: those that make dicts, lists,
texts and numbers. A pattern lets these pass, at the speed of ``re``; the first that is none of them
is refused by name and never reached. So no name is looked up, no object is made or called, and no
size that a file claims is allocated before the bytes are there.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

# A history of 100,000 events is about 25 MB. What a file may make of itself in memory is limited by
# its bytes, and by its dicts and lists, one byte each: an empty dict takes 64.
MOST_BYTES: Final = 512 << 20
MOST_CONTAINERS: Final = 16_000_000

_STOP = 0x2E
_FRAME = 0x95
_SHORT_TEXT = 0x8C
_TEXT = 0x58
_LONG_PUT = 0x72
_LONG: Final = b"|".join(b"\\x%02x" % size + b"." * size for size in range(10))
_INT: Final = rb"(?:K.|M..|J....|\x8a(?:" + _LONG + rb"))"
# Instructions of a fixed length, in a run: what was made before, by its number; dicts, lists,
# marks, None and yes/no; integers of nine bytes at most, a pair of them (a pool's id) and floats.
# No other tuple: the hash of nested ones takes forever, or the stack. Dots in place of {4}, and
# what there is most of first: it is a third faster.
_RUN: Final = re.compile(
    rb"(?s:j....|[\x94(ue}\]Nas)\x88\x89]|[hq].|" + _INT + rb"(?:" + _INT + rb"\x86)?|G........)*+"
)
# Those of them that have an argument, and the bytes that it takes at most with its instruction.
_WITH_ARGUMENT: Final = b"KMJGhjqr\x8a"
_MOST_ARGUMENT_BYTES: Final = 11
_BEGINS: Final = re.compile(rb"\x80[\x00-\x1f]")
# Protocols 0 and 1 have no header: a name to import with what is done with it, or the dict or list
# with which a dump begins.
_BEGINS_OLD: Final = re.compile(
    rb"(?s)c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n(?:\([SI(]['\"\d(]|\([XU].|\)R|[qp].)|\([dlt](?:p\d+\n|\.|\([SIVlt])|[}\]]q.|\(S'[^\n]*'\n"
)
_NAME: Final = re.compile(rb"([^\n]{0,200})\n([^\n]{0,200})\n")
_SMALLER: Final = "record fewer events, _record_memory_history(max_entries=100_000)"
HEAD_BYTES: Final = 512
_SHOWN_BYTES: Final = 200
_LOOKED_AT_BYTES: Final = 64 << 10


class RefusedError(Exception):
    """A pickle that is not read; the text says why, and what it wanted to run."""


class CutOffError(RefusedError):
    """A pickle that ends early; up to there it is plain data."""

    def __init__(self) -> None:
        super().__init__("it is cut off")


def is_pickle(head: bytes) -> bool:
    """Return whether a file is a pickle, by its first ``HEAD_BYTES`` bytes: no text begins with
    byte 0x80.
    """
    return bool(_BEGINS.match(head) or _BEGINS_OLD.match(head))


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the cyclic collector off: it would walk the millions of new objects again and again."""
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
        RefusedError: it holds anything else, is cut off or damaged, or would take more memory than
            any snapshot.
    """
    check(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except RefusedError:
        raise
    except MemoryError:
        raise RefusedError("it does not fit into this machine's memory") from None
    except Exception as error:  # noqa: BLE001
        # a damaged pickle raises anything, and all of it means the same
        raise RefusedError(f"it is damaged: {error or type(error).__name__}") from None


class _Plain(pickle.Unpickler):
    """The second line: what ``check`` let pass asks for none of these."""

    def find_class(self, module: str, name: str) -> Any:
        raise RefusedError(f"it wants to import {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedError("it refers to an object outside itself")


def check(data: bytes) -> None:
    """Look at every instruction of a pickle. Raises RefusedError at the first that plain data does
    not need.
    """
    if len(data) > MOST_BYTES:
        raise RefusedError(f"it has more than {MOST_BYTES >> 20} MiB: {_SMALLER}")
    if not _BEGINS.match(data):
        raise RefusedError(
            f"its protocol is 0 or 1, which torch does not write{_wanted_by_old(data)}"
        )
    if data[1] not in range(2, 6):
        raise RefusedError(f"its protocol is {data[1]}, and 2 to 5 are read")
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
    """Return where the argument of a text, a frame or a note begins and its bytes; None for any
    other instruction.
    """
    code = data[at]
    number = int.from_bytes(data[at + 1 : at + 5], "little")
    if code == _SHORT_TEXT:
        return at + 2, number & 0xFF
    if code == _TEXT:
        return at + 5, number
    if code == _FRAME:
        return at + 9, 0
    # A note of a larger number than there are objects so far would make room for all below it.
    if code == _LONG_PUT and number <= at:
        return (at + 5, 0)
    return None


def _named(data: bytes, at: int, texts: tuple[bytes, bytes]) -> str:
    """Return which instruction is refused, and what it would have run, as far as it
    stands there.
    """
    import pickletools  # only a refused pickle waits for it

    found = next((op for op in pickletools.opcodes if op.code == chr(data[at])), None)
    if found is None:
        return f"byte {at} is no instruction of a pickle"
    where = f"{found.name} at byte {at}"
    if found.name in {"GLOBAL", "INST"} and (name := _NAME.match(data, at + 1)):
        return f"it wants to import {_text(name[1])}.{_text(name[2])} ({where})"
    if found.name == "STACK_GLOBAL":
        names = ".".join(_text(text) for text in texts if text)
        return f"it wants to import {names or 'a name'} ({where})"
    if found.name in {"EXT1", "EXT2", "EXT4"}:
        return f"it wants an object that copyreg registers ({where})"
    return f"it holds {where}, which plain data does not need"


def _wanted_by_old(data: bytes) -> str:
    """Return what a pickle of protocol 0 or 1 would import first; where nothing of it stands near
    its beginning, what to do.
    """
    for name, argument in old_instructions(data[:_LOOKED_AT_BYTES]):
        if name in {"GLOBAL", "INST"}:
            return f", and it wants to import {'.'.join(str(argument).split(' ', 1))[:401]}"
    return ": it writes 2 and newer; dump it again"


def old_instructions(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the instructions of a pickle without a header, with their arguments, up to the first
    that is none or is not whole.
    """
    import pickletools  # only a refused pickle waits for it

    with suppress(ValueError):  # also of a number, or a text, that cannot be
        for instruction, argument, _at in pickletools.genops(data):
            yield instruction.name, argument


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
