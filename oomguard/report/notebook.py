"""A diagnosis in a notebook's cell: the page's parts without the page."""

from __future__ import annotations

from oomguard.incident import Diagnosis
from oomguard.report.html_parts import diagnosis_sections, element
from oomguard.report.html_style import DARK, STYLE
from oomguard.report.presentable import drawn


def notebook_html(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as a fragment whose styles reach nothing outside it, and that loads and runs nothing."""
    shown = drawn(diagnosis)
    source = element("p", shown.source, "dim") if shown.source else ""
    return (
        f'<div class="oomguard">\n<style>{STYLE}{DARK}</style>\n{source}'
        f"{''.join(diagnosis_sections(shown, level=3))}</div>\n"
    )
