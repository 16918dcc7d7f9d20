"""What an attempt did to the outside world, as far as was seen, and whether the command may be run
again after it.

A command that is run again begins at the beginning: what it wrote it writes twice. What is seen are
files and requests, each with how it is known; a message to another machine is not, nor is a file
that was missed (docs/run.md says which).
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from oomguard.analyst.nested_run import options_of_inner_runs
from oomguard.core.files import read_tables
from oomguard.core.incident import Incident
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.engines.side_effects import RequestLine, engine_effects
from oomguard.supervisor.open_files import Identity, identity, open_for_writing
from oomguard.supervisor.output_buffer import RecordedOutput, Slot

# Files that the processes of a command had open for writing: which of them were written, and are
# still there.

MOST_ENTRIES: Final = 10_000


def is_written(status: os.stat_result, since_ns: int) -> bool:
    """Return whether a file has bytes, and was written or put in its place since then.

    The time of change says it: a position in the file or its size may come from before, and the
    time of modification can be set to any other.
    """
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_ctime_ns >= since_ns


def written_since(seen: Iterable[tuple[int, int, str]], since_ns: int) -> dict[Identity, str]:
    """Return the files seen that were written since then and are still there, under the name that
    they have now.
    """
    found = {}
    for device, inode, path in seen:
        file = (device, inode)
        for name in (path, *_names_beside(path, file)):
            with contextlib.suppress(OSError):
                status = os.stat(name)
                if identity(status) == file and is_written(status, since_ns):
                    found[file] = name
                    break
    return found


def _names_beside(path: str, file: Identity) -> Iterator[str]:
    """Yield the names that a file has in its folder: what is written under another name is then put
    in its place.
    """
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
            if entry.inode() == file[1]:
                yield entry.path


# Which files count as results of a command: not its caches, logs and temporary files, wherever it
# has them.

# What parts the words of a shell's or Python's line that is one argument (``sh -c``, ``python
# -c``).
_BETWEEN_WORDS: Final = re.compile(r"[\s'\"<>|&;=,(){}\[\]]+")
_MOST_NAMES: Final = 1000
_VARIABLE: Final = re.compile(r"\$(\w+)(/.*)?\Z")


class Places:
    """The folders and names that decide about a file, for one command.

    Args:
        argv: the command; files and folders that it names count.
        env: the variables it was started with.
        folder: its working folder, None where that was removed.

    Attributes:
        folder: the same, without links.
        named: the files and folders that the command names and that are there, but those that the
            working folder or a home lies in.
        shared: folders whose own folders belong to anybody.
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
        self._never |= {path for path, is_kept in named.items() if is_kept}
        self._never = {os.path.realpath(path) for path in self._never} - {"/"}
        # "/", "..", a home: not where results go, and what changes there may be anybody's.
        home = os.path.realpath(_home(env))
        self.shared = frozenset({"/", home})
        around = f"{self.folder or ''}/", f"{home}/"
        wide = {
            path
            for path in named
            if any(folder.startswith(f"{path.rstrip('/')}/") for folder in around)
        }
        self.named = tuple(
            path for path, is_kept in named.items() if not is_kept and path not in wide
        )
        self._always = {*self.named, *([] if self.folder is None else [self.folder])}

    def counts(self, path: str) -> bool:
        """Return whether a file that was written may hold results; ``path`` is absolute and has no
        links.
        """
        above = [path]
        while above[-1] != "/":
            above.append(os.path.dirname(above[-1]))
        always = next((folder for folder in above if folder in self._always), "")
        never = next((folder for folder in above if folder in self._never), "")
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
        """Return whether people and their tools change such a file while a command runs: sources,
        hidden files.
        """
        return bool(self._by_others.match(os.path.basename(path)))


def _named(
    argv: Sequence[str], folder: str | None, kept_flags: frozenset[str]
) -> Iterator[tuple[str, bool]]:
    """Yield the paths that a command names, and whether the flag before says that they are kept for
    nothing but speed.
    """
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


# Files that changed while a command ran, where it works and where its arguments point: who changed
# them is not known.
#
# It finds what was opened, written and closed between two looks at the open files, and what was put
# in place by another name.

LIMIT_S: Final = 2.0  # a network's file system answers slowly
_PROC: Final = "/proc"


def changed_files(places: Places, since_ns: int, known: Collection[Identity]) -> tuple[str, ...]:
    """Return the files that count, changed since then, and that the command could have written.

    Args:
        places: says which files count, and where to look: the files that the command names, its
            folder and the folders it names, and what lies below them.
        since_ns: when the command started.
        known: files left out: known already, or our own.
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
    return tuple(sorted(path for file, path in found.items() if file not in others))


def _candidates(places: Places) -> Iterator[str]:
    """Yield the paths to look at: of folders the nearest first, in all at most ``MOST_ENTRIES``,
    and for ``LIMIT_S``.
    """
    yield from (path for path in places.named if not os.path.isdir(path))
    roots = [path for path in places.named if os.path.isdir(path)]
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


def _is_looked_into(path: str, folder: str, places: Places) -> bool:
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
    """Return the files that any process holds open for writing: the command's have ended, so it is
    another that writes them.
    """
    found: set[Identity] = set()
    with contextlib.suppress(OSError):
        for pid in os.listdir(_PROC):
            if pid.isdigit():
                found.update(identity(status) for _, status in open_for_writing(int(pid)))
    return frozenset(found)


# Requests that a command served, as its server's own lines tell: which lines those are is the
# engines' data.

# So many are "many": beyond it nothing is looked for any more.
MOST: Final = 1000
# A line that begins in one slot and ends in the next is put together from so much of the first.
_SEAM_BYTES: Final = 4096
_STEP_BYTES: Final = 1 << 16


@dataclass(slots=True)
class ServedRequests:
    """Counts lines, slot by slot: when the command has ended."""

    _counts: dict[bytes, int] = field(default_factory=dict)
    _some: bool = False
    _taken: set[int] = field(default_factory=set)
    _ends: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    @property
    def count(self) -> int | None:
        """The least number of requests served, 0 where no line tells of any; None: there were some,
        and nothing says how many.
        """
        most = max(self._counts.values(), default=0)  # two lines may tell of the same request
        return most or (None if self._some else 0)

    def take(self, number: int, parts: Mapping[int, bytes]) -> None:
        """Count in one slot; ``parts`` is what each stream printed into it."""
        self._taken.add(number)
        for stream, data in parts.items():
            before, seam = self._ends.pop(stream, (-2, b""))
            first = data.find(b"\n") + 1
            whole = data.rfind(b"\n") + 1
            if before == number - 1:
                self._count(seam + data[: first or None], 0, len(seam) + first)
            else:
                first = 0
                seam = b""
            self._count(data, first, whole)
            end = data[max(whole, len(data) - _SEAM_BYTES) :]
            self._ends[stream] = number, end if whole else (seam + end)[-_SEAM_BYTES:]

    def take_rest(self, recording: RecordedOutput) -> None:
        """Count in the slots that are kept and were not counted yet; nothing follows them."""
        for part in recording.kept():
            if isinstance(part, Slot) and part.number not in self._taken:
                self.take(part.number, recording.read(part))
        for _, end in self._ends.values():
            self._count(end, 0, len(end))
        self._ends.clear()

    def _count(self, data: bytes, start: int, stop: int) -> None:
        """Count in whole lines, a few at a time: the copying thread needs the interpreter in
        between.
        """
        while start < stop:
            reach = min(stop, start + _STEP_BYTES)
            end = data.rfind(b"\n", start, reach) + 1 or data.find(b"\n", reach, stop) + 1 or stop
            for line in engine_effects().requests:
                so_far = self._counts.get(line.anchor, 0)
                if (
                    so_far < MOST
                    and (line.counts or not self._some)
                    and data.find(line.anchor, start, end) >= 0
                ):
                    found = _requests(line, data, start, end, MOST - so_far)
                    if line.counts:
                        self._counts[line.anchor] = so_far + found
                    else:
                        self._some = self._some or found > 0
            start = end
            time.sleep(0)


def _requests(line: RequestLine, data: bytes, start: int, stop: int, most: int) -> int:
    found = 0
    for match in line.pattern.finditer(data, start, stop):
        path = match.groupdict().get("path")
        found += path is None or path.rstrip(b"/") not in engine_effects().not_requests
        if found >= most:
            break
    return found


# The files that oomguard itself writes while a command runs or after it: none of them is a side
# effect of the command.

_OF_A_JOURNAL: Final = ("", "-journal", "-wal", "-shm")
_STANDARD: Final = (1, 2)
# The options of a run that name files which it writes.
_OPTIONS: Final = frozenset(
    {"--journal", "--metrics", "--report", "--snapshot", "--termination-message"}
)


class OwnFiles:
    """The one list of them for a run. Whoever writes a file adds it here; where a name is given
    late, it is asked for late.

    Args:
        paths: those whose names are known; None is passed over.
        late: each returns some whose names are not known before they are written.
    """

    def __init__(
        self, *paths: Path | str | None, late: Iterable[Callable[[], Iterable[Path]]] = ()
    ) -> None:
        self._named = list(late)
        known = [Path(path).absolute() for path in paths if path is not None]
        self.add(lambda: known)

    def add(self, named: Callable[[], Iterable[Path]]) -> None:
        """Add files; ``named`` is called each time that the list is asked for."""
        self._named.append(named)

    def identities(self) -> set[Identity]:
        """Return those that are there now, with the files that our own output goes to."""
        found: set[Identity] = set()
        for number in _STANDARD:
            with contextlib.suppress(OSError):
                found.add(identity(os.fstat(number)))
        for path in self._all_named():
            with contextlib.suppress(OSError):
                found.add(identity(path.stat()))
        return found

    def paths(self) -> tuple[str, ...]:
        """Return those that are there now by their names without links, as another process finds
        them.
        """
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
    """Yield the files that the options of runs inside this one name: they write them as we do ours,
    and repeat nothing by it.
    """
    for words in options_of_inner_runs(argv):
        for name, value in _values(words):
            if "://" not in value:  # else it is a database
                yield from of_journal(Path(value)) if name == "--journal" else (Path(value),)


def _values(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for word, behind in zip(words, (*words[1:], ""), strict=True):
        name, is_joined, value = word.partition("=")
        if name in _OPTIONS:
            yield name, value if is_joined else behind


def of_journal(journal: Path | None) -> Iterator[Path]:
    """Yield the journal and what SQLite keeps beside it; nothing where no journal is kept."""
    if journal is not None:
        yield from (Path(f"{journal}{suffix}") for suffix in _OF_A_JOURNAL)


# What finds and judges it is loaded when there is a failure: the command starts at once.

_UP: Final = frozenset(
    {"prefill", "decode", "sampling_logits", "prompt_logprobs", "generate", "training"}
)
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class SideEffects:
    """What was seen of one attempt.

    Attributes:
        open_files: written, and open for writing in one of its processes.
        changed_files: changed while it ran where it works or its arguments point; another process
            may have done it.
        requests: at least so many were served; None: some, and nothing says how many.
        is_server: whether the command is known as an engine's own server, which repeats no request
            when it starts again.
    """

    open_files: tuple[str, ...] = ()
    changed_files: tuple[str, ...] = ()
    requests: int | None = 0
    is_server: bool = False

    @property
    def were_seen(self) -> bool:
        """Whether anything was."""
        return bool(self.open_files or self.changed_files or self.requests != 0)

    @property
    def would_be_repeated(self) -> bool:
        """Whether the command would do it again by itself: a server answers those who ask, and they
        ask no second time.
        """
        return self.were_seen and not self.is_server

    @property
    def refusal(self) -> str:
        """Why the command must not be run again."""
        what = "; ".join(
            f"{event} ({', '.join(map(str, fields.values()))})" for event, fields in self.told()
        )
        return f"not run again, it would repeat what it did: {what}"

    def excuse(self) -> str:
        """Return why the command may be run again all the same, where the user or nothing else
        stands against it.
        """
        if not self.were_seen:
            return "it had written nothing that was seen"
        if self.is_server:
            return "a server repeats no request by that"
        return "--idempotent permits to repeat what it did"

    def told(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield it as events with their fields, a file each, the first few of many."""
        files = [
            (path, "a process of it had the file open for writing") for path in self.open_files
        ]
        files += [
            (path, "the file changed meanwhile; another process could have done that")
            for path in self.changed_files
        ]
        for path, known in files[:_MOST_NAMED]:
            # A name may hold line breaks and bytes that are no text.
            yield (
                "it wrote a file",
                {"path": path if path.isprintable() else repr(path), "known": known},
            )
        if len(files) > _MOST_NAMED:
            yield "it wrote more files", {"count": len(files) - _MOST_NAMED}
        if self.requests != 0:
            if self.requests is None:
                count = {}
            else:
                count = {"at_least": self.requests}
            yield "it served requests", {**count, "known": "lines of its server"}


class SideEffectMonitor:
    """Gathers what an attempt does while it runs, and decides whether another one may follow.

    Args:
        own_files: what oomguard itself writes.
        idempotent: the user says that the command may be repeated in any case.

    Attributes:
        refusal: why the command was not run again, None where it was not refused.
    """

    def __init__(self, own_files: OwnFiles, *, idempotent: bool) -> None:
        self.refusal: str | None = None
        self._idempotent = idempotent
        self._own_files = own_files
        self._launch = Launch(())
        self._since_ns = 0
        self._files: tuple[tuple[int, int, str], ...] | None = None
        self._served: ServedRequests | None = None

    def begins(self, launch: Launch) -> None:
        """Note the attempt that begins."""
        self._launch = launch
        self._served = None
        self._files = None

    def ended(self, files: tuple[tuple[int, int, str], ...], since_ns: int) -> None:
        """Note the files that its processes had open for writing, and when it began."""
        self._files = files
        self._since_ns = since_ns

    def read(self, recording: RecordedOutput) -> None:
        """Count requests in the output that was kept."""
        self._requests().take_rest(recording)

    def permits_another(
        self, incident: Incident | None, again: str, *, dry_run: bool = False
    ) -> bool:
        """Return whether the command may be run again, and say what that repeats, or why it is not
        done.

        Args:
            incident: what it failed of; None: something else than is read in its output.
            again: the command with its changes, to paste.
            dry_run: nothing is run again in any case; say what would be done.
        """
        log = get_logger()
        seen = self.seen()
        refused = seen.would_be_repeated and not self._idempotent
        if incident is None:
            failed = {}
        else:
            failed = _when(incident)
        if refused:
            tell = log.warning
        else:
            tell = log.info
        if refused:
            if dry_run:
                would = "dry run: it would not be run again"
            else:
                would = "not run again"
            tell(f"{would}: it would repeat from the beginning what it did", **failed)
        else:
            if dry_run:
                begins = "dry run: it would run again from the beginning"
            else:
                begins = "may run again from the beginning"
            tell(f"{begins}; {seen.excuse()}", **failed)
        for event, fields in seen.told():
            tell(event, **fields)
        if refused:
            tell(
                "to run it again all the same, paste this, or give oomguard run --idempotent",
                command=again,
            )
            self.refusal = seen.refusal
        return not refused

    def seen(self) -> SideEffects:
        """Return what was seen of the attempt that ended last."""
        from oomguard.analyst.nested_run import innermost
        from oomguard.engines.side_effects import is_server
        from oomguard.journal.location import is_journal_file

        if self._files is None:
            return SideEffects()
        folder = None
        with contextlib.suppress(OSError):  # it was removed
            folder = str(Path.cwd())
        launch = replace(self._launch, argv=innermost(self._launch.argv))
        server = is_server(launch)
        places = Places(self._launch.argv, self._environment(), folder)
        own = self._own_files.identities()
        opened = {
            file: path
            for file, path in written_since(self._files, self._since_ns).items()
            if file not in own
        }
        known = {*own, *opened}
        # Beside a server its clients may work in the same folder.
        changed = () if server else changed_files(places, self._since_ns, known)
        return SideEffects(
            tuple(
                sorted(
                    path
                    for path in opened.values()
                    if places.counts(path) and not is_journal_file(path)
                )
            ),
            tuple(path for path in changed if not is_journal_file(path)),
            self._requests().count,
            server,
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._launch.env}

    def _requests(self) -> ServedRequests:
        if self._served is None:
            self._served = ServedRequests()
        return self._served


def _when(incident: Incident) -> dict[str, str]:
    if incident.is_at_start:
        return {"failed": "while the engine started"}
    if incident.phase in _UP:
        return {"failed": "after the engine was up"}
    return {}
