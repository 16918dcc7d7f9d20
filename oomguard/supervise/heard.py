"""What a command's output says when it has ended: its failures and figures, and what ended it where that was no failure of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from oomguard.incident import Diagnosis, Patch, SettingInForce
from oomguard.log import get_logger
from oomguard.observe.anchors import Finder, finder
from oomguard.observe.scan import Scanner, scan
from oomguard.observe.source import Line
from oomguard.rules.load import RuleSet
from oomguard.supervise.last_words import TAIL_BYTES, last_words
from oomguard.supervise.replay import replayed
from oomguard.supervisor.output_buffer import RecordedOutput

_ALWAYS: Final = {"kv_cache_available_bytes", "kv_cache_capacity_tokens"}


@dataclass(frozen=True, slots=True)
class Heard:
    """The scanned output; ``ended_of`` is the exception that ended the command, where it is no memory failure and passes none on.

    ``tail`` is the end of both streams, where the command failed.
    """

    scanner: Scanner
    ended_of: str | None = None
    tail: str = ""

    def or_said(
        self, scanned: Diagnosis, said: tuple[Line, ...], rules: RuleSet, given: Mapping[str, SettingInForce]
    ) -> Diagnosis:
        """Return what was found, or where that is nothing, what the engine noted itself: its output went into a file.

        Where its last words stand in the output it was heard, and nothing is taken from them.
        """
        last = said[-1].text.rpartition("] ")[2].strip() if said else ""
        is_unheard = bool(last) and last not in self.tail and not scanned.incidents
        return scan(said, rules, "", given=given, unrecognized=True) if is_unheard else scanned

    def comparable(self, patches: Iterable[Patch]) -> dict[str, float]:
        """Return the printed figures that a prediction can be held against, and those of the KV cache."""
        wanted = {name for patch in patches for name in patch.predicts} | _ALWAYS
        return {name: value for name, value in self.scanner.measured.items() if name in wanted}


def hear(recording: RecordedOutput, status: int, rules: RuleSet) -> Heard:
    """Read a recording whose command ended with ``status``."""
    if recording.failed:
        get_logger().warning("a part of the output is not diagnosed", reason=recording.failed)

    def make_finder() -> Finder:
        return finder(rules.anchors)

    if not status:
        return Heard(replayed(recording, rules, make_finder))
    tail = b"\n".join(recording.tail(stream, TAIL_BYTES) for stream in (1, 2)).decode("utf-8", "replace")
    scanner = replayed(recording, rules, make_finder, unrecognized=True)
    return Heard(scanner, _other_end(recording, rules), tail)


def _other_end(recording: RecordedOutput, rules: RuleSet) -> str | None:
    words = last_words(recording.tail(2, TAIL_BYTES)) or last_words(recording.tail(1, TAIL_BYTES))
    if words is None or words.passes_on:
        return None
    if words.is_of_a_test:
        return words.exception
    lines = (Line(number, 0, text) for number, text in enumerate(words.lines, 1))
    return None if scan(lines, rules, unrecognized=True).incidents else words.exception
