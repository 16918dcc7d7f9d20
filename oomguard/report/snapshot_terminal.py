"""An allocation snapshot on the terminal: a panel a device, with who holds what, and where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from oomguard.report.snapshot import GROUP_HEADINGS, STACK_HEADINGS, group_rows, sentences, stack_rows, title

if TYPE_CHECKING:
    from rich.console import RenderableType

    from oomguard.snapshots.records import DeviceMemory

SHOWN_STACKS: Final = 8


def snapshot_panel(device: DeviceMemory, *, ascii_only: bool = False) -> RenderableType:
    """Return one device of a snapshot as a panel; its texts must be fit for a screen (``drawn``)."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [Text(text) for text in sentences(device)]
    if device.stacks:
        parts += [Text(), _table(STACK_HEADINGS, stack_rows(device, SHOWN_STACKS), text_columns={3})]
    if device.groups:
        parts += [Text(), _table(GROUP_HEADINGS, group_rows(device), text_columns={0})]
    frame = box.ASCII if ascii_only else box.ROUNDED
    style = "green" if device.refusal is None else "red"
    return Panel(Group(*parts), title=Text(title(device)), title_align="left", border_style=style, box=frame)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: set[int]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        is_text = number in text_columns
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
