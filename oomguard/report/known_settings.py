"""What is known to work, for a terminal and as JSON: model, engine, device, settings, how often they held, and who measured it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from oomguard.past_runs import KnownSettings
from oomguard.report.history import moment
from oomguard.report.json import SCHEMA, json_line, plain_value
from oomguard.report.presentable import drawn, masked

if TYPE_CHECKING:
    from rich.console import Console

_MOST_NAMED: Final = 3


def print_known_settings(console: Console, entries: Sequence[KnownSettings]) -> None:
    """Print a row for each, in the order given."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("held", justify="right", no_wrap=True)
    table.add_column("model, engine, device")
    table.add_column("settings")
    table.add_column("measured by, last")
    for entry in map(drawn, entries):
        engine = " ".join(filter(None, (entry.engine, entry.engine_version)))
        lines = [Text(entry.model or "model not known", style="bold"), Text(engine)]
        what = Text("\n").join([*lines, Text(entry.device or "no GPU that NVML told")])
        settings = "\n".join(f"{name} {value}" for name, value in entry.settings.items()) or "as given"
        style = "green" if not entry.failed else "bold red" if not entry.held else "yellow"
        held = Text(f"{entry.held} of {entry.held + entry.failed}", style=style)
        table.add_row(held, what, Text(settings), Text(f"{_measured_by(entry)}\n{moment(entry.last_at)}"))
    console.print()
    console.print(Padding(table, (0, 1)))
    console.print()


def known_settings_json(entry: KnownSettings) -> str:
    """Return one as a line of JSON, its texts masked."""
    row = {
        "schema": SCHEMA,
        "model": masked(entry.model),
        "engine": entry.engine,
        "engine_version": entry.engine_version,
        "device": entry.device,
        "settings": plain_value(masked(dict(entry.settings))),
        "held": entry.held,
        "failed": entry.failed,
        "measured_by": [
            {"who": masked(who), "host": masked(host), "attempts": count} for who, host, count in entry.measured_by
        ],
        "first_at": _utc(entry.first_at),
        "last_at": _utc(entry.last_at),
    }
    return json_line(row)


def person(who: str | None, host: str | None) -> str:
    """Return a user of a host in words."""
    return "@".join(filter(None, (who, host))) or "not recorded"


def _measured_by(entry: KnownSettings) -> str:
    names = [f"{person(who, host)} {count}" for who, host, count in entry.measured_by]
    more = len(names) - _MOST_NAMED
    return "\n".join([*names[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])


def _utc(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")
