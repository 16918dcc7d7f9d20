"""``oomguard diagnose --follow``: one log that still grows, each incident told once, as soon as its
message is whole.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from oomguard.cli.render import InputRenderer
from oomguard.core.errors import InputError, UsageError
from oomguard.core.incident import Diagnosis, Incident
from oomguard.scan.compressed import HEAD_BYTES, format_of
from oomguard.scan.follow import Event, LogChange, follow, follow_stream
from oomguard.scan.inputs import is_url
from oomguard.scan.source import (
    LineSplitter,
    encoding_of,
    open_log,
    printable_path,
    raw_standard_input,
)

# A log that is never quiet is looked at this often.
BUSY_S: Final = 5.0
# Words that no signature has speak of one failure on so many lines.
SAME_FAILURE_LINES: Final = 400


def follow_input(
    path: str, renderer: InputRenderer, write: Callable[[str], None], say: Callable[[str], None]
) -> Iterator[bool]:
    """Write every new incident of a log; yield, each time, whether an out-of-memory was among them.

    The end of a pipe ends it; a file never does.

    Args:
        path: the log, or ``-`` for standard input.
        renderer: what diagnoses and renders.
        write: receives the text of new incidents.
        say: receives what happened to the file.

    Raises:
        InputError: the log cannot be read or followed.
    """
    reading = _Reading(path, renderer)
    written_s = time.monotonic()
    for event in _events(path):
        if event.change is LogChange.DATA:
            reading.feed(event.data)
            if time.monotonic() - written_s < BUSY_S:
                continue
        else:
            reading.settle()
        yield _write_new(reading, renderer, write, is_quiet=event.change is not LogChange.DATA)
        written_s = time.monotonic()
        if event.change in {LogChange.WAITING, LogChange.TRUNCATED, LogChange.REPLACED}:
            say(f"{printable_path(path)}: {event.change.value}")
            reading = _Reading(path, renderer)
    reading.settle()
    yield _write_new(reading, renderer, write, is_quiet=True)


def _events(path: str) -> Iterator[Event]:
    if path == "-":
        yield from follow_stream(raw_standard_input())
        return
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # not there yet; anything else reading it reports
        mode = stat.S_IFREG
    if stat.S_ISFIFO(mode):
        with Path(path).open("rb", buffering=0) as pipe:
            yield from follow_stream(pipe)
        return
    if not stat.S_ISREG(mode):
        open_log(path).close()  # reports why it is not a log
    yield from follow(path)


def _write_new(
    reading: _Reading, renderer: InputRenderer, write: Callable[[str], None], *, is_quiet: bool
) -> bool:
    from oomguard.diagnosis.diagnose import assess_all
    from oomguard.scan.incidents import with_labels

    diagnosis = with_labels(reading.new(is_quiet=is_quiet))
    if not diagnosis.incidents:
        return False
    diagnosis = assess_all(
        diagnosis, renderer.rules, renderer.policy, given=renderer.facts, model=renderer.work.model
    )
    write(renderer.render(diagnosis))
    return diagnosis.verdict == "oom"


class _Reading:
    """One file from its start: its lines so far, and the incidents that have been told."""

    def __init__(self, path: str, renderer: InputRenderer) -> None:
        from oomguard.scan.scan import Scanner
        from oomguard.scan.split_lines import Pieces

        self._path = path
        self._renderer = renderer
        self._scanner = Scanner(renderer.rules, unrecognized=True)
        self._splitter: LineSplitter | None = None
        self._pieces = Pieces()
        self._head = b""
        self._wide = False
        self._told: set[tuple[object, ...]] = set()
        self._told_lines: list[int] = []

    def feed(self, data: bytes) -> None:
        """Take more bytes; keep the first few until they tell the encoding."""
        if self._splitter is None:
            self._head += data
            if len(self._head) < HEAD_BYTES:
                return
            data = self._begin()
        self._push(data)

    def settle(self) -> None:
        """Take a line without its end as it is, since nothing more comes for now."""
        if self._splitter is None and self._head:
            data = self._begin()
        else:
            data = b""
        if self._splitter is not None:
            self._push(data)
            if not self._wide:  # half a character of two bytes must wait for its other half
                self._push(b"", final=True)

    def new(self, *, is_quiet: bool) -> Diagnosis:
        """Return the incidents that have not been told yet, as scanned.

        Words that no signature has are told once nothing more comes for now: what follows may be a
        message that one has.
        """
        diagnosis = self._scanner.diagnosis(self._path, given=self._renderer.settings)
        new = [
            incident for incident in diagnosis.incidents if _identity(incident) not in self._told
        ]
        new = [
            incident
            for incident in new
            if incident.certainty_ratio is None or (is_quiet and self._is_another(incident))
        ]
        self._told |= {_identity(incident) for incident in new}
        self._told_lines += [incident.location.line or 0 for incident in new]
        return replace(diagnosis, incidents=tuple(new))

    def _is_another(self, incident: Incident) -> bool:
        line = incident.location.line or 0
        return all(abs(line - told) > SAME_FAILURE_LINES for told in self._told_lines)

    def _begin(self) -> bytes:
        form = format_of(self._head, self._path)
        if form is not None:
            raise InputError(
                f"{printable_path(self._path)}: is {form.name} data, which cannot be followed",
                hint="leave --follow out",
            )
        encoding, first_byte = encoding_of(self._head)
        self._wide = encoding.startswith("utf-16")
        self._splitter = LineSplitter(encoding, first_byte)
        head = self._head
        self._head = b""
        return head

    def _push(self, data: bytes, *, final: bool = False) -> None:
        if self._splitter is not None:
            for line in self._splitter.feed(data, final=final):
                for whole in self._pieces.feed(line):
                    self._scanner.push(whole)


def _identity(incident: Incident) -> tuple[object, ...]:
    return (
        incident.kind,
        incident.start,
        incident.location.line,
        incident.location.byte,
        incident.location.process,
    )


def check_follow(paths: Sequence[str], form: str, *, summary: bool, on: str) -> None:
    """Raise UsageError for what cannot be followed: several logs, a folder, an object elsewhere, a
    form that has to end.
    """
    if len(paths) > 1:
        raise UsageError(
            f"--follow reads one log, not {len(paths)}", hint="start one oomguard for each log"
        )
    if form == "html":
        raise UsageError(
            "--follow cannot write a page: it has no end",
            hint="--format json, markdown or terminal",
        )
    if summary or on != "local":
        if summary:
            other = "--summary"
        else:
            other = f"--engine {on}"
        raise UsageError(
            f"--follow cannot go with {other}: what is followed has no end",
            hint="leave out one of them",
        )
    if is_url(paths[0]):
        raise UsageError(
            f"{printable_path(paths[0])}: an object does not grow, so it cannot be followed",
            hint="leave out --follow",
        )
    # takes any name, also one with a null byte
    if paths[0] != "-" and os.path.isdir(paths[0]):  # noqa: PTH112
        raise UsageError(
            f"{printable_path(paths[0])}: a folder cannot be followed", hint="name the log in it"
        )
