"""The inputs that paths name: a file, a folder, a pattern, an object behind a URL; in the order of the paths, of each sorted."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from oomguard.errors import InputError
from oomguard.fleet.patterns import matching
from oomguard.observe.compressed import format_of
from oomguard.observe.no_log import WIDE_TEXT, is_named_pickle
from oomguard.observe.source import shown

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SAMPLE_BYTES: Final = 1024
# What a project's folder has beside its logs; a file that is named, or lies in the folder itself, is read whatever its name.
_SOURCE_CODE: Final = (
    ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".js", ".ts", ".css", ".sh",
    ".md", ".rst", ".toml", ".yaml", ".yml", ".lock", ".csv", ".svg",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Input:
    """One input as it is named to the user; ``is_named`` says that the user named it rather than a folder or pattern around it.

    ``size_bytes`` and ``modified_at`` (Unix seconds) are None where nothing tells them: standard input, a pipe. Inputs with the same
    ``file`` are one file under several names; None: it is no file, or nothing tells.
    """

    path: str
    is_named: bool
    size_bytes: int | None = None
    modified_at: float | None = None
    file: object = None


@dataclass(slots=True)
class Inputs:
    """What was found: the inputs, an error for each path that names none, the folders without a file, and the links that lead nowhere.

    ``no_logs`` is how many files of sub-folders were left out, as binary or as source code by their names.
    """

    found: list[Input] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)
    no_logs: int = 0


def is_url(path: str) -> bool:
    """Return whether a path is that of an object elsewhere (``s3://bucket/logs``); a local file of that name comes first."""
    return _URL.match(path) is not None and not os.path.lexists(path)


def find_inputs(paths: Iterable[str]) -> Inputs:
    """Return the inputs of all paths.

    A folder means the files in it and in its sub-folders; of these, what is hidden, binary or source code is left out, and links to
    folders are not followed. A pattern
    (``*``, ``?``, ``[…]``, ``**``) counts where no file has that name.
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
        from oomguard.fleet.remote import find_objects

        yield from find_objects(path)
    elif Path(path).is_dir():
        yield from (_local(found, is_named=False) for found in _files_in(path, inputs))
    elif glob.has_magic(path) and not os.path.lexists(path):
        files = list(_are_files(matching(path), inputs.dangling))
        if not files:
            raise InputError(f"{shown(path)}: no file matches", hint="quote the pattern; ** takes folders of any depth")
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
    """Yield those paths that are files, as they were matched; links that lead nowhere are added to ``dangling``."""
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
        for path in _are_files((os.path.join(folder, name) for name in sorted(names)), inputs.dangling):  # noqa: PTH118
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
