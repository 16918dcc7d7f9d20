"""How an engine's server tells that it works, from the engine's own data file: engines/<folder>/serving.toml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.engines.listening import flag_value, has_flag
from oomguard.user_files import read_tables


@dataclass(frozen=True, slots=True)
class ServingNames:
    """One engine's names; see the head of its file.

    Attributes:
        metrics: what stands in its /metrics.
        http: its endpoints, and what asking them takes.
        processes: titles of its processes.
    """

    metrics: Mapping[str, Any]
    http: Mapping[str, Any]
    processes: Mapping[str, Any]

    def counts_nothing(self, argv: tuple[str, ...]) -> bool:
        """Return whether the command turns the engine's counters off."""
        return has_flag(argv, self.metrics["off_flags"])

    def speaks_tls(self, argv: tuple[str, ...]) -> bool:
        """Return whether the server is asked over TLS."""
        return has_flag(argv, self.http["tls_flags"])

    def key(self, argv: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
        """Return the key that a request needs; None without one."""
        return flag_value(argv, self.http["key_flag"]) or environ.get(self.http["key_variable"]) or None


@functools.cache
def serving_names(engine: str) -> ServingNames | None:
    """Return what is known of an engine's servers; None where that is nothing."""
    files = sorted(Path(__file__).parent.glob("*/serving.toml"))
    for table in read_tables("serving", files).values():
        if table["engine"] == engine:
            return ServingNames(table["metrics"], table["http"], table["processes"])
    return None
