"""What failed over many logs as one self-contained page: incidents over time, then a row a group."""

from __future__ import annotations

from typing import Final

from oomguard.fleet.groups import FleetSummary
from oomguard.report.fleet import headline, rows, sentences
from oomguard.report.fleet_picture import fleet_picture
from oomguard.report.html_parts import element
from oomguard.report.html_table import headed, html_table, table_page
from oomguard.report.picture_svg import svg

_OTHERS: Final = "oomguard diagnose --summary --format json"


def page(summary: FleetSummary) -> str:
    """Return the page; it loads nothing and has no script."""
    parts = [element("p", sentence) for sentence in sentences(summary)]
    if summary.moments:
        parts.append(headed("Incidents over time", f'<div class="wide">\n{svg(fleet_picture(summary))}</div>\n'))
    if summary.groups:
        parts.append(headed("Groups", html_table(rows(summary), _OTHERS, wide={1, 2, 3, 5})))
    return table_page(f"oomguard: {headline(summary)}", "".join(parts))
