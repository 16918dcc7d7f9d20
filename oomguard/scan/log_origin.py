"""Who wrote a log, as its place tells: a pod and container, a node, a job, a task, a rank; the
patterns are data (``log_origin.toml``).
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.core.records import Record

_FILE: Final = Path(__file__).with_name("log_origin.toml")


@dataclass(frozen=True, slots=True, repr=False)
class Writer(Record):
    """Who wrote a log, as far as its path tells; None: the path does not tell. ``layout`` names
    whose habit the path follows.
    """

    layout: str | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None
    node: str | None = None
    job: str | None = None
    task: str | None = None
    rank: str | None = None
    process: str | None = None
    session: str | None = None
    pid: str | None = None

    @property
    def words(self) -> str:
        """The writer in words, as ``pod ns/name container engine``; empty where nothing
        is known.
        """
        pod = "/".join(filter(None, (self.namespace, self.pod)))
        job = "_".join(filter(None, (self.job, self.task)))
        named = (
            ("pod", pod),
            ("container", self.container),
            ("node", self.node),
            ("job", job),
            ("rank", self.rank),
            ("", None if job or pod else self.process),
        )
        return " ".join(f"{what} {name}".strip() for what, name in named if name)


@dataclass(frozen=True, slots=True)
class Layout:
    """One habit of naming logs: the pattern of a path."""

    name: str
    pattern: re.Pattern[str]


@functools.cache
def layouts() -> tuple[Layout, ...]:
    """Return the known layouts, read once."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["layout"]
    return tuple(Layout(row["name"], re.compile(row["pattern"])) for row in rows)


@functools.lru_cache(maxsize=1024)
def writer_of(path: str) -> Writer:
    """Return who wrote the log at this path or URL."""
    for layout in layouts():
        if found := layout.pattern.search(path):
            told = found.groupdict()
            told["job"] = told.get("job") or told.pop("submission", None)
            return Writer(
                layout.name,
                **{name: told.get(name) for name in Writer.__slots__ if name != "layout"},
            )
    return Writer()


def is_log_of_layout(path: str) -> bool:
    """Return whether the path is that of a log in a known layout."""
    return writer_of(path).layout is not None
