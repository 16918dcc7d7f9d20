"""The fragment for a notebook: nothing of it reaches the notebook around it."""

from __future__ import annotations

import re
import subprocess
import sys

from oomguard.report.html import DARK, STYLE, notebook_html


def test_it_is_a_fragment_that_runs_and_loads_nothing(diagnosis_of_all):
    text = notebook_html(diagnosis_of_all)

    assert text.startswith('<div class="oomguard">')
    assert text.endswith("</div>\n")
    assert not re.search(r"<(?:html|body|script|link|img|iframe|h1)\b|url\(|@import|https?:", text)


def test_notebook_view_of_a_diagnosis_imports_only_the_record():
    made = "from oomguard.core.incident import Diagnosis; print(Diagnosis('a.log')._repr_html_())"
    shown = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True)

    assert shown.stdout.startswith('<div class="oomguard">')
    assert "a.log" in shown.stdout


def test_every_style_is_below_its_own_class():
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", STYLE + DARK))

    assert len(selectors) > 10
    assert [
        s for group in selectors for s in group.split(",") if not s.strip().startswith(".oomguard")
    ] == []
