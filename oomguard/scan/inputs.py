"""The inputs that paths name: a file, a folder, a pattern, an object behind a URL; in the order of
the paths, of each sorted.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from oomguard.core.errors import InputError
from oomguard.core.records import Record
from oomguard.scan.compressed import format_of
from oomguard.scan.non_logs import WIDE_TEXT, is_named_pickle
from oomguard.scan.source import shown

# Who wrote a log, as its place tells: a pod and container, a node, a job, a task, a rank; the
# patterns are data (``inputs.toml``).

_FILE: Final = Path(__file__).with_name("inputs.toml")


@dataclass(frozen=True, slots=True, repr=False)
class Writer(Record):
    """Who wrote a log, as far as its path tells; None: the path does not tell. ``layout`` names
    whose habit the path follows.
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
        """The writer in words, as ``pod ns/name container engine``; empty where nothing
        is known.
        """
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


@dataclass(frozen=True, slots=True)
class Layout:
    """One habit of naming logs: the pattern of a path."""

    name: str
    pattern: re.Pattern[str]


@functools.cache
def layouts() -> tuple[Layout, ...]:
    """Return the known layouts, read once."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["layout"]
    return tuple(Layout(row["name"], re.compile(row["pattern"])) for row in rows)


@functools.lru_cache(maxsize=1024)
def writer_of(path: str) -> Writer:
    """Return who wrote the log at this path or URL."""
    for layout in layouts():
        if found := layout.pattern.search(path):
            told = found.groupdict()
            told["job"] = told.get("job") or told.pop("submission", None)
            return Writer(
                layout.name,
                **{name: told.get(name) for name in Writer.__slots__ if name != "layout"},
            )
    return Writer()


def is_log_of_layout(path: str) -> bool:
    """Return whether the path is that of a log in a known layout."""
    return writer_of(path).layout is not None


# The files that a pattern names: as ``glob`` has it, but no link leads ``**`` back into a folder
# that it came through.

_ANY_DEPTH = "**"


def matching(pattern: str) -> list[str]:
    """Return the paths that match, sorted, each as the pattern is written: ``./a``
    stays ``./a``.
    """
    return sorted(set(_matching(pattern)))


def _matching(pattern: str) -> Iterator[str]:
    parts = pattern.split(os.sep)  # noqa: PTH206 - ./ and // stay
    if _ANY_DEPTH not in parts:
        # the pattern is a whole path, of this folder or of the root
        yield from glob.iglob(pattern)  # noqa: PTH207
        return
    at = parts.index(_ANY_DEPTH)
    # a pattern
    above, below = os.sep.join(parts[:at]), os.sep.join(parts[at + 1 :]) or "*"  # noqa: PTH118
    if at == 1 and not parts[0]:
        above = os.sep
    for start in glob.iglob(above) if above else ("",):  # noqa: PTH207 - as above
        for folder in _folders_from(start, frozenset()):
            # as it was written
            yield from _matching(os.path.join(glob.escape(folder), below))  # noqa: PTH118


def _folders_from(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield a folder and those below it, hidden ones left out; a link to a folder above it is a way
    back and not taken.
    """
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
            # "" stays ""
            yield from _folders_from(os.path.join(folder, child.name), above | {own})  # noqa: PTH118


_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SAMPLE_BYTES: Final = 1024
# What a project's folder has beside its logs; a file that is named, or lies in the folder itself,
# is read whatever its name.
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


@dataclass(frozen=True, slots=True)
class Input:
    """One input as it is named to the user; ``is_named`` says that the user named it rather than a
    folder or pattern around it.

    ``size_bytes`` and ``modified_at`` (Unix seconds) are None where nothing tells them: standard
    input, a pipe. Inputs with the same ``file`` are one file under several names; None: it is no
    file, or nothing tells.
    """

    path: str
    is_named: bool
    size_bytes: int | None = None
    modified_at: float | None = None
    file: object = None


@dataclass(slots=True)
class Inputs:
    """What was found: the inputs, an error for each path that names none, the folders without a
    file, and the links that lead nowhere.

    ``no_logs`` is how many files of sub-folders were left out, as binary or as source code by their
    names.
    """

    found: list[Input] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)
    no_logs: int = 0


def is_url(path: str) -> bool:
    """Return whether a path is that of an object elsewhere (``s3://bucket/logs``); a local file of
    that name comes first.
    """
    return _URL.match(path) is not None and not os.path.lexists(path)


def find_inputs(paths: Iterable[str]) -> Inputs:
    """Return the inputs of all paths.

    A folder means the files in it and in its sub-folders; of these, what is hidden, binary or
    source code is left out, and links to folders are not followed. A pattern (``*``, ``?``,
    ``[…]``, ``**``) counts where no file has that name.
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
            inputs.errors.append(InputError(f"{shown(path)}: {error.strerror}"))
        except ValueError:  # a null byte in the name, which reading it reports
            inputs.found.append(Input(path, is_named=True))
    return inputs


def _at(path: str, inputs: Inputs) -> Iterator[Input]:
    if path == "-":
        yield Input(path, is_named=True)
    elif is_url(path):
        from oomguard.scan.remote_inputs import find_objects

        yield from find_objects(path)
    elif Path(path).is_dir():
        yield from (_local(found, is_named=False) for found in _files_in(path, inputs))
    elif glob.has_magic(path) and not os.path.lexists(path):
        files = list(_are_files(matching(path), inputs.dangling))
        if not files:
            raise InputError(
                f"{shown(path)}: no file matches",
                hint="quote the pattern; ** takes folders of any depth",
            )
        yield from (_local(name, is_named=False) for name in files)
    else:
        yield _local(path, is_named=True)


def _local(path: str, *, is_named: bool) -> Input:
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return Input(path, is_named)  # reading it tells why
    if not stat.S_ISREG(about.st_mode):
        return Input(path, is_named)
    return Input(path, is_named, about.st_size, about.st_mtime, (about.st_dev, about.st_ino))


def _are_files(paths: Iterable[str], dangling: list[str]) -> Iterator[str]:
    """Yield those paths that are files, as they were matched; links that lead nowhere are added to
    ``dangling``.
    """
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
        inputs.errors.append(InputError(f"{shown(str(error.filename))}: {error.strerror}"))

    for folder, below, names in os.walk(top, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith("."))
        # os.walk lists links to folders as folders; as a path has them, so that ./a stays ./a.
        paths = [os.path.join(folder, name) for name in sorted(names)]  # noqa: PTH118
        for path in _are_files(paths, inputs.dangling):
            if folder == top or _may_be_log(path):
                yield path
            else:
                inputs.no_logs += 1


def _may_be_log(path: str) -> bool:
    """Return whether a file that was met in a sub-folder may be a log or a snapshot."""
    name = Path(path).name.lower()
    if name.startswith(".") or name.endswith(_SOURCE_CODE):
        return False
    if is_named_pickle(name):
        return True
    try:
        with Path(path).open("rb") as file:
            head = file.read(_SAMPLE_BYTES)
    except OSError:
        return True  # reading it says why it cannot be read
    return b"\0" not in head or head.startswith(WIDE_TEXT) or format_of(head) is not None


# Each file is read once, however many paths lead to it: links, folders within folders, patterns
# that overlap.


def read_once(inputs: Sequence[Input], *, keeps_named: bool) -> tuple[list[Input], int]:
    """Return the inputs, in their order, without those that lead to a file of another, and how many
    those are.

    Of several paths the one stays that tells most of who wrote the log, then one without a link in
    it, then the first.

    Args:
        inputs: all that were found.
        keeps_named: whether each path that the user named stays: there is one answer for each.
    """
    same: dict[object, list[Input]] = {}
    for one in inputs:
        if one.file is not None:
            same.setdefault(one.file, []).append(one)
    dropped = {
        id(one)
        for paths in same.values()
        if len(paths) > 1
        for one in _repeated(paths, keeps_named)
    }
    return [one for one in inputs if id(one) not in dropped], len(dropped)


def _repeated(paths: Sequence[Input], keeps_named: bool) -> Iterable[Input]:
    if keeps_named:
        named = [one for one in paths if one.is_named]
    else:
        named = []
    kept = named or [min(paths, key=_rank)]  # min() takes the first of equals
    return (one for one in paths if not any(one is other for other in kept))


def _rank(one: Input) -> tuple[int, bool]:

    writer = writer_of(one.path)
    told = (
        writer.namespace,
        writer.pod,
        writer.container,
        writer.node,
        writer.job,
        writer.task,
        writer.rank,
    )
    # .. stays
    has_link = not is_url(one.path) and os.path.realpath(one.path) != os.path.abspath(one.path)  # noqa: PTH100
    return -sum(each is not None for each in told), has_link
