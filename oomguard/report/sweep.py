"""A sweep as a table: one row for each value of a setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from oomguard.facts import format_gib
from oomguard.memory.generate.call import CallBudget
from oomguard.memory.vllm.start import StartBudget
from oomguard.report.json import SCHEMA
from oomguard.report.start_budget import start_record

if TYPE_CHECKING:
    from rich.console import Console

_START_TITLES = ("weights", "activations", "KV cache", "KV tokens", "at once", "fits")
_CALL_TITLES = ("weights", "KV cache", "allocated", "reserved", "largest batch", "fits")


def sweep_records(setting: str, rows: Iterable[tuple[str, StartBudget | str]]) -> Iterator[dict[str, Any]]:
    """Yield a record for each value; of a value that the engine would refuse, why."""
    for value, start in rows:
        refused = {"schema": SCHEMA, setting: value, "fits": False, "reasons": [start]}
        yield refused if isinstance(start, str) else start_record(start)


def print_start_sweep(console: Console, setting: str, rows: Sequence[tuple[str, StartBudget | str]]) -> None:
    """Print one row for each value; why the engine would refuse a value stands below the table."""
    _print_rows(console, (setting, *_START_TITLES), ((value, *_start_cells(start)) for value, start in rows))
    for value, start in rows:
        if isinstance(start, str):
            console.print(f"{value}: {start}", markup=False)


def _start_cells(start: StartBudget | str) -> Iterator[str]:
    if isinstance(start, str):
        yield from ["-"] * (len(_START_TITLES) - 1)
        yield "refused"
        return
    yield format_gib(start.weights_bytes)
    yield format_gib(start.peak_activation_bytes)
    yield format_gib(start.kv_cache_pool_bytes)
    yield f"{start.kv_cache_tokens:,}"
    yield f"{start.max_concurrency:.2f}"
    yield _yes(start.fits)


def print_call_sweep(console: Console, setting: str, rows: Sequence[tuple[str, CallBudget]]) -> None:
    """Print one row for each value of a setting of the call."""
    _print_rows(console, (setting, *_CALL_TITLES), ((value, *_call_cells(call)) for value, call in rows))


def _call_cells(call: CallBudget) -> Iterator[str]:
    yield format_gib(call.weights_bytes)
    yield format_gib(call.kv_cache_bytes)
    yield format_gib(call.peak_bytes)
    yield format_gib(call.reserved_bytes)
    yield str(call.largest_batch_size)
    yield _yes(call.fits)


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def _print_rows(console: Console, titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
