"""A diagnosis as one self-contained HTML page: the terminal's panel, rendered by rich."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from oomguard.incident import Diagnosis
from oomguard.report.terminal import print_diagnosis

if TYPE_CHECKING:
    from rich.table import Table

PAGE_COLUMNS = 100


def to_html(diagnosis: Diagnosis, *, table: Table | None = None, sentence: str | None = None) -> str:
    """The panel as a page without scripts or outside files; every text is escaped by the renderer.

    ``table`` and ``sentence`` (the attempts, what was reduced) stand below it.
    """
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=PAGE_COLUMNS, force_terminal=True, highlight=False)
    print_diagnosis(console, diagnosis)
    if table is not None:
        console.print(table)
    if sentence is not None:
        console.print(sentence, markup=False)
    return console.export_html(inline_styles=True)
