"""Recognize inputs that are not logs by their first bytes: false snapshots, other pickles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from oomguard.core.errors import InputError
from oomguard.scan.safe_pickle import is_pickle, old_instructions
from oomguard.scan.source import printable_path

# Enough for a tar's headers before its first file and the beginning of that file.
HEAD_BYTES: Final = 16 << 10
# A dump begins with a dict whose first key is ``segments``, in protocols 2 to 5.
_BEGINS_AS_SNAPSHOT: Final = (
    rb"(?s)\x80[\x02-\x05](?:\x95.{8})?\}(?:\x94|q.)\(?(?:X\x08\0\0\0|\x8c\x08)segments"
)
_PICKLES: Final = (".pickle", ".pkl", ".pt", ".pth")
_ENDLESS_NUMBER: Final = rb"[IL]-?\d{100}"
_TARS: Final = (".tar", ".tgz", ".txz", ".tbz2")
_ZIP: Final = b"PK\x03\x04"
# No text has these control characters. Tabs, line ends, backspaces, form feeds and escapes are
# fine.
_BINARY: Final = rb"[\x00-\x07\x0e-\x1a\x1c-\x1f]"
WIDE_TEXT: Final = (b"\xff\xfe", b"\xfe\xff")
_HTML: Final = rb"(?i)\s*<(?:!doctype|html|head|\?xml)\b"
_LFS: Final = b"version https://git-lfs.github.com/spec/"
_DUMP: Final = "create a snapshot with torch.cuda.memory._dump_snapshot(FILE)"
_TAR_BLOCK: Final = 512
_PACKED: Final = (".gz", ".xz", ".bz2", ".zst", ".zstd")


def is_other_pickle(head: bytes) -> bool:
    """Return whether a file is a pickle of something else: results, or weights."""
    return is_pickle(head) and not re.match(_BEGINS_AS_SNAPSHOT, head)


def is_named_pickle(path: str) -> bool:
    """Return whether a path has the name of a pickle, compressed or not."""
    return _unpacked_name(path).endswith(_PICKLES)


def is_foreign(head: bytes) -> bool:
    """Return whether a file named like a pickle is neither a pickle nor a possible log."""
    return not is_pickle(head) and _foreign(head) is not None


def refuse_foreign(head: bytes, path: str) -> None:
    """Reject a file named like a pickle that is neither a pickle nor a possible log.

    Raises:
        InputError: a web page, a Git LFS pointer, or bytes without a pickle's header, as in a
            damaged file.
    """
    if is_named_pickle(path) and not is_pickle(head) and (problem := _foreign(head)) is not None:
        raise InputError(f"{printable_path(path)}: {problem[0]}", hint=problem[1])


def no_failure_in_text(path: str) -> InputError:
    """Return the error for a text named like a pickle that contains no memory failure."""
    return InputError(
        f"{printable_path(path)}: is a text without a memory failure, not an allocation snapshot",
        hint=f"{_DUMP}; a log: oomguard diagnose - < {printable_path(path)}",
    )


def refuse_archive(head: bytes, path: str) -> None:
    """Reject a file named like a snapshot that contains no text.

    Raises:
        InputError: a zip (also from ``torch.save``), an empty or one-byte file with such a name, a
            tar with a pickle, or a pickle of protocol 0 or 1 that is not a dict or list and imports
            nothing, which ``is_pickle`` cannot distinguish from text.
    """
    name = _unpacked_name(path)
    as_text = printable_path(path)
    if name.endswith(_PICKLES) and len(head) < 2:
        if not head:
            what = "is empty"
        else:
            what = "has one byte"
        raise InputError(
            f"{as_text}: {what}: the snapshot is truncated",
            hint="check whether the disk is full, then dump it again",
        )
    if name.endswith(_PICKLES) and head.startswith(_ZIP):
        raise InputError(
            f"{as_text}: is a zip archive from torch.save, which oomguard does not read",
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
                f"{as_text}: is a tar archive with {printable_path(inner)}, and oomguard does not "
                "read archives",
                hint=f"tar -xOf {as_text} {printable_path(inner)} | oomguard diagnose -",
            )


def _foreign(head: bytes) -> tuple[str, str] | None:
    """Describe a file without a pickle's header and the next step; None for a text."""
    if head.startswith(_LFS):
        return "is a pointer of Git LFS, not the file", "git lfs pull"
    if re.match(_HTML, head):
        return (
            "is a web page (HTML), not an allocation snapshot; the download may have failed",
            "open it in a browser; download it again",
        )
    if not head.startswith(WIDE_TEXT) and re.search(_BINARY, head):
        begins = " ".join(f"{byte:02x}" for byte in head[:4])
        return (
            f"is not a pickle and may be damaged: it begins with {begins}, a pickle with 80",
            f"copy it again; {_DUMP}",
        )
    return None


def _is_old_pickle(head: bytes) -> bool:
    """Return whether a file without a header is a complete pickle, or begins with a huge number."""
    names = [name for name, _argument in old_instructions(head)]
    return (len(names) > 1 and names[-1] == "STOP") or re.match(_ENDLESS_NUMBER, head) is not None


def _unpacked_name(path: str) -> str:
    name = path.lower()
    return next((name.removesuffix(suffix) for suffix in _PACKED if name.endswith(suffix)), name)


def _tar_files(head: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and beginning of a tar's first file, after folders and long names."""
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
