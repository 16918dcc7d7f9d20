"""Weights of the lexicon's features: a logistic regression in which a text counts by its surest phrase."""

from dataclasses import dataclass

import numpy as np

from oomguard.diagnosing import default_rules
from oomguard.observe.scan import Scanner
from oomguard.observe.search_time import SearchTime
from oomguard.rules.load import RuleSet
from support.labelled_texts import Labelled, lines_of

# A ridge, so that a sign seen in few texts weighs little; chosen by the halves' figure among 0.1, 0.2, 1 and 3.
RIDGE = 0.1
ROUNDS = 8
STEPS = 60
PHRASES_OF_OTHERS = 12
# What a text counts: a signature's test is there twice, and what failed is told apart from more than fails. Chosen by the public
# threads' figure and the look-alikes' among 0.25, 0.5 and 1, and 1, 1.5 and 2.
COUNT_OF_TESTS = 0.5
COUNT_OF_OTHERS = 2.0
TESTS = frozenset({"tests of signatures", "the same amid a log"})


@dataclass(frozen=True)
class Weighed:
    """A text with the signs of each of its phrases, a row each (the first column is 1), and their messages."""

    group: str
    name: str
    fails: bool
    signs: np.ndarray
    messages: tuple[str, ...]

    @property
    def shown(self) -> str:
        """What is shown of it."""
        return " | ".join(message[:110] for message in self.messages[:2]) or "no phrase"


def weighed_texts(texts: list[Labelled]) -> list[Weighed]:
    """Read the phrases of each text, with no signature in force."""
    rules = default_rules()
    assert rules.lexicon is not None
    alone = RuleSet((), (), rules.quotations, rules.lexicon)
    out = []
    for text in texts:
        scanner = Scanner(alone, new_wordings=True)
        for line in lines_of(text.text):
            scanner.push(line)
        scanner.flush()
        judged = [one for one, _, _ in scanner.new_wordings.weighed(rules.quotations, SearchTime(), lambda _: None)]
        rows = [[1.0, *map(float, one.signs)] for one in judged]
        signs = np.array(rows) if rows else np.zeros((0, len(rules.lexicon.features) + 1))
        messages = tuple(one.hit.message for one in judged)
        out.append(Weighed(text.group, text.name, text.fails, signs, messages))
    return out


def certainty(weights: list[float], text: Weighed) -> float:
    """How sure it is that the text tells a failure: that of its surest phrase."""
    return float(_odds_to_ratio((text.signs @ np.array(weights)).max())) if len(text.signs) else 0.0


def fitted(texts: list[Weighed]) -> list[float]:
    """The bias and the weights that tell these texts apart, in the lexicon's order."""
    weights = None
    for _ in range(ROUNDS):
        rows, wanted, counts = _rows(texts, weights)
        weights = _newton(rows, wanted, counts, np.zeros(rows.shape[1]) if weights is None else weights)
    return [float(weight) for weight in weights]


def _rows(texts: list[Weighed], weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a failure the phrase that tells it best, of any other text all of them, together no more than a few failures."""
    rows, wanted, counts = [], [], []
    for text in (text for text in texts if len(text.signs)):
        count = COUNT_OF_TESTS if text.group in TESTS else 1.0
        if text.fails:
            best = text.signs.sum(axis=1) if weights is None else text.signs @ weights
            rows.append(text.signs[int(np.argmax(best))])
            wanted.append(1.0)
            counts.append(count)
            continue
        some = text.signs[:PHRASES_OF_OTHERS]
        for row in some:
            rows.append(row)
            wanted.append(0.0)
            counts.append(count * COUNT_OF_OTHERS * len(some) ** -0.5)
    return np.array(rows), np.array(wanted), np.array(counts)


def _newton(rows: np.ndarray, wanted: np.ndarray, counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    ridge = np.full(rows.shape[1], RIDGE * len(wanted) / 50)
    ridge[0] = 1e-6
    for _ in range(STEPS):
        said = _odds_to_ratio(rows @ weights)
        slope = rows.T @ (counts * (said - wanted)) + ridge * weights
        curve = (rows * (counts * said * (1 - said) + 1e-9)[:, None]).T @ rows + np.diag(ridge + 1e-6)
        step = np.linalg.solve(curve, slope)
        weights = weights - step
        if np.abs(step).max() < 1e-6:
            break
    return weights


def _odds_to_ratio(odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
