"""Which service or pod each line of a log of several containers is of: ``docker compose logs``, ``kubectl logs --prefix``, collectors.

In containers all engines have the same process numbers, so what one prints must not be taken for another's.
"""

from __future__ import annotations

from oomguard.observe.text import PlainLine

# A collector's own word, not a column that may be a table's.
_NAMED = ("pod/", "container/")
# A logger's column, not a container's.
_LEVELS = frozenset({"TRACE", "DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "SUCCESS"})


class Services:
    """The services that one stream has named so far.

    A first column is a service's name once a process, a logger or a clock stands behind it, or once two lines in a row have the same:
    a row of a table has neither. A line without the column goes on with the service of the line before it.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._current: str | None = None
        self._before: str | None = None

    def of(self, line: PlainLine) -> str | None:
        """Return the service of the next line, None before any was named."""
        name = line.service
        if name is not None and name.upper() not in _LEVELS and not name.isdigit():
            if name.startswith(_NAMED) or line.is_record or name == self._before:
                self._known.add(name)
            if name in self._known:
                self._current = name
        self._before = name
        return self._current
