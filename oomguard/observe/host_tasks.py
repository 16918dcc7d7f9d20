"""The table of processes that the kernel prints before it ends one for memory: who had most of the host's memory.

Linux mm/oom_kill.c dump_tasks, 2.6 to 6.12: the columns between ``rss`` and the name differ by version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from oomguard.facts import Fact

_HEADS: Final = ("Tasks state (memory values in pages)", "tgid total_vm")
_PAGE_BYTES: Final = 4096
# pid, uid, tgid and total_vm; then rss, and two to eight numbers before the name
_ROW: Final = re.compile(r"\[ *\d{1,10}\] +\d{1,10} +\d{1,10} +\d{1,15} +(\d{1,15})(?: +-?\d{1,15}){2,8} +(\S.{0,60})$")
# Between the table and the kernel's own words on whom it ended.
_NEAR_LINES: Final = 400


@dataclass(slots=True)
class HostTasks:
    """The largest process of each table so far, by the lines of the table."""

    found: list[tuple[int, int, int, str]] = field(default_factory=list)
    is_open: bool = False

    def see(self, text: str, line: int) -> None:
        """Take a line that opens a table or, while one is open, may belong to it."""
        if any(head in text for head in _HEADS):
            if not self.is_open:
                self.found.append((line, line, 0, ""))
            self.is_open = True
            return
        row = _ROW.search(text) if self.is_open else None
        if row is None:
            self.is_open = False
            return
        first, _, most, name = self.found[-1]
        size = int(row.group(1)) * _PAGE_BYTES
        self.found[-1] = (first, line, size, row.group(2).strip()) if size > most else (first, line, most, name)

    def facts(self, first_line: int, last_line: int) -> dict[str, Fact]:
        """Return who had most memory, by the table beside a failure's lines."""
        for first, last, size, name in self.found:
            if size and first_line - _NEAR_LINES <= last and first <= last_line + _NEAR_LINES:
                return {
                    "host_holder": Fact("host_holder", name, line=first),
                    "host_holder_bytes": Fact("host_holder_bytes", size, line=first),
                }
        return {}
