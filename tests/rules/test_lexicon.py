"""The lexicon's file: read with its mistakes named, and fitted by a script, never by hand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from oomguard.errors import RuleError
from oomguard.rules.load import load_rules, shipped_root

SLOWEST_S = 0.5
FILE = shipped_root() / "lexicon.toml"
SMALL = """
schema = 1
bias = -1.0
least_ratio = 0.5
anchors = ["arena"]
phrase = 'arena failed'
harmless = []
nearest = []
clause = []

[[feature]]
name = "a size"
part = "line"
weight = 2.0
pattern = 'GiB'
"""


def load(tmp_path: Path, text: str):
    (tmp_path / "lexicon.toml").write_text(text)
    return load_rules([tmp_path])


def test_a_users_lexicon_takes_the_place_of_the_shipped_one(tmp_path):
    rules = load(tmp_path, SMALL)

    assert [feature.name for feature in rules.lexicon.features] == ["a size"]
    assert rules.words == ("arena",)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("'GiB'", "'(GiB'", "not a pattern"),
        ('part = "line"', 'part = "lines"', "not a known part"),
        ("weight = 2.0", 'weight = "2"', "expected float"),
        ("bias = -1.0", "", "the key 'bias' is missing"),
    ],
)
def test_a_mistake_names_its_file_and_what_is_wrong(tmp_path, old, new, said):
    with pytest.raises(RuleError, match=said) as caught:
        load(tmp_path, SMALL.replace(old, new))

    assert "lexicon.toml" in str(caught.value)


def test_every_shipped_pattern_compiles_and_every_feature_has_a_name_of_its_own_and_a_weight():
    lexicon = load_rules(check=True).lexicon
    names = [feature.name for feature in lexicon.features]

    assert len(set(names)) == len(names)
    # What no labelled text holds gets no weight, and decides nothing: it belongs among what is harmless, or nowhere.
    assert [feature.name for feature in lexicon.features if not feature.weight] == []
    assert len(FILE.read_bytes()) <= 300_000


@pytest.mark.parametrize(
    "atom", ["1", "1,", "A_B_", "oomkill", "alloc_fail", "exceed ", "memory ", "not enough a ", "('", "a.b:"]
)
def test_no_pattern_is_slow_on_a_long_line_of_its_own_words(atom):
    lexicon = load_rules(check=True).lexicon
    line = (atom * 6000)[:6000]
    signs = [*(pattern for _part, pattern in lexicon.harmless), *(feature.pattern for feature in lexicon.features)]

    account = lexicon.account
    said = (*account.tells, *account.denies, account.phrase, account.line, account.report, account.form)

    for pattern in (*lexicon.phrases, *lexicon.clauses, *signs, *said, account.document, account.note):
        for text in (line, f"\n\0{line}\n", f"{line}\n{line}\0\n{line}"):
            began = time.thread_time()
            pattern.search(text)
            assert time.thread_time() - began < SLOWEST_S, pattern.pattern
