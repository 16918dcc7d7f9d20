"""Detect the side effects of an attempt, and decide whether the command may run again.

A command that runs again writes its files again. oomguard detects files and requests, each with
its evidence. It does not see a message to another machine, and it may miss a file
(docs/how-to/run.md says which).
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.analyst.nested_run import options_of_inner_runs
from oomguard.core.files import read_tables
from oomguard.core.incident import Incident
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.engines.server import RequestLine, engine_effects
from oomguard.supervisor.open_files import Identity, identity, open_for_writing
from oomguard.supervisor.output_buffer import RecordedOutput, Slot

MOST_ENTRIES: Final = 10_000


def is_written(status: os.stat_result, since_ns: int) -> bool:
    """Return whether a file has content, and was written or moved there since ``since_ns``.

    The time of change decides. The position in a file or its size may be older, and the
    modification time can be set to any value.
    """
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_ctime_ns >= since_ns


def written_since(seen: Iterable[tuple[int, int, str]], since_ns: int) -> dict[Identity, str]:
    """Return the seen files that were written since then and still exist, by their current name."""
    found = {}
    for device, inode, path in seen:
        file = (device, inode)
        for name in (path, *_names_in_folder(path, file)):
            with contextlib.suppress(OSError):
                status = os.stat(name)
                if identity(status) == file and is_written(status, since_ns):
                    found[file] = name
                    break
    return found


def _names_in_folder(path: str, file: Identity) -> Iterator[str]:
    """Yield the names of a file in its folder, because programs write a file and then rename it."""
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
            if entry.inode() == file[1]:
                yield entry.path


# Separators of words in a shell's or Python's line that is one argument (``sh -c``, ``python -c``).
_BETWEEN_WORDS: Final = re.compile(r"[\s'\"<>|&;=,(){}\[\]]+")
_MOST_NAMES: Final = 1000
_VARIABLE: Final = re.compile(r"\$(\w+)(/.*)?\Z")


class ResultPaths:
    """Classify files as results of one command, or as caches, logs and temporary files.

    Args:
        argv: the command; files and folders that it names count as results.
        env: the variables that it was started with.
        folder: its working directory; None if that was removed.

    Attributes:
        folder: the same, without links.
        named: the existing files and folders that the command names, except those above the working
            directory or a home.
        shared: folders whose sub-folders may belong to anyone.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], folder: str | None) -> None:
        data = _data()
        if folder is None:
            self.folder = None
        else:
            self.folder = os.path.realpath(folder)
        self._names = re.compile("|".join(map(fnmatch.translate, data["names"])))
        self._by_others = re.compile("|".join(map(fnmatch.translate, data["changed_by_others"])))
        kept = (*data["caches"], *engine_effects().caches, *data["temporary"])
        self._never = {os.path.join(self.folder or "/", path) for path in _expanded(kept, env)}
        named: dict[str, bool] = {}
        for path, is_kept in _named(argv, self.folder, frozenset(data["flags"])):
            named[path] = named.get(path, False) or is_kept
        for path, is_kept in named.items():
            if is_kept:
                self._never.add(path)
        self._never = {os.path.realpath(path) for path in self._never} - {"/"}
        # "/", "..", a home: results do not go there, and anyone may change files there.
        home = os.path.realpath(_home(env))
        self.shared = frozenset({"/", home})
        around = f"{self.folder or ''}/", f"{home}/"
        files = []
        for path, is_kept in named.items():
            # A folder around the working directory or the home says nothing about single files.
            inner = f"{path.rstrip('/')}/"
            is_wide = any(folder.startswith(inner) for folder in around)
            if not is_kept and not is_wide:
                files.append(path)
        self.named = tuple(files)
        self._always = {*self.named, *([] if self.folder is None else [self.folder])}

    def counts(self, path: str) -> bool:
        """Return whether a written file may contain results; ``path`` is absolute without links."""
        above = [path]
        while above[-1] != "/":
            above.append(os.path.dirname(above[-1]))
        always = next(filter(self._always.__contains__, above), "")
        never = next(filter(self._never.__contains__, above), "")
        if len(never) > len(always) or (
            never and never == always and os.path.dirname(path) != never
        ):
            return False
        if path == always:
            below = os.path.basename(path)
        else:
            below = os.path.relpath(path, always or "/")
        return not any(self._names.match(part) for part in below.split("/"))

    def may_be_changed_by_others(self, path: str) -> bool:
        """Return whether people and their tools often change such a file: sources, hidden files."""
        return bool(self._by_others.match(os.path.basename(path)))


def _named(
    argv: Sequence[str], folder: str | None, kept_flags: frozenset[str]
) -> Iterator[tuple[str, bool]]:
    """Yield the paths that a command names, and whether a flag marks them as a cache."""
    flag = ""
    looked = 0
    for word in argv:
        for part in (word, *_BETWEEN_WORDS.split(word)):
            if part.startswith("-"):
                flag = part.partition("=")[0]
            elif part:
                looked += 1
                if looked <= _MOST_NAMES:
                    path = os.path.join(folder or "/", os.path.expanduser(part))
                else:
                    path = ""
                if path and "\0" not in path and os.path.exists(path):
                    yield (
                        os.path.realpath(path),
                        bool(kept_flags & set(re.split("[-_]", flag.lower()))),
                    )
                if part == word:
                    flag = ""


def _expanded(folders: Iterable[str], env: Mapping[str, str]) -> Iterator[str]:
    home = _home(env)
    for folder in folders:
        variable = _VARIABLE.match(folder)
        if variable is None:
            yield home + folder[1:] if folder.startswith("~") else folder
        elif env.get(variable[1]):
            yield env[variable[1]] + (variable[2] or "")


def _home(env: Mapping[str, str]) -> str:
    return env.get("HOME") or os.path.expanduser("~")


def _data() -> dict[str, Any]:
    return next(
        iter(read_tables("no_effects", [Path(__file__).with_name("no_effects.toml")]).values())
    )


# This search finds files that were opened, written and closed between two checks of open files, or
# moved into place. It does not know which process changed them.
# A network file system answers slowly, and the next attempt waits for this.
LIMIT_S: Final = 2.0
_PROC: Final = "/proc"


def changed_files(
    places: ResultPaths, since_ns: int, known: Collection[Identity]
) -> tuple[str, ...]:
    """Return the result files that changed since then and that the command could have written.

    Args:
        places: classifies files, and names where to look: named files and folders, the working
            directory, and everything below.
        since_ns: when the command started.
        known: files to skip: already known, or our own.
    """
    found: dict[Identity, str] = {}
    for name in _candidates(places):
        with contextlib.suppress(OSError):
            status = os.stat(name)
            if not is_written(status, since_ns) or identity(status) in known:
                continue
            path = os.path.realpath(name)
            is_theirs = path not in places.named and places.may_be_changed_by_others(path)
            if places.counts(path) and not is_theirs and os.access(path, os.W_OK):
                found[identity(status)] = path
    if found:
        others = _open_now()
    else:
        others = frozenset()
    paths = []
    for file, path in found.items():
        if file not in others:
            paths.append(path)
    return tuple(sorted(paths))


def _candidates(places: ResultPaths) -> Iterator[str]:
    """Yield the paths to check, nearest folders first.

    At most ``MOST_ENTRIES`` paths are checked, for at most ``LIMIT_S`` seconds.
    """
    roots = []
    for path in places.named:
        if os.path.isdir(path):
            roots.append(path)
        else:
            yield path
    if places.folder is not None:
        roots.insert(0, places.folder)
    folders = deque(roots)
    seen = set(roots)
    left = MOST_ENTRIES
    end_s = time.monotonic() + LIMIT_S
    while folders and left > 0 and time.monotonic() < end_s:
        folder = folders.popleft()
        for entry in _entries(folder, left):
            left -= 1
            with contextlib.suppress(OSError):
                if not entry.is_dir():
                    yield entry.path
                    continue
                if entry.is_symlink():
                    path = os.path.realpath(entry.path)
                else:
                    path = entry.path
                if path not in seen and _is_looked_into(path, folder, places):
                    seen.add(path)
                    folders.append(path)


def _is_looked_into(path: str, folder: str, places: ResultPaths) -> bool:
    return (
        folder not in places.shared
        and not places.may_be_changed_by_others(path)
        and places.counts(path)
    )


def _entries(folder: str, most: int) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for _, entry in zip(range(most), entries, strict=False):
            yield entry


def _open_now() -> frozenset[Identity]:
    """Return the files that a process has open for writing.

    The command's processes have ended, so another process writes these files.
    """
    found: set[Identity] = set()
    with contextlib.suppress(OSError):
        for pid in os.listdir(_PROC):
            if pid.isdigit():
                found.update(identity(status) for _, status in open_for_writing(int(pid)))
    return frozenset(found)


# Which lines report a served request is data of the engines.

# Beyond this count, lines are no longer searched.
MOST: Final = 1000
# A line that spans two slots is joined from this much of the first slot.
_SEAM_BYTES: Final = 4096


def served_requests(recording: RecordedOutput) -> int | None:
    """Return the least number of served requests, 0 if no line of the output reports any.

    None if there were some, but no line shows how many.
    """
    counts: dict[bytes, int] = {}
    ends: dict[int, bytes] = {}
    for part in recording.kept():
        if not isinstance(part, Slot):
            ends.clear()
            continue
        for stream, data in recording.read(part).items():
            text = ends.get(stream, b"") + data
            whole = text.rfind(b"\n") + 1
            ends[stream] = text[whole:][-_SEAM_BYTES:]
            _count(text[:whole], counts)
    for end in ends.values():
        _count(end, counts)
    of_lines = []
    for line in engine_effects().requests:
        if line.counts:
            of_lines.append(counts.get(line.anchor, 0))
    # two kinds of lines may report the same request
    most = max(of_lines, default=0)
    if not most and any(counts.values()):
        return None
    return most


def _count(text: bytes, counts: dict[bytes, int]) -> None:
    for line in engine_effects().requests:
        so_far = counts.get(line.anchor, 0)
        if so_far < MOST and line.anchor in text:
            counts[line.anchor] = so_far + _requests(line, text, MOST - so_far)


def _requests(line: RequestLine, text: bytes, most: int) -> int:
    found = 0
    for match in line.pattern.finditer(text):
        path = match.groupdict().get("path")
        found += path is None or path.rstrip(b"/") not in engine_effects().not_requests
        if found >= most:
            break
    return found


_OF_A_JOURNAL: Final = ("", "-journal", "-wal", "-shm")
_STANDARD: Final = (1, 2)
# The options of a run that name files which it writes.
_OPTIONS: Final = frozenset(
    {"--journal", "--metrics", "--report", "--snapshot", "--termination-message"}
)


class OwnFiles:
    """List the files that oomguard itself writes; they are not side effects of the command.

    Each part of oomguard that writes a file adds it here.

    Args:
        paths: known files; None entries are ignored.
        late: functions that return files whose names are not known yet.
    """

    def __init__(
        self, *paths: Path | str | None, late: Iterable[Callable[[], Iterable[Path]]] = ()
    ) -> None:
        self._named = list(late)
        known = []
        for path in paths:
            if path is not None:
                known.append(Path(path).absolute())
        self.add(lambda: known)

    def add(self, named: Callable[[], Iterable[Path]]) -> None:
        """Add files; ``named`` is called each time the list is used."""
        self._named.append(named)

    def identities(self) -> set[Identity]:
        """Return the existing files, including those that receive our own output."""
        found: set[Identity] = set()
        for number in _STANDARD:
            with contextlib.suppress(OSError):
                found.add(identity(os.fstat(number)))
        for path in self._all_named():
            with contextlib.suppress(OSError):
                found.add(identity(path.stat()))
        return found

    def paths(self) -> tuple[str, ...]:
        """Return the existing files by their names without links, as another process sees them."""
        found: set[str] = set()
        for path in (
            *(Path(f"/proc/self/fd/{number}") for number in _STANDARD),
            *self._all_named(),
        ):
            with contextlib.suppress(OSError):
                if path.is_file():
                    found.add(os.path.realpath(path))
        return tuple(sorted(found))

    def _all_named(self) -> Iterator[Path]:
        for named in self._named:
            yield from named()


def of_inner_runs(argv: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files that the options of nested runs name, because those runs write them."""
    for words in options_of_inner_runs(argv):
        for name, value in _values(words):
            # A URL names a database, not a file.
            if "://" not in value:
                yield from of_journal(Path(value)) if name == "--journal" else (Path(value),)


def _values(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for word, behind in zip(words, (*words[1:], ""), strict=True):
        name, is_joined, value = word.partition("=")
        if name in _OPTIONS:
            yield name, value if is_joined else behind


def of_journal(journal: Path | None) -> Iterator[Path]:
    """Yield the journal and SQLite's files next to it; nothing without a journal."""
    if journal is not None:
        yield from (Path(f"{journal}{suffix}") for suffix in _OF_A_JOURNAL)


_UP: Final = frozenset(
    {"prefill", "decode", "sampling_logits", "prompt_logprobs", "generate", "training"}
)
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class SideEffects:
    """Describe the detected side effects of one attempt.

    Attributes:
        open_files: files that one of its processes wrote and had open.
        changed_files: changed files in its working area; another process may have changed them.
        requests: the minimum number of served requests; None if there were some, but no count.
        is_server: whether the command is an engine's own server, which repeats no request after a
            restart.
    """

    open_files: tuple[str, ...] = ()
    changed_files: tuple[str, ...] = ()
    requests: int | None = 0
    is_server: bool = False

    @property
    def were_seen(self) -> bool:
        """Whether anything was detected."""
        return bool(self.open_files or self.changed_files or self.requests != 0)

    @property
    def would_be_repeated(self) -> bool:
        """Whether a rerun repeats the side effects.

        A server only answers its clients, and they do not repeat their requests.
        """
        return self.were_seen and not self.is_server

    @property
    def refusal(self) -> str:
        """Why the command must not run again."""
        parts = []
        for event, fields in self.events():
            parts.append(f"{event} ({', '.join(map(str, fields.values()))})")
        what = "; ".join(parts)
        return f"not retried, because the command would repeat its side effects: {what}"

    def excuse(self) -> str:
        """Return why the command may run again nevertheless."""
        if not self.were_seen:
            return "oomguard saw no file being written"
        if self.is_server:
            return "a restarted server does not repeat requests"
        return "--idempotent permits repeating its side effects"

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the side effects as events with fields; of many files, only the first few."""
        files = []
        for path in self.open_files:
            files.append((path, "one of its processes had the file open for writing"))
        for path in self.changed_files:
            why = "the file changed during the attempt; another process may have changed it"
            files.append((path, why))
        for path, known in files[:_MOST_NAMED]:
            # A name may contain line breaks and undecodable bytes.
            yield (
                "The command wrote a file",
                {"path": path if path.isprintable() else repr(path), "known": known},
            )
        if len(files) > _MOST_NAMED:
            yield "The command wrote more files", {"count": len(files) - _MOST_NAMED}
        if self.requests != 0:
            if self.requests is None:
                count = {}
            else:
                count = {"at_least": self.requests}
            yield "The command served requests", {**count, "known": "lines of its server"}


class SideEffectMonitor:
    """Collect the side effects of attempts, and decide whether another one may follow.

    Args:
        own_files: the files that oomguard itself writes.
        idempotent: whether the user always permits a rerun.

    Attributes:
        refusal: why the command was not rerun; None if it was not refused.
    """

    def __init__(self, own_files: OwnFiles, *, idempotent: bool) -> None:
        self.refusal: str | None = None
        self._idempotent = idempotent
        self._own_files = own_files
        self._launch = Launch(())
        self._since_ns = 0
        self._files: tuple[tuple[int, int, str], ...] | None = None
        self._requests: int | None = 0

    def begins(self, launch: Launch) -> None:
        """Record the attempt that begins."""
        self._launch = launch
        self._requests = 0
        self._files = None

    def ended(self, files: tuple[tuple[int, int, str], ...], since_ns: int) -> None:
        """Record the files that its processes had open for writing, and when it began."""
        self._files = files
        self._since_ns = since_ns

    def read(self, recording: RecordedOutput) -> None:
        """Count requests in the recorded output."""
        self._requests = served_requests(recording)

    def permits_another(
        self, incident: Incident | None, again: str, *, dry_run: bool = False
    ) -> bool:
        """Return whether the command may run again, and log what it repeats or why it may not.

        Args:
            incident: its failure; None if its output shows no memory failure.
            again: the command with its changes, to paste.
            dry_run: whether to log only what would be done.
        """
        log = get_logger()
        seen = self.seen()
        refused = seen.would_be_repeated and not self._idempotent
        if incident is None:
            failed = {}
        else:
            failed = _when(incident)
        if refused:
            write = log.warning
        else:
            write = log.info
        if refused:
            if dry_run:
                would = "Dry run: the command would not be retried"
            else:
                would = "Not retried"
            write(f"{would}, because it would repeat its side effects", **failed)
        else:
            if dry_run:
                begins = "Dry run: the command could run again"
            else:
                begins = "The command can run again"
            write(f"{begins}, because {seen.excuse()}", **failed)
        for event, fields in seen.events():
            write(event, **fields)
        if refused:
            write(
                "To run it again anyway, paste this command, or use oomguard run --idempotent",
                command=again,
            )
            self.refusal = seen.refusal
        return not refused

    def seen(self) -> SideEffects:
        """Return the side effects of the last attempt."""
        from oomguard.analyst.nested_run import innermost_command
        from oomguard.engines.server import is_server
        from oomguard.journal.location import is_journal_file

        if self._files is None:
            return SideEffects()
        folder = None
        # The working directory may be gone.
        with contextlib.suppress(OSError):
            folder = str(Path.cwd())
        launch = replace(self._launch, argv=innermost_command(self._launch.argv))
        server = is_server(launch)
        places = ResultPaths(self._launch.argv, self._environment(), folder)
        own = self._own_files.identities()
        opened = {}
        for file, path in written_since(self._files, self._since_ns).items():
            if file not in own:
                opened[file] = path
        known = {*own, *opened}
        # A server's clients may work in the same folder.
        changed = () if server else changed_files(places, self._since_ns, known)
        open_files = []
        # The journal belongs to oomguard, even to that of another run.
        for path in sorted(opened.values()):
            if places.counts(path) and not is_journal_file(path):
                open_files.append(path)
        others = tuple(itertools.filterfalse(is_journal_file, changed))
        return SideEffects(tuple(open_files), others, self._requests, server)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._launch.env}


def _when(incident: Incident) -> dict[str, str]:
    if incident.is_at_start:
        return {"failed": "while the engine started"}
    if incident.phase in _UP:
        return {"failed": "after the engine was up"}
    return {}
