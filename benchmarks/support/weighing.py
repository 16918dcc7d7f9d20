"""Weights of the lexicon's features and words: a logistic regression in which a text counts by its surest phrase."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from oomguard.diagnosing import default_rules
from oomguard.observe.scan import Scanner
from oomguard.observe.search_time import SearchTime
from oomguard.rules.load import RuleSet
from support.labelled_texts import Labelled, lines_of

# A ridge, so that a sign seen in few texts weighs little; chosen by the folds' figure among 0.5, 1 and 2.
RIDGE = 1.0
# A word counts this much of a feature, and only where it stands in so many texts.
WORD_SCALE = 0.5
LEAST_TEXTS = 3
ROUNDS = 3
STEPS = 40
PHRASES_OF_OTHERS = 12
# What a text counts: a signature's test is there twice, and what failed is told apart from more than fails. Chosen by the public
# threads' figure and the look-alikes' among 0.25, 0.5 and 1, and 1, 1.5 and 2.
COUNT_OF_TESTS = 0.5
COUNT_OF_OTHERS = 2.0
TESTS = frozenset({"tests of signatures", "the same amid a log"})


@dataclass(frozen=True)
class Weighed:
    """A text with the signs and words of each of its phrases, and their messages."""

    group: str
    name: str
    fails: bool
    signs: tuple[tuple[bool, ...], ...]
    words: tuple[frozenset[str], ...]
    messages: tuple[str, ...]

    @property
    def shown(self) -> str:
        """What is shown of it."""
        return " | ".join(message[:110] for message in self.messages[:2]) or "no phrase"


@dataclass(frozen=True)
class Weights:
    """What a fit gives: of no sign, of each feature in the lexicon's order, of words."""

    bias: float
    features: tuple[float, ...]
    words: dict[str, float]


def weighed_texts(texts: list[Labelled]) -> list[Weighed]:
    """Read the phrases of each text, with no signature in force."""
    rules = default_rules()
    alone = RuleSet((), (), rules.quotations, rules.lexicon)
    out = []
    for text in texts:
        scanner = Scanner(alone, new_wordings=True)
        for line in lines_of(text.text):
            scanner.push(line)
        scanner.flush()
        judged = [one for one, _, _ in scanner.new_wordings.weighed(rules.quotations, SearchTime(), lambda _: None)]
        signs, words = tuple(one.signs for one in judged), tuple(one.words for one in judged)
        out.append(Weighed(text.group, text.name, text.fails, signs, words, tuple(one.hit.message for one in judged)))
    return out


class Phrases:
    """The phrases of many texts as the rows of one matrix, made once for all the fits on parts of them."""

    def __init__(self, texts: Sequence[Weighed]) -> None:
        self.texts = texts
        self.features = len(default_rules().lexicon.features)
        seen = Counter(word for text in texts for word in frozenset().union(*text.words))
        self.words = sorted(word for word, count in seen.items() if count >= LEAST_TEXTS)
        column = {word: 1 + self.features + number for number, word in enumerate(self.words)}
        ends = np.cumsum([0, *(len(text.signs) for text in texts)])
        self.rows_of = [range(begin, end) for begin, end in pairwise(ends.tolist())]
        self.rows = torch.zeros(int(ends[-1]), 1 + self.features + len(self.words))
        self.rows[:, 0] = 1
        phrases = ((signs, words) for text in texts for signs, words in zip(text.signs, text.words, strict=True))
        for row, (signs, words) in zip(self.rows, phrases, strict=True):
            row[1 : 1 + self.features] = torch.tensor(signs)
            row[[column[word] for word in words if word in column]] = WORD_SCALE

    def fit(self, chosen: Sequence[int]) -> torch.Tensor:
        """The weights of the matrix's columns that tell these texts apart."""
        weights = torch.zeros(self.rows.shape[1])
        for number in range(ROUNDS):
            odds = self.rows @ weights if number else self.rows[:, 1 : 1 + self.features].sum(dim=1)
            weights = self._tell_apart(*self._counted(chosen, odds), weights)
        return weights

    def certainties(self, weights: torch.Tensor, chosen: Sequence[int]) -> list[float]:
        """How sure it is of each text that it tells a failure: that of its surest phrase."""
        odds = self.rows @ weights
        return [
            float(torch.sigmoid(odds[list(self.rows_of[text])].max())) if self.rows_of[text] else 0.0 for text in chosen
        ]

    def named(self, weights: torch.Tensor) -> Weights:
        """The weights by what they weigh."""
        bias, *rest = weights.tolist()
        words = {word: WORD_SCALE * weight for word, weight in zip(self.words, rest[self.features :], strict=True)}
        return Weights(bias, tuple(rest[: self.features]), words)

    def _counted(self, chosen: Sequence[int], odds: torch.Tensor) -> tuple[list[int], list[float], list[float]]:
        """Of a failure the phrase that tells it best, of any other text the surest ones, together no more than a few failures."""
        rows: list[int] = []
        wanted: list[float] = []
        counts: list[float] = []
        for number in (number for number in chosen if self.rows_of[number]):
            text, own = self.texts[number], sorted(self.rows_of[number], key=lambda row: -odds[row])
            kept = own[: 1 if text.fails else PHRASES_OF_OTHERS]
            count = COUNT_OF_TESTS if text.group in TESTS else 1.0
            rows += kept
            wanted += [float(text.fails)] * len(kept)
            counts += [count if text.fails else count * COUNT_OF_OTHERS * len(kept) ** -0.5] * len(kept)
        return rows, wanted, counts

    def _tell_apart(
        self, rows: list[int], wanted: list[float], counts: list[float], begin: torch.Tensor
    ) -> torch.Tensor:
        inside, said, counted = self.rows[rows], torch.tensor(wanted), torch.tensor(counts)
        weights = begin.clone().requires_grad_()
        solver = torch.optim.LBFGS([weights], max_iter=STEPS, tolerance_change=1e-5, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            solver.zero_grad()
            wrong = torch.nn.functional.binary_cross_entropy_with_logits(
                inside @ weights, said, counted, reduction="sum"
            )
            total = wrong + RIDGE / 2 * weights[1:].square().sum()
            total.backward()
            return total

        solver.step(loss)
        return weights.detach()
