"""The page of ``run`` names a test for each thing that it guarantees: those tests are there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "how-to" / "run.md").read_text()


def test_each_guarantee_names_tests_that_are_here():
    section = PAGE.partition("## What `run` guarantees")[2].partition("\n## ")[0]
    sentences = re.findall(r"^\d\. .*(?:\n   .*)*", section, re.MULTILINE)
    defined = set(
        re.findall(
            r"^def (test_\w+)",
            "\n".join(path.read_text() for path in HERE.glob("test_*.py")),
            re.MULTILINE,
        )
    )

    assert len(sentences) == 5
    for sentence in sentences:
        named = re.findall(r"`(test_\w+)`", sentence)
        assert named, sentence
        assert set(named) <= defined
