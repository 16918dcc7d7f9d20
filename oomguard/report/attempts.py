"""The table of attempts: what was changed, what came of it, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomguard.facts import REGISTRY, format_gib
from oomguard.incident import Attempt, Effect

if TYPE_CHECKING:
    from rich.table import Table


def attempts_table(attempts: Sequence[Attempt]) -> Table:
    """One row per attempt, in order."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="What oomguard did", title_justify="left")
    for name in ("attempt", "changed", "result", "predicted", "measured", "time"):
        table.add_column(name, overflow="fold")
    for attempt in attempts:
        changed = "\n".join(f"{p.setting} {'' if p.old is None else f'{p.old} '}-> {p.new} [{p.effect}]" for p in attempt.patches)
        if not changed and attempt.settings:
            changed = "\n".join(f"{name} -> {value}" for name, value in attempt.settings.items())
        predicted = {name: value for patch in attempt.patches for name, value in patch.predicts.items()}
        table.add_row(
            str(attempt.number), _plain(changed or "nothing"), _result(attempt), _plain(_figures(predicted)),
            _plain(_figures(attempt.measured)), f"{attempt.seconds:.1f} s",
        )  # fmt: skip
    return table


def reduced(attempts: Sequence[Attempt]) -> str | None:
    """The sentence that a run with reduced settings owes its user, None where nothing was reduced."""
    patches = [p for a in attempts for p in a.patches if p.effect >= Effect.REDUCES_CAPACITY]
    if not patches or not attempts[-1].succeeded:
        return None
    changes = ", ".join(f"{p.setting} {p.old} -> {p.new}" for p in patches)
    return f"Ran with reduced settings: {changes}. {' '.join(dict.fromkeys(p.tradeoff for p in patches if p.tradeoff))}"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _result(attempt: Attempt) -> str:
    if attempt.succeeded:
        return "ran"
    return attempt.incident.kind if attempt.incident else attempt.error


def _figures(values: object) -> str:
    if not isinstance(values, dict):
        values = dict(values)  # type: ignore[call-overload]
    return "\n".join(f"{name.removesuffix('_bytes')} {_figure(name, value)}" for name, value in values.items())


def _figure(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_gib(value)
    return f"{value:,.0f}" if name in REGISTRY and REGISTRY[name].type == "int" else f"{value:.3g}"
