"""The weights of words: a file of lines ``weight<TAB>sign`` beside the lexicon, written by benchmarks/fit_lexicon.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from oomguard.errors import RuleError
from oomguard.regular_file import read_regular

MAX_BYTES: Final = 300_000
MAX_WEIGHT: Final = 20.0


class WordWeights:
    """The weight (log odds) of each sign that ``observe.word_signs`` reads from a line; the file is read on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def weights(self) -> dict[str, float]:
        """The weights by sign; raises RuleError for a file that cannot be used."""
        return _read(self.path)

    def odds(self, signs: Iterable[str]) -> float:
        """Return the sum of the weights of these signs; one that has none weighs nothing."""
        weights = self.weights
        return math.fsum(weights[sign] for sign in signs if sign in weights)


def _read(path: Path) -> dict[str, float]:
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise RuleError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except UnicodeDecodeError:
        raise RuleError("not UTF-8", path=str(path)) from None
    weights: dict[str, float] = {}
    for number, line in enumerate(text.split("\n"), 1):
        weight, tab, sign = line.partition("\t")
        if not line:
            continue
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not tab or not sign or not abs(value) <= MAX_WEIGHT:
            raise RuleError(
                f"expected a weight of at most {MAX_WEIGHT:g}, a tab and a sign", path=str(path), line=number
            )
        weights[sign] = value
    return weights
