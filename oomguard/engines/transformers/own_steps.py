"""Processors and criteria of the user's own in parts of ``generate``: shown the whole batch at each step, asked again about all rows.

While a part runs the rows of the others are not known: copies of its own stand for them, so that each row keeps its place. Once every
row is done, each function is asked what the whole call would have asked it. What criteria say then decides where rows end; where a
processor answers otherwise than it did in a part, that part had other tokens, and the call is not run in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.observe import torch_memory

# Answers of other numbers of rows, in float32.
_RTOL: Final = 1e-5
_ATOL: Final = 1e-6
_UNKNOWN_TOKENS: Final = "rows go on in the whole call that ended in a part, as a criterion looks at other rows"


@dataclass(frozen=True, slots=True)
class Place:
    """The rows ``first`` to ``last`` of ``total``, sequences of one input counted apart."""

    first: int
    last: int
    total: int

    def in_whole(self, rows: Any) -> Any:
        """Return a tensor of the whole batch: the part's rows in their place, copies of them in the others."""
        import torch

        order = (torch.arange(self.total, device=rows.device) - self.first) % (self.last - self.first)
        return rows[order]

    def own(self, rows: Any) -> Any:
        """Return the part's rows of such a tensor."""
        return rows[self.first : self.last]


@dataclass(slots=True)
class OwnSteps:
    """What the parts of one call showed the user's functions, and where its rows end.

    Attributes:
        check: notes where a function's state is not what it was.
        asked: by a processor's number, step and first row, the scores that it got and gave.
        said: by a criterion's number, step and first row, which of the part's rows it ended.
        began: the columns of the tokens at the first step.
        tokens: what each part gave, by its first row.
        result: the tokens of the whole call; None before all rows are known.
    """

    check: Callable[[Any, bytes | None], None]
    asked: dict[tuple[int, int, int], tuple[Any, Any]] = field(default_factory=dict)
    said: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    began: int | None = None
    tokens: dict[int, Any] = field(default_factory=dict)
    result: Any = None

    def forget(self, first: int) -> None:
        """Drop what is known of rows from ``first`` on: they run once more."""
        self.tokens = {row: tokens for row, tokens in self.tokens.items() if row < first}
        self.asked = {key: pair for key, pair in self.asked.items() if key[2] < first}
        self.said = {key: ends for key, ends in self.said.items() if key[2] < first}

    def judge(
        self,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        total: int,
        pad: int | None,
        ends: frozenset[int],
        device: Any,
    ) -> str | None:
        """Ask about all rows; return why the parts cannot stand for the whole call, None where they can.

        Args:
            processors: the user's own, in their order.
            criteria: the user's own.
            total: the rows of the whole call's tokens.
            pad: the token after a row that has ended; None: rows go on until the last one has.
            ends: the tokens that end a row.
            device: where the functions get their tensors.
        """
        with torch_memory.on_host():
            found = self._with_ends(criteria, total, pad, ends, device)
            if isinstance(found, str):
                return found
            tokens, ended_at = found
            problem = self._compare(processors, tokens, ended_at, device)
            if problem is None:
                self.result = tokens
            return problem

    def _with_ends(
        self, criteria: Sequence[Any], total: int, pad: int | None, ends: frozenset[int], device: Any
    ) -> tuple[Any, Any] | str:
        """Return the tokens of the whole call, and the columns after which each row has ended."""
        import torch

        width = max(part.shape[1] for part in self.tokens.values())
        tokens = torch.full((total, width), 0 if pad is None else pad)
        known = torch.zeros(total, dtype=torch.long)
        for first, part in self.tokens.items():
            tokens[first : first + len(part), : part.shape[1]] = part
            known[first : first + len(part)] = part.shape[1]
        ended_at = torch.full((total,), width + 1)
        for column in range(self.began or width, width):
            ended = ended_at <= column
            if pad is not None:
                tokens[ended, column] = pad
            if bool((column >= known)[~ended if pad is not None else slice(None)].any()):
                return _UNKNOWN_TOKENS
            shown = tokens[:, : column + 1]
            now = torch.zeros(total, dtype=torch.bool)
            for number, each in enumerate(criteria):
                ends_now = _ends(each, shown.to(device))
                if not self._is_steady(each, number, (column + 1, device), ends_now & ~ended):
                    return f"{type(each).__name__} answers otherwise when it is asked again"
                now |= ends_now
            if ends:
                now |= torch.isin(tokens[:, column], torch.tensor(sorted(ends)))
            ended_at[now & ~ended] = column + 1
            if bool((ended_at <= column + 1).all()):
                return tokens[:, : column + 1], ended_at
        return tokens, ended_at

    def _is_steady(self, criterion: Any, number: int, at: tuple[int, Any], found: Any) -> bool:
        """Return whether a criterion that ends rows which it did not end in their part would still not end them there.

        It then looks at other rows. One that looks at a clock, or at an event, says something else now.
        """
        for (of, step, first), ends in self.said.items():
            mine = found[first : first + len(ends)]
            if of != number or step != at[0] or not bool((mine & ~ends).any()):
                continue
            place = Place(first, first + len(ends), len(found))
            shown = place.in_whole(self.tokens[first][:, :step])
            if bool((place.own(_ends(criterion, shown.to(at[1]))) != ends).any()):
                return False
        return True

    def _compare(self, processors: Sequence[Any], tokens: Any, ended_at: Any, device: Any) -> str | None:
        """Ask each processor about every step with all rows; return the one that answers otherwise, None without one."""
        import torch

        steps = sorted({step for _, step, _ in self.asked if step < tokens.shape[1]})
        last: dict[int, Any] = {}
        for step in steps:
            for number, processor in enumerate(processors):
                parts = {row: pair for (n, s, row), pair in self.asked.items() if (n, s) == (number, step)}
                scores = last.get(number)
                if scores is None:
                    wide = next(iter(parts.values()))[0]
                    scores = last[number] = torch.zeros(len(tokens), wide.shape[1], dtype=wide.dtype)
                for row, (given, _) in parts.items():
                    scores[row : row + len(given)] = given
                found = processor(tokens[:, :step].to(device), scores.to(device, copy=True)).to("cpu")
                for row, (_, answer) in parts.items():
                    goes_on = ended_at[row : row + len(answer)] > step
                    mine, theirs = found[row : row + len(answer)][goes_on], answer[goes_on]
                    if not torch.allclose(mine, theirs, _RTOL, _ATOL, equal_nan=True):
                        return f"{type(processor).__name__} gives a row other scores beside other rows"
        return None


def _ends(criterion: Any, tokens: Any) -> Any:
    """Return which rows a criterion ends, on the host; one answer is for all."""
    import torch

    found = torch.as_tensor(criterion(tokens, None)).to("cpu", torch.bool)
    return found if found.dim() else found.expand(len(tokens))


class ProcessorAtPlace:
    """A processor of the user's own, shown the whole batch."""

    def __init__(self, given: Any, state: bytes | None, steps: OwnSteps, number: int, place: Place) -> None:
        self._given, self._state, self._steps, self._number, self._place = given, state, steps, number, place

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores of the part's rows."""
        if self._steps.began is None:
            self._steps.began = input_ids.shape[1]
        with torch_memory.on_host():
            before = scores.to("cpu", copy=True)
        found = self._place.own(self._given(self._place.in_whole(input_ids), self._place.in_whole(scores))).clone()
        self._steps.check(self._given, self._state)
        with torch_memory.on_host():
            self._steps.asked[self._number, input_ids.shape[1], self._place.first] = (
                before,
                found.to("cpu", copy=True),
            )
        return found


class CriterionAtPlace:
    """A criterion of the user's own, shown the whole batch; ``is_mute``: it ends no row, as that is told at the end."""

    def __init__(
        self, given: Any, state: bytes | None, steps: OwnSteps, number: int, place: Place, *, is_mute: bool
    ) -> None:
        self._given, self._state, self._steps, self._number, self._place = given, state, steps, number, place
        self._is_mute = is_mute
        if hasattr(given, "eos_token_id"):  # by which transformers tells that ended rows are padded
            self.eos_token_id = given.eos_token_id

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        """Return which of the part's rows end."""
        import torch

        if self._steps.began is None:
            self._steps.began = input_ids.shape[1] - 1
        found = torch.as_tensor(self._given(self._place.in_whole(input_ids), scores, **more), device=input_ids.device)
        self._steps.check(self._given, self._state)
        own = (self._place.own(found) if found.dim() else found.expand(len(input_ids))).bool()
        with torch_memory.on_host():
            self._steps.said[self._number, input_ids.shape[1], self._place.first] = own.to("cpu", copy=True)
        return torch.zeros_like(own) if self._is_mute else own
