"""What an attempt did to the outside world, as far as was seen, and whether the command may be run again after it.

A command that is run again begins at the beginning: what it wrote it writes twice. What is seen are files and requests, each with
how it is known; a message to another machine is not, nor is a file that was missed (docs/run.md says which).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.engines.command import Launch
from oomguard.incident import Incident
from oomguard.log import get_logger
from oomguard.supervise.own_files import OwnFiles
from oomguard.supervise.written_files import written_since
from oomguard.supervisor.output_buffer import RecordedOutput

# What finds and judges it is loaded when there is a failure: the command starts at once.
if TYPE_CHECKING:
    from oomguard.supervise.served import ServedRequests

_UP: Final = frozenset({"prefill", "decode", "sampling_logits", "prompt_logprobs", "generate", "training"})
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class SideEffects:
    """What was seen of one attempt.

    Attributes:
        open_files: written, and open for writing in one of its processes.
        changed_files: changed while it ran where it works or its arguments point; another process may have done it.
        requests: at least so many were served; None: some, and nothing says how many.
        is_server: whether the command is known as an engine's own server, which repeats no request when it starts again.
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
        """Whether the command would do it again by itself: a server answers those who ask, and they ask no second time."""
        return self.were_seen and not self.is_server

    @property
    def refusal(self) -> str:
        """Why the command must not be run again."""
        what = "; ".join(f"{event} ({', '.join(map(str, fields.values()))})" for event, fields in self.told())
        return f"not run again, it would repeat what it did: {what}"

    def excuse(self) -> str:
        """Return why the command may be run again all the same, where the user or nothing else stands against it."""
        if not self.were_seen:
            return "it had written nothing that was seen"
        return "a server repeats no request by that" if self.is_server else "--idempotent permits to repeat what it did"

    def told(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield it as events with their fields, a file each, the first few of many."""
        files = [(path, "a process of it had the file open for writing") for path in self.open_files]
        files += [
            (path, "the file changed meanwhile; another process could have done that") for path in self.changed_files
        ]
        for path, known in files[:_MOST_NAMED]:
            # A name may hold line breaks and bytes that are no text.
            yield "it wrote a file", {"path": path if path.isprintable() else repr(path), "known": known}
        if len(files) > _MOST_NAMED:
            yield "it wrote more files", {"count": len(files) - _MOST_NAMED}
        if self.requests != 0:
            count = {} if self.requests is None else {"at_least": self.requests}
            yield "it served requests", {**count, "known": "lines of its server"}


class Witness:
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
        self._launch, self._served, self._files = launch, None, None

    def ended(self, files: tuple[tuple[int, int, str], ...], since_ns: int) -> None:
        """Note the files that its processes had open for writing, and when it began."""
        self._files, self._since_ns = files, since_ns

    def read(self, recording: RecordedOutput) -> None:
        """Count requests in the output that was kept."""
        self._requests().take_rest(recording)

    def permits_another(self, incident: Incident | None, again: str, *, dry_run: bool = False) -> bool:
        """Return whether the command may be run again, and say what that repeats, or why it is not done.

        Args:
            incident: what it failed of; None: something else than is read in its output.
            again: the command with its changes, to paste.
            dry_run: nothing is run again in any case; say what would be done.
        """
        log, seen = get_logger(), self.seen()
        refused = seen.would_be_repeated and not self._idempotent
        failed = {} if incident is None else _when(incident)
        tell = log.warning if refused else log.info
        if refused:
            would = "dry run: it would not be run again" if dry_run else "not run again"
            tell(f"{would}: it would repeat from the beginning what it did", **failed)
        else:
            begins = "dry run: it would run again from the beginning" if dry_run else "may run again from the beginning"
            tell(f"{begins}; {seen.excuse()}", **failed)
        for event, fields in seen.told():
            tell(event, **fields)
        if refused:
            tell("to run it again all the same, paste this, or give oomguard run --idempotent", command=again)
            self.refusal = seen.refusal
        return not refused

    def seen(self) -> SideEffects:
        """Return what was seen of the attempt that ended last."""
        from oomguard.engines.effects import is_server
        from oomguard.journal.location import is_journal_file
        from oomguard.supervise.changed_files import changed_files
        from oomguard.supervise.nesting import innermost
        from oomguard.supervise.places import Places

        if self._files is None:
            return SideEffects()
        folder = None
        with contextlib.suppress(OSError):  # it was removed
            folder = str(Path.cwd())
        launch = replace(self._launch, argv=innermost(self._launch.argv))
        server, places = is_server(launch), Places(self._launch.argv, self._environment(), folder)
        own = self._own_files.identities()
        opened = {file: path for file, path in written_since(self._files, self._since_ns).items() if file not in own}
        known = {*own, *opened}
        # Beside a server its clients may work in the same folder.
        changed = () if server else changed_files(places, self._since_ns, known)
        return SideEffects(
            tuple(sorted(path for path in opened.values() if places.counts(path) and not is_journal_file(path))),
            tuple(path for path in changed if not is_journal_file(path)),
            self._requests().count,
            server,
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._launch.env}

    def _requests(self) -> ServedRequests:
        if self._served is None:
            from oomguard.supervise.served import ServedRequests

            self._served = ServedRequests()
        return self._served


def _when(incident: Incident) -> dict[str, str]:
    if incident.is_at_start:
        return {"failed": "while the engine started"}
    return {"failed": "after the engine was up"} if incident.phase in _UP else {}
