"""Show what an upgrade of vLLM changes for one start, on a terminal and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import GIB
from oomguard.report.json import SCHEMA
from oomguard.report.plan import plan_record

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.planning.upgrade import Upgrade, UpgradeRow

_BYTES: Final = frozenset({"part", "pool"})
_SHOWN: Final = {
    "kv_cache_tokens": "tokens",
    "max_concurrency": "requests at once",
    "longest_request_tokens": "longest request",
}


def upgrade_record(upgrade: Upgrade) -> dict[str, Any]:
    """Return the comparison as one JSON object; sizes are in bytes."""
    rows = []
    for row in upgrade.rows:
        rows.append({"name": row.name, "kind": row.kind, "from": row.old, "to": row.new})
    return {
        "schema": SCHEMA,
        "headline": headline(upgrade),
        "rows": rows,
        "reasons": list(upgrade.reasons),
        "old": plan_record(upgrade.old),
        "new": plan_record(upgrade.new),
    }


def headline(upgrade: Upgrade) -> str:
    """Return one line: how the KV cache changes, and whether the start still fits."""
    version = upgrade.new.budget.settings.version
    ratio = upgrade.pool_ratio
    fit = {"yes": "fits", "no": "does not fit", "unsure": "unsure"}[upgrade.new.fit]
    if ratio is None:
        return f"KV cache: none with vLLM {upgrade.old.budget.settings.version}; {version}: {fit}"
    # A cache that differs by less than half a percent is as large for the user.
    percent = round(100 * (ratio - 1))
    if percent == 0:
        return f"KV cache as large with vLLM {version}: {fit}"
    word = "larger" if percent > 0 else "smaller"
    return f"KV cache {abs(percent)}% {word} with vLLM {version}: {fit}"


def print_upgrade(console: Console, upgrade: Upgrade) -> None:
    """Print the headline, one table, the reasons, and the command under the new version."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(headline(upgrade), style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column(upgrade.new.budget.model, style="dim")
    for plan in (upgrade.old, upgrade.new):
        table.add_column(str(plan.budget.settings.version), justify="right")
    table.add_column("change", justify="right")
    for row in upgrade.rows:
        name = _SHOWN.get(row.name, row.name)
        table.add_row(name, _value(row, row.old), _value(row, row.new), _change(row))
    console.print(table)
    for reason in upgrade.reasons:
        console.print(Text(reason), soft_wrap=True)
    for change in upgrade.new.changes:
        console.print(f"{change.setting}: {change.old} -> {change.new}", soft_wrap=True)
    if upgrade.new.command is not None:
        # Without markup=False, brackets in the command would be read as styles.
        console.print(upgrade.new.command, markup=False, soft_wrap=True)


def _value(row: UpgradeRow, value: float | None) -> str:
    if value is None:
        return "-"
    if row.kind in _BYTES:
        return f"{value / GIB:.2f} GiB"
    if row.name == "max_concurrency":
        return f"{value:.2f}"
    # A bool is an int too, but True needs no separators.
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _change(row: UpgradeRow) -> str:
    change = row.change
    # The difference of two defaults is a number that means nothing.
    if change is None or not change or row.kind == "default":
        return ""
    sign = "+" if change > 0 else "-"
    return f"{sign}{_value(row, abs(change))}"
