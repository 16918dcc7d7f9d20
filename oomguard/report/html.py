"""A diagnosis as one self-contained HTML page: it loads nothing, escapes every text and works without its script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Final

from oomguard.incident import Diagnosis
from oomguard.report.html_parts import attempts_section, diagnosis_sections, element, escaped
from oomguard.report.html_style import DARK, PAGE_STYLE, SCRIPT, STYLE
from oomguard.report.presentable import drawn

_VERDICTS: Final = {"oom": "out of memory", "no_oom": "no out-of-memory"}


def to_html(
    diagnosis: Diagnosis,
    *more: Diagnosis,
    table: Sequence[Sequence[str]] | None = None,
    sentence: str | None = None,
) -> str:
    """Return the page of one diagnosis or several.

    Args:
        diagnosis: the first diagnosis, which names the page.
        more: others, in order.
        table: the attempts below them, headings first.
        sentence: what was reduced, below the table.
    """
    body = []
    for shown in drawn([diagnosis, *more]):
        title = f"oomguard: {shown.source}" if shown.source else "oomguard"
        body.append(element("h1", f"{title}: {_VERDICTS[shown.verdict]}"))
        body += diagnosis_sections(shown, level=2)
    if table is not None or sentence is not None:
        body.append(attempts_section(drawn(list(table or ())), drawn(sentence or ""), level=2))
    name = drawn(diagnosis.source)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        f"<title>{escaped(f'{name} - oomguard' if name else 'oomguard')}</title>\n"
        f"<style>{STYLE}{DARK}{PAGE_STYLE}</style>\n</head>\n"
        f'<body>\n<main class="oomguard">\n{"".join(body)}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _policy() -> str:
    """Return what a browser may do for the page: use its own styles and its own script, load nothing."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
