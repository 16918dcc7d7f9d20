"""Expand paths to inputs: a file, a folder, a pattern, objects behind a URL (any of fsspec's).

The inputs keep the order of the paths and are sorted within each. The last part recognizes files
that are not logs, by their first bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from oomguard.core.errors import InputError
from oomguard.core.installation import install_hint
from oomguard.core.records import Record
from oomguard.scan.source import decompress, format_of, printable_path

# A log's path may show its writer: a pod and container, a node, a job, a task, a rank. inputs.toml
# has the patterns.

_FILE: Final = Path(__file__).with_name("inputs.toml")


@dataclass(frozen=True, slots=True, repr=False)
class Writer(Record):
    """Describe the writer of a log by its path; None fields are unknown.

    ``layout`` is the name of the matching layout.
    """

    layout: str | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None
    node: str | None = None
    job: str | None = None
    task: str | None = None
    rank: str | None = None
    process: str | None = None
    session: str | None = None
    pid: str | None = None

    @property
    def words(self) -> str:
        """Return the writer in words, as ``pod ns/name container engine``; empty if unknown."""
        pod = "/".join(filter(None, (self.namespace, self.pod)))
        job = "_".join(filter(None, (self.job, self.task)))
        named = (
            ("pod", pod),
            ("container", self.container),
            ("node", self.node),
            ("job", job),
            ("rank", self.rank),
            ("", None if job or pod else self.process),
        )
        return " ".join(f"{what} {name}".strip() for what, name in named if name)


class Layout(NamedTuple):
    """Describe one convention for log names: the pattern of a path."""

    name: str
    pattern: re.Pattern[str]


@functools.cache
def layouts() -> tuple[Layout, ...]:
    """Return the known layouts, read once."""
    import tomllib  # one log by name needs no layout

    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["layout"]
    return tuple(Layout(row["name"], re.compile(row["pattern"])) for row in rows)


@functools.lru_cache(maxsize=1024)
def writer_of(path: str) -> Writer:
    """Return the writer of the log at this path or URL."""
    for layout in layouts():
        if found := layout.pattern.search(path):
            groups = found.groupdict()
            groups["job"] = groups.get("job") or groups.pop("submission", None)
            return Writer(
                layout.name,
                **{name: groups.get(name) for name in Writer.__slots__ if name != "layout"},
            )
    return Writer()


def is_log_of_layout(path: str) -> bool:
    """Return whether the path matches a log in a known layout."""
    return writer_of(path).layout is not None


# Expand patterns like ``glob``, but without endless loops through links in ``**``.

_ANY_DEPTH = "**"


def matching(pattern: str) -> list[str]:
    """Return the matching paths, sorted and written like the pattern: ``./a`` stays ``./a``."""
    return sorted(set(_matching(pattern)))


def _matching(pattern: str) -> Iterator[str]:
    parts = pattern.split(os.sep)  # noqa: PTH206 - ./ and // stay
    if _ANY_DEPTH not in parts:
        # The pattern is a whole path in this folder or the root.
        yield from glob.iglob(pattern)  # noqa: PTH207
        return
    at = parts.index(_ANY_DEPTH)
    # This part is a pattern.
    above, below = os.sep.join(parts[:at]), os.sep.join(parts[at + 1 :]) or "*"  # noqa: PTH118
    if at == 1 and not parts[0]:
        above = os.sep
    for start in glob.iglob(above) if above else ("",):  # noqa: PTH207 - as above
        for folder in _folders_from(start, frozenset()):
            # This part is unchanged.
            yield from _matching(os.path.join(glob.escape(folder), below))  # noqa: PTH118


def _folders_from(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield a folder and its visible sub-folders, without links back to a parent folder."""
    try:
        about = os.stat(folder or os.curdir)  # noqa: PTH116 - as below
        children = sorted(os.scandir(folder or os.curdir), key=lambda child: child.name)
    except (OSError, ValueError):
        return
    own = (about.st_dev, about.st_ino)
    if own in above:
        return
    yield folder
    for child in children:
        if not child.name.startswith(".") and child.is_dir():
            # An empty name stays empty.
            yield from _folders_from(os.path.join(folder, child.name), above | {own})  # noqa: PTH118


_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SAMPLE_BYTES: Final = 1024
# A project's folder has these files besides its logs. A file in the named folder itself is always
# read.
_SOURCE_CODE: Final = (
    ".py",
    ".pyi",
    ".ipynb",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".cuh",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".css",
    ".sh",
    ".md",
    ".rst",
    ".toml",
    ".yaml",
    ".yml",
    ".lock",
    ".csv",
    ".svg",
)


class Input(NamedTuple):
    """Describe one input; ``is_named`` means that the user named it directly.

    ``size_bytes`` and ``modified_at`` (Unix seconds) are None if unknown: standard input, a pipe.
    Inputs with the same ``file`` are one file under several names; None if it is not a file or
    unknown.
    """

    path: str
    is_named: bool
    size_bytes: int | None = None
    modified_at: float | None = None
    file: object = None


@dataclass(slots=True)
class Inputs:
    """Hold the found inputs, errors of paths without any, empty folders and broken links.

    ``no_logs`` is the number of skipped files in sub-folders, binary or source code by name.
    """

    found: list[Input] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)
    no_logs: int = 0


def is_url(path: str) -> bool:
    """Return whether a path is a remote object (``s3://bucket/logs``); local files come first."""
    return _URL.match(path) is not None and not os.path.lexists(path)


def find_inputs(paths: Iterable[str]) -> Inputs:
    """Return the inputs of all paths.

    A folder includes its files and sub-folders. From those it skips hidden files, binaries and
    source code, and does not follow links to folders. A pattern (``*``, ``?``, ``[…]``, ``**``)
    applies if no file has that name.
    """
    inputs = Inputs()
    for path in paths:
        try:
            before = len(inputs.found)
            inputs.found += _at(path, inputs)
            if len(inputs.found) == before:
                inputs.empty.append(path)
        except InputError as error:
            inputs.errors.append(error)
        except OSError as error:
            inputs.errors.append(InputError(f"{printable_path(path)}: {error.strerror}"))
        except ValueError:  # a null byte in the name, which a read reports
            inputs.found.append(Input(path, is_named=True))
    return inputs


def _at(path: str, inputs: Inputs) -> Iterator[Input]:
    if path == "-":
        yield Input(path, is_named=True)
    elif is_url(path):
        yield from find_objects(path)
    elif Path(path).is_dir():
        yield from (_local(found, is_named=False) for found in _files_in(path, inputs))
    elif glob.has_magic(path) and not os.path.lexists(path):
        files = list(_are_files(matching(path), inputs.dangling))
        if not files:
            raise InputError(
                f"{printable_path(path)}: no file matches",
                hint="quote the pattern; ** takes folders of any depth",
            )
        yield from (_local(name, is_named=False) for name in files)
    else:
        yield _local(path, is_named=True)


def _local(path: str, *, is_named: bool) -> Input:
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return Input(path, is_named)  # a read reports the reason
    if not stat.S_ISREG(about.st_mode):
        return Input(path, is_named)
    return Input(path, is_named, about.st_size, about.st_mtime, (about.st_dev, about.st_ino))


def _are_files(paths: Iterable[str], dangling: list[str]) -> Iterator[str]:
    """Yield the matched paths that are files, and add broken links to ``dangling``."""
    for path in paths:
        if os.path.isfile(path):  # noqa: PTH113 - ./a stays ./a
            yield path
        elif os.path.islink(path) and not os.path.exists(path):  # noqa: PTH114, PTH110
            dangling.append(path)


def _files_in(top: str, inputs: Inputs) -> Iterator[str]:
    """Yield the files in a folder, sorted, then those of each sub-folder."""

    def refuse(error: OSError) -> None:
        if error.filename == top:
            raise error
        inputs.errors.append(InputError(f"{printable_path(str(error.filename))}: {error.strerror}"))

    for folder, below, names in os.walk(top, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith("."))
        # os.walk treats links to folders as folders. Paths keep their form, so that ./a stays ./a.
        paths = [os.path.join(folder, name) for name in sorted(names)]  # noqa: PTH118
        for path in _are_files(paths, inputs.dangling):
            if folder == top or _may_be_log(path):
                yield path
            else:
                inputs.no_logs += 1


def _may_be_log(path: str) -> bool:
    """Return whether a file in a sub-folder may be a log or a snapshot."""
    name = Path(path).name.lower()
    if name.startswith(".") or name.endswith(_SOURCE_CODE):
        return False
    if is_named_pickle(name):
        return True
    try:
        with Path(path).open("rb") as file:
            head = file.read(_SAMPLE_BYTES)
    except OSError:
        return True  # a read reports why it fails
    return b"\0" not in head or head.startswith(WIDE_TEXT) or format_of(head) is not None


# Several paths may lead to one file: links, folders within folders, overlapping patterns. Each file
# is read once.


def read_once(inputs: Sequence[Input], *, keeps_named: bool) -> tuple[list[Input], int]:
    """Return the inputs in order without duplicates, and the number of duplicates.

    Among several paths the one with the most information about the writer stays, then one without a
    link, then the first.

    Args:
        inputs: all found inputs.
        keeps_named: whether every path that the user named stays, with its own answer.
    """
    same: dict[object, list[Input]] = {}
    for one in inputs:
        if one.file is not None:
            same.setdefault(one.file, []).append(one)
    dropped: set[int] = set()
    for paths in same.values():
        if len(paths) > 1:
            dropped.update(id(one) for one in _repeated(paths, keeps_named))
    return [one for one in inputs if id(one) not in dropped], len(dropped)


def _repeated(paths: Sequence[Input], keeps_named: bool) -> Iterable[Input]:
    if keeps_named:
        named = [one for one in paths if one.is_named]
    else:
        named = []
    kept = named or [min(paths, key=_rank)]  # min() returns the first of equals
    return (one for one in paths if not any(one is other for other in kept))


def _rank(one: Input) -> tuple[int, bool]:

    writer = writer_of(one.path)
    fields = (
        writer.namespace,
        writer.pod,
        writer.container,
        writer.node,
        writer.job,
        writer.task,
        writer.rank,
    )
    # A ".." stays.
    has_link = not is_url(one.path) and os.path.realpath(one.path) != os.path.abspath(one.path)  # noqa: PTH100
    return -sum(each is not None for each in fields), has_link


# Recognize inputs that are not logs by their first bytes: false snapshots, other pickles.


# Enough for a tar's headers before its first file and the beginning of that file.
NON_LOG_HEAD_BYTES: Final = 16 << 10
# A dump begins with a dict whose first key is ``segments``, in protocols 2 to 5.
_BEGINS_AS_SNAPSHOT: Final = (
    rb"(?s)\x80[\x02-\x05](?:\x95.{8})?\}(?:\x94|q.)\(?(?:X\x08\0\0\0|\x8c\x08)segments"
)
_PICKLE: Final = rb"\x80[\x00-\x1f]"
# Protocols 0 and 1 have no header: the file begins with an import, or the dict or list of a dump.
_OLD_PICKLE: Final = (
    rb"(?s)c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n(?:\([SI(]['\"\d(]|\([XU].|\)R|[qp].)"
    rb"|\([dlt](?:p\d+\n|\.|\([SIVlt])|[}\]]q.|\(S'[^\n]*'\n"
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


def is_pickle(head: bytes) -> bool:
    """Return whether a file is a pickle by its first bytes. No text begins with byte 0x80."""
    return bool(re.match(_PICKLE, head) or re.match(_OLD_PICKLE, head))


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
    from oomguard.scan.snapshot import old_instructions

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


# Objects are read in blocks of this size, so a usual log needs one request.
_BLOCK_BYTES: Final = 8 << 20
_MAGIC: Final = frozenset("*?[")
# The packages that read objects, by the protocol of the URL; names for pip.
_PACKAGES: Final = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
}
_SIZES: Final = ("size", "Size")
_TIMES: Final = ("LastModified", "mtime", "updated", "last_modified", "created")


def find_objects(url: str) -> Iterator[Input]:
    """Yield the objects of a URL: itself, its contents, or the matches of a pattern.

    Raises:
        InputError: the listing failed, with the reason, or the protocol's package is missing.
    """
    with _as_input_errors(url):
        system, path = _system(url)
        if _MAGIC & set(path):
            matched = {
                name: about
                for name, about in system.glob(path, detail=True).items()
                if about["type"] == "file"
            }
            if not matched:
                raise InputError(
                    f"{printable_path(url)}: no object matches",
                    hint="** takes folders of any depth",
                )
            yield from (_input(system, matched[name], is_named=False) for name in sorted(matched))
            return
        about = system.info(path)
        if about["type"] == "file":
            yield Input(url, True, _size(about), _modified_at(about), _file(system, about))
            return
        inside = system.find(path, detail=True)
        top = str(about["name"]).rstrip("/")
        for name in sorted(inside):
            is_direct = "/" not in name[len(top) :].strip("/")
            if is_direct or is_log_of_layout(name):
                yield _input(system, inside[name], is_named=False)


def open_object(url: str, on_read: Callable[[int], None] | None = None) -> IO[bytes]:
    """Open an object like ``open_log`` opens a file, unpacking a compressed one.

    Raises:
        InputError: with the reason why it is unreadable.
    """
    with _as_input_errors(url):
        system, path = _system(url)
        return decompress(
            cast("IO[bytes]", _NamedStream(system.open(path, "rb", block_size=_BLOCK_BYTES), url)),
            url,
            on_read,
        )


def modified_at(url: str) -> float | None:
    """Return an object's last modification in Unix seconds, or None if unknown."""
    with contextlib.suppress(Exception):
        system, path = _system(url)
        return _modified_at(system.info(path))
    return None


class _NamedStream:
    """Wrap a stream so that its errors name the object.

    A library's error in the middle of a read is a failure of the input.
    """

    def __init__(self, stream: Any, url: str) -> None:
        self._stream = stream
        self._url = url

    def read(self, size: int = -1, /) -> bytes:
        with _as_input_errors(self._url):
            return bytes(self._stream.read(size))

    def readinto(self, buffer: Any, /) -> int:
        with _as_input_errors(self._url):
            return int(self._stream.readinto(buffer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _system(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0].lower()
    try:
        import fsspec
    except ImportError:
        raise InputError(
            f"{printable_path(url)}: oomguard needs fsspec to read it, which is not installed",
            hint=install_hint("fleet"),
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError:
        package = _PACKAGES.get(protocol)
        if package:
            hint = f"pip install {package}"
        else:
            hint = "fsspec's documentation names the package"
        raise InputError(
            f"{printable_path(url)}: the package for {protocol}:// is not installed", hint=hint
        ) from None
    except ValueError as error:
        raise InputError(
            f"{printable_path(url)}: {error}",
            hint="give a path, s3://BUCKET/KEY or gs://BUCKET/KEY",
        ) from None
    return system, path


@contextlib.contextmanager
def _as_input_errors(url: str) -> Iterator[None]:
    """Raise every error of an object as InputError, because libraries have their own types."""
    try:
        yield
    except (InputError, GeneratorExit, MemoryError):
        raise
    except PermissionError as error:
        hint = "check this process's credentials, and that they permit listing and reading"
        raise InputError(
            f"{printable_path(url)}: no permission ({_short(error)})", hint=hint
        ) from None
    except FileNotFoundError:
        raise InputError(
            f"{printable_path(url)}: there is no such object, folder or bucket"
        ) from None
    except Exception as error:  # noqa: BLE001
        # botocore, aiohttp and gcsfs raise their own families of errors.
        no_credentials = type(error).__name__ == "NoCredentialsError"
        raise InputError(
            f"{printable_path(url)}: {type(error).__name__}: {_short(error)}",
            hint="set the credentials, for example: aws configure" if no_credentials else None,
        ) from None


def _short(error: BaseException) -> str:
    return printable_path(" ".join(str(error).split()))[:200] or "no reason given"


def _input(system: Any, about: Mapping[str, Any], *, is_named: bool) -> Input:
    name = str(system.unstrip_protocol(about["name"]))
    return Input(name, is_named, _size(about), _modified_at(about), _file(system, about))


def _file(system: Any, about: Mapping[str, Any]) -> object:
    """Return the identity of an object under any name; links count as their target."""
    if type(system).__name__ == "LocalFileSystem":
        with contextlib.suppress(OSError, ValueError):
            there = Path(about["name"]).stat()
            return there.st_dev, there.st_ino
    return str(system.unstrip_protocol(about["name"]))


def _size(about: Mapping[str, Any]) -> int | None:
    return next((int(about[name]) for name in _SIZES if about.get(name) is not None), None)


def _modified_at(about: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        value = about.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
    return None
