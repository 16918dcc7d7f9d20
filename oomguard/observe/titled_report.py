"""A report whose title tells the failure while its body shows the run and not the message: cut off, or never pasted.

Who reports a failure names it in the title ("[Bug]: NPU out of memory with long prompts") and pastes the traceback, of which a tool
keeps the beginning. The title counts where the lines below it are those of a run or of somebody who reports one, and where none of them
tells another error.
"""

from __future__ import annotations

from oomguard.observe.search_time import SearchTime
from oomguard.observe.title import mark_chars
from oomguard.rules.lexicon import TitleWords

# A report's body shows the run within so many lines.
HEAD_LINES = 120
_HEAD_CHARS = 12_000
# Without a tracker's marks a title is short, and no sentence.
_BARE_CHARS = 100
_ENDS = (".", ":", ",", "`", "{", "(", "|")


class TitledReport:
    """The first line of an input, and the lines below it that tell whether it is the title of a report."""

    def __init__(self, words: TitleWords | None) -> None:
        self._words = words
        self._seen = 0
        self._chars = 0
        self._body: list[str] = []
        self.line: int | None = None
        self._title = ""

    def see(self, text: str, number: int) -> None:
        """Take the next line of the input; only the first ones are kept."""
        if self._seen >= HEAD_LINES or self._words is None:
            return
        if self.line is None:
            if not text.strip():
                return
            self.line, self._title = number, text
        elif self._chars < _HEAD_CHARS:
            self._body.append(text)
            self._chars += len(text)
        self._seen += 1

    @property
    def body(self) -> str:
        """The lines below the title."""
        return "\n".join(self._body)[:_HEAD_CHARS]

    def is_denied(self, time: SearchTime) -> bool:
        """Return whether the first line is a tracker's title and the body tells another error: the title tells no failure then."""
        words = self._words
        if words is None or self.line is None or not mark_chars(self._title):
            return False
        try:
            return time.search(words.other_error, self.body) is not None
        except TimeoutError:
            return False

    def tells(self, time: SearchTime, *, is_report: bool = False) -> bool:
        """Return whether the title tells a failure that the body does not print; False where a search takes too long.

        ``is_report``: somebody reports or asks in the body.
        """
        words, body = self._words, self.body
        if words is None or self.line is None:
            return False
        try:
            marks = mark_chars(self._title)
            said = self._title[marks:].strip()
            has_frames = time.search(words.frames, body) is not None
            # Of a report that shows no run a line of its own is the title.
            has_body = has_frames or (is_report and self._body[:1] == [""] and said[:1].isalnum())
            if not marks and not (has_body and len(said) <= _BARE_CHARS and said[-1:] not in _ENDS):
                return False
            is_told = has_frames or is_report or time.search(words.run, body) is not None
            if not is_told or (not has_frames and time.search(words.change, said)):
                return False
            if time.search(words.phrase, said) is None or time.search(words.harmless, self._title):
                return False
            return time.search(words.other_error, body) is None
        except TimeoutError:
            return False
