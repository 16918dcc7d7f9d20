"""Shipped patterns on long lines written to hurt them: none comes near the time limit of a search."""

from __future__ import annotations

import time

from oomguard.rules.rule_files import load_rules
from support.each import each

LINE_CHARS = 6000
LIMIT_S = 0.15  # of processor time; a search is given up after half a second
ATOMS = (
    '"',
    "`",
    "(",
    "-",
    "=",
    ":",
    " ",
    "\t",
    "a",
    "0",
    "é ",
    "a ",
    "a.",
    "0,",
    "-0",
    ' "',
    "` ",
    "Error: ",
    "{if ",
    "test_[",
    'File "x", line 1',
    "user ",
    "train",
)
BEGINS = ("", "- ", "x = '")
ENDS = ("!", "`\0")


def slowest(pattern, texts) -> tuple[float, str]:
    worst = (0.0, "")
    for text in texts:
        for _ in range(2):  # what something else on the machine took is not the pattern's
            began = time.thread_time()
            pattern.search(text)
            took = time.thread_time() - began
            if took < LIMIT_S:
                break
        worst = max(worst, (took, f"{text[:30]}…{text[-10:]}"))
    return worst


def rows(atom: str) -> str:
    return (atom * (LINE_CHARS // len(atom) + 1))[:LINE_CHARS]


@each("quotation", load_rules().quotations)
def test_a_quotation_is_looked_for_in_time_on_any_long_line(quotation):
    quotation.pattern.search("")
    texts = (f"{begin}{rows(atom)}{end}" for atom in ATOMS for begin in BEGINS for end in ENDS)

    took, text = slowest(quotation.pattern, texts)

    assert took < LIMIT_S, text


@each("signature", load_rules().signatures)
def test_a_signature_is_looked_for_in_time_on_any_long_line(signature):
    for wording in signature.wordings:
        anchor = wording.anchor
        wording.pattern.search("")
        texts = [
            rows(anchor),
            rows(f"{anchor} "),
            rows(f"-{anchor}"),
            rows(f"{anchor}\n"),
            rows(f"{anchor[:-1]}0"),
        ]
        texts += [f"{rows(atom)}{anchor}" for atom in (*ATOMS, "\n", "\n ")]
        texts += [f"{anchor}{rows(atom)}{anchor}" for atom in (*ATOMS, "\n", "\n ")]

        took, text = slowest(wording.pattern, texts)

        assert took < LIMIT_S, (wording.key, text)
    for clause in signature.clauses:
        took, text = slowest(clause, [rows(atom) for atom in ATOMS])

        assert took < LIMIT_S, text
