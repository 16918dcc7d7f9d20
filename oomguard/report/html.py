"""A diagnosis as one self-contained HTML page: the terminal's panel, rendered by rich."""

from __future__ import annotations

import io
from collections.abc import Mapping

from oomguard.incident import Diagnosis
from oomguard.report.terminal import print_diagnosis

PAGE_COLUMNS = 110


def to_html(diagnosis: Diagnosis, commands: Mapping[str, str] | None = None) -> str:
    """The panel as a page without scripts or outside files; every text is escaped by the renderer."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=PAGE_COLUMNS, force_terminal=True, highlight=False)
    print_diagnosis(console, diagnosis, commands)
    return console.export_html(inline_styles=True)
