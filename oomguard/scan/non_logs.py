"""Inputs that are no log by their first bytes: what is named as a snapshot and is none, and other
pickles in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from oomguard.core.errors import InputError
from oomguard.scan.safe_pickle import is_pickle, old_instructions
from oomguard.scan.source import shown

# Enough for the headers before the first file of a tar and the beginning of that file.
HEAD_BYTES: Final = 16 << 10
# How a dump begins: a dict whose first key is ``segments``, in protocols 2 to 5.
_BEGINS_AS_SNAPSHOT: Final = (
    rb"(?s)\x80[\x02-\x05](?:\x95.{8})?\}(?:\x94|q.)\(?(?:X\x08\0\0\0|\x8c\x08)segments"
)
_PICKLES: Final = (".pickle", ".pkl", ".pt", ".pth")
_ENDLESS_NUMBER: Final = rb"[IL]-?\d{100}"
_TARS: Final = (".tar", ".tgz", ".txz", ".tbz2")
_ZIP: Final = b"PK\x03\x04"
# What no text has: control characters but for tabs, line ends, backspaces, form feeds and escapes.
_BINARY: Final = rb"[\x00-\x07\x0e-\x1a\x1c-\x1f]"
WIDE_TEXT: Final = (b"\xff\xfe", b"\xfe\xff")
_HTML: Final = rb"(?i)\s*<(?:!doctype|html|head|\?xml)\b"
_LFS: Final = b"version https://git-lfs.github.com/spec/"
_DUMP: Final = "a snapshot is what torch.cuda.memory._dump_snapshot(FILE) writes"
_TAR_BLOCK: Final = 512
_PACKED: Final = (".gz", ".xz", ".bz2", ".zst", ".zstd")


def is_other_pickle(head: bytes) -> bool:
    """Return whether a file is a pickle that does not begin as a snapshot does: results, or
    weights.
    """
    return is_pickle(head) and not re.match(_BEGINS_AS_SNAPSHOT, head)


def is_named_pickle(path: str) -> bool:
    """Return whether a path has the name of a pickle, packed or not."""
    return _unpacked_name(path).endswith(_PICKLES)


def is_foreign(head: bytes) -> bool:
    """Return whether what is named as a pickle is neither one nor a text that a log could be."""
    return not is_pickle(head) and _foreign(head) is not None


def refuse_foreign(head: bytes, path: str) -> None:
    """Refuse what is named as a pickle and is neither one nor a text that a log could be.

    Raises:
        InputError: a page, a pointer of Git LFS, or bytes without a pickle's header, as of a
            damaged file.
    """
    if is_named_pickle(path) and not is_pickle(head) and (told := _foreign(head)) is not None:
        raise InputError(f"{shown(path)}: {told[0]}", hint=told[1])


def no_failure_in_text(path: str) -> InputError:
    """Return the error for a text that is named as a pickle and tells no memory failure: the name
    promised a snapshot.
    """
    return InputError(
        f"{shown(path)}: is a text, no allocation snapshot, and no memory failure is in it",
        hint=f"{_DUMP}; a log: oomguard diagnose - < {shown(path)}",
    )


def refuse_archive(head: bytes, path: str) -> None:
    """Refuse what is named as a snapshot and holds no text that a log could be.

    Raises:
        InputError: a zip (``torch.save``'s too), an empty or a one-byte file of such a name, a tar
            with a pickle in it, or a pickle of protocol 0 or 1 that is neither a dict nor a list
            nor imports anything: ``is_pickle`` does not know it from text.
    """
    name = _unpacked_name(path)
    as_text = shown(path)
    if name.endswith(_PICKLES) and len(head) < 2:
        if not head:
            what = "is empty"
        else:
            what = "has one byte"
        raise InputError(
            f"{as_text}: {what}: the snapshot was not written to its end",
            hint="is the disk full? dump it again",
        )
    if name.endswith(_PICKLES) and head.startswith(_ZIP):
        raise InputError(
            f"{as_text}: is a zip archive, as torch.save writes it, which is not read",
            hint="a snapshot is what torch.cuda.memory._dump_snapshot(FILE) writes; one that was "
            "packed: "
            "unzip -p ARCHIVE FILE | oomguard diagnose -",
        )
    if name.endswith(_PICKLES) and not is_pickle(head) and _is_old_pickle(head):
        raise InputError(
            f"{as_text}: is a pickle of protocol 0 or 1, which torch does not write",
            hint=(
                "a snapshot is what torch.cuda.memory._dump_snapshot(FILE) writes: protocol 2 or "
                "newer"
            ),
        )
    for inner, content in _tar_files(head) if name.endswith((*_PICKLES, *_TARS)) else ():
        if inner.endswith(_PICKLES) or is_pickle(content):
            raise InputError(
                f"{as_text}: is a tar archive that holds {shown(inner)}, and archives are not read",
                hint=f"tar -xOf {as_text} {shown(inner)} | oomguard diagnose -",
            )


def _foreign(head: bytes) -> tuple[str, str] | None:
    """Return what a file without a pickle's header is, and what to do; None for a text."""
    if head.startswith(_LFS):
        return "is a pointer of Git LFS, not the file", "git lfs pull"
    if re.match(_HTML, head):
        return (
            "is a page (HTML), no allocation snapshot: the download failed?",
            "open it in a browser; download it again",
        )
    if not head.startswith(WIDE_TEXT) and re.search(_BINARY, head):
        begins = " ".join(f"{byte:02x}" for byte in head[:4])
        return (
            f"is no pickle: it begins with {begins}, a pickle with 80: damaged?",
            f"copy it again; {_DUMP}",
        )
    return None


def _is_old_pickle(head: bytes) -> bool:
    """Return whether a file without a pickle's header is one to its end, or begins with a number
    without end.
    """
    names = [name for name, _argument in old_instructions(head)]
    return (len(names) > 1 and names[-1] == "STOP") or re.match(_ENDLESS_NUMBER, head) is not None


def _unpacked_name(path: str) -> str:
    name = path.lower()
    return next((name.removesuffix(suffix) for suffix in _PACKED if name.endswith(suffix)), name)


def _tar_files(head: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and beginning of the first file in a tar, after the folders and the long names
    before it.
    """
    at = 0
    while head[at + 257 : at + 262] == b"ustar":
        name = head[at : at + 100].partition(b"\0")[0].decode("utf-8", "backslashreplace")
        kind = head[at + 156 : at + 157]
        begin = at + _TAR_BLOCK
        if kind in {b"0", b"\0"}:
            yield name, head[begin : begin + _TAR_BLOCK]
            return
        size = re.match(rb" *([0-7]{1,11})", head[at + 124 : at + 136])
        at = begin + (-(-int(size[1], 8) // _TAR_BLOCK) * _TAR_BLOCK if size else 0)
