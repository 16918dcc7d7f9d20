"""The file of the words' weights: read on first use, and refused where it is no such file."""

from __future__ import annotations

import math
import os

import pytest

from oomguard.errors import RuleError
from oomguard.rules.load import load_rules, shipped_root
from oomguard.rules.word_weights import MAX_BYTES, MAX_WEIGHT, WordWeights


def weights(tmp_path, content: bytes) -> WordWeights:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    return WordWeights(path)


def test_weights_of_known_signs_add_up(tmp_path):
    words = weights(tmp_path, b"0.50\t=alloc failed\n-0.25\t<see\n")

    assert words.odds(["=alloc failed", "<see", "=unknown"]) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"heavy\t=alloc\n", "expected a weight"),
        (b"0.5 =alloc\n", "expected a weight"),
        (b"0.5\t\n", "expected a weight"),
        (b"nan\t=alloc\n", "expected a weight"),
        (b"1e300\t=alloc\n", "expected a weight"),
        (b"\xff\xfe\t=alloc\n", "not UTF-8"),
        (b"0.1\t=" + b"a" * MAX_BYTES, "larger than"),
    ],
    ids=["no number", "no tab", "no sign", "not a number", "too heavy", "not text", "too large"],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, content, said):
    with pytest.raises(RuleError, match=said) as caught:
        _ = weights(tmp_path, content).weights

    assert "words.txt" in str(caught.value)


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "words.txt")

    with pytest.raises(RuleError, match="FIFO"):
        _ = WordWeights(tmp_path / "words.txt").weights


@pytest.mark.parametrize("name", ["../words.txt", "/etc/passwd", "a/b.txt"])
def test_a_lexicon_names_a_file_beside_it_only(tmp_path, name):
    text = (shipped_root() / "lexicon.toml").read_text(encoding="utf-8")
    (tmp_path / "lexicon.toml").write_text(text.replace('"lexicon_words.txt"', f'"{name}"'), encoding="utf-8")

    with pytest.raises(RuleError, match="beside this one"):
        load_rules([tmp_path])


def test_a_users_words_are_read_when_the_rules_are_loaded(tmp_path):
    text = (shipped_root() / "lexicon.toml").read_text(encoding="utf-8")
    (tmp_path / "lexicon.toml").write_text(text, encoding="utf-8")

    with pytest.raises(RuleError, match=r"lexicon_words\.txt"):
        load_rules([tmp_path])


def test_the_shipped_words_are_small_and_none_weighs_as_much_as_a_proof():
    words = load_rules().lexicon.words

    assert words.path.stat().st_size <= MAX_BYTES
    assert len(words.weights) > 1000
    assert max(map(abs, words.weights.values())) < MAX_WEIGHT / 4
    assert all(map(math.isfinite, words.weights.values()))
