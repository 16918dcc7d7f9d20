"""Follow one growing log for ``oomguard diagnose --follow``, and report each incident once."""

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
from oomguard.scan.inputs import is_url
from oomguard.scan.source import (
    HEAD_BYTES,
    Event,
    LineSplitter,
    LogChange,
    encoding_of,
    follow,
    follow_stream,
    format_of,
    open_log,
    printable_path,
    raw_standard_input,
)

# How often to look at a log that never pauses.
BUSY_S: Final = 5.0
# Unrecognized messages within this many lines belong to one failure.
SAME_FAILURE_LINES: Final = 400


def follow_input(
    path: str, renderer: InputRenderer, write: Callable[[str], None], say: Callable[[str], None]
) -> Iterator[bool]:
    """Write every new incident of a log; yield each time whether one was an out-of-memory.

    The end of a pipe ends it; a file never does.

    Args:
        path: the log, or ``-`` for standard input.
        renderer: diagnoses and renders the log.
        write: receives the text of new incidents.
        say: receives events of the file.

    Raises:
        InputError: if the log cannot be read or followed.
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
    except (OSError, ValueError):  # not there yet; reading reports any other error
        mode = stat.S_IFREG
    if stat.S_ISFIFO(mode):
        with Path(path).open("rb", buffering=0) as pipe:
            yield from follow_stream(pipe)
        return
    if not stat.S_ISREG(mode):
        open_log(path).close()  # this reports why it is not a log
    yield from follow(path)


def _write_new(
    reading: _Reading, renderer: InputRenderer, write: Callable[[str], None], *, is_quiet: bool
) -> bool:
    from oomguard.diagnosis import assess_all
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
    """Hold one file from its start: its lines so far, and the reported incidents."""

    def __init__(self, path: str, renderer: InputRenderer) -> None:
        from oomguard.scan.lines import Pieces
        from oomguard.scan.scan import Scanner

        self._path = path
        self._renderer = renderer
        self._scanner = Scanner(renderer.rules, unrecognized=True)
        self._splitter: LineSplitter | None = None
        self._pieces = Pieces()
        self._head = b""
        self._wide = False
        self._reported: set[tuple[object, ...]] = set()
        self._reported_lines: list[int] = []

    def feed(self, data: bytes) -> None:
        """Take more bytes; keep the first few until they show the encoding."""
        if self._splitter is None:
            self._head += data
            if len(self._head) < HEAD_BYTES:
                return
            data = self._begin()
        self._push(data)

    def settle(self) -> None:
        """Take an unfinished line as it is, because nothing more comes for now."""
        if self._splitter is None and self._head:
            data = self._begin()
        else:
            data = b""
        if self._splitter is not None:
            self._push(data)
            if not self._wide:  # half of a two-byte character must wait for its other half
                self._push(b"", final=True)

    def new(self, *, is_quiet: bool) -> Diagnosis:
        """Return the incidents that were not reported yet, as scanned.

        Unrecognized messages are reported only during a pause, because a recognized message may
        follow.
        """
        diagnosis = self._scanner.diagnosis(self._path, given=self._renderer.settings)
        new = [
            incident
            for incident in diagnosis.incidents
            if _identity(incident) not in self._reported
        ]
        new = [
            incident
            for incident in new
            if incident.certainty_ratio is None or (is_quiet and self._is_another(incident))
        ]
        self._reported |= {_identity(incident) for incident in new}
        self._reported_lines += [incident.location.line or 0 for incident in new]
        return replace(diagnosis, incidents=tuple(new))

    def _is_another(self, incident: Incident) -> bool:
        line = incident.location.line or 0
        return all(abs(line - reported) > SAME_FAILURE_LINES for reported in self._reported_lines)

    def _begin(self) -> bytes:
        form = format_of(self._head, self._path)
        if form is not None:
            raise InputError(
                f"{printable_path(self._path)}: this is {form.name} data, which oomguard cannot "
                "follow",
                hint="run it without --follow",
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
    """Check that the input can be followed: one local log, and a format without an end.

    Raises:
        UsageError: if it cannot.
    """
    if len(paths) > 1:
        raise UsageError(
            f"--follow takes one log, got {len(paths)}", hint="start one oomguard for each log"
        )
    if form == "html":
        raise UsageError(
            "--follow cannot write HTML, because its output has no end",
            hint="use --format json, md or terminal",
        )
    if summary or on != "local":
        if summary:
            other = "--summary"
        else:
            other = f"--on {on}"
        raise UsageError(
            f"--follow does not work with {other}, because a followed log has no end",
            hint="leave out one of them",
        )
    if is_url(paths[0]):
        raise UsageError(
            f"{printable_path(paths[0])}: oomguard cannot follow a remote object",
            hint="run it without --follow",
        )
    # accepts any name, even one with a null byte
    if paths[0] != "-" and os.path.isdir(paths[0]):  # noqa: PTH112
        raise UsageError(
            f"{printable_path(paths[0])}: oomguard cannot follow a folder",
            hint="name the log in it",
        )
