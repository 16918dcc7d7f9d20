"""Decide what follows an out-of-memory in a step: smaller steps, one request alone, or its end.

Pure logic without vLLM. A step is its scheduled tokens by request. A request is *fresh* until it
has produced a token: the requests that ran before are unlikely to be the ones that do not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# A chunk of so few tokens is not worth splitting further before its request is blamed.
SMALL_TOKENS = 16
# After so long without a failure the budget of a step doubles.
QUIET_S = 10.0
# The others wait so long for a suspected request that makes progress alone; twice as long after
# each of its failures, so that even a long prompt comes to the part that fails.
ALONE_S = 0.1
# So many requests that fail alone, one after another within a minute and without a step that works
# in between: then it may not be the requests.
MOST_OFFENDERS = 3
OFFENDERS_WITHIN_S = 60.0
# So many failed steps without one that works.
MOST_FAILURES = 40


@dataclass(frozen=True)
class FailedStep:
    """A step that ran out of memory.

    Attributes:
        tokens: the scheduled tokens by request, in the order of the step.
        fresh: the requests that have not produced a token yet.
        tried_bytes: the size of the failed allocation; None if unknown.
        is_alone: whether the other requests were held back to test this one.
        can_split: whether a request's prompt may be computed in several steps.
    """

    tokens: Mapping[str, int]
    fresh: Collection[str]
    tried_bytes: int | None = None
    is_alone: bool = False
    can_split: bool = True

    @property
    def total_tokens(self) -> int:
        """The tokens of the step."""
        return sum(self.tokens.values())


@dataclass(frozen=True)
class StepDecision:
    """What follows a failed step.

    Attributes:
        budget_tokens: the most tokens of a step from now on.
        offender: the request that cannot fit; None if none is proven.
        alone: the request to run alone next, to learn whether it is the one; None: all run.
        gives_up: whether recoveries do not help. If an offender is named too, the engine may still
            work without it.
    """

    budget_tokens: int
    offender: str | None = None
    alone: str | None = None
    gives_up: bool = False


class StepBudget:
    """The most tokens of a step, lowered by failures and raised in quiet times.

        budget = StepBudget(2048)
        budget.fail(FailedStep({"a": 2048}, {"a"}), now_s=0.0).budget_tokens    # 1024

    Args:
        full_tokens: the budget that the engine was started with.
    """

    def __init__(self, full_tokens: int) -> None:
        self.full_tokens = full_tokens
        self.current_tokens = full_tokens
        # The smallest size that failed: the budget stays below it.
        self.ceiling_tokens: int | None = None
        # The lowered budget under which steps last worked; None if steps of full size do.
        self.learned_tokens: int | None = None
        self._largest_success_tokens = 0
        self._failures: dict[str, int] = {}
        # The budget, the ceiling and the learned budget before a request's first failure: they come
        # back if it was the one that did not fit.
        self._before: dict[str, tuple[int, int | None, int | None]] = {}
        # The steps of one request only that failed since the last step that worked, each as its
        # tokens and the size of the failed allocation.
        self._single_failures: list[tuple[int, int | None]] = []
        self._failed_in_a_row = 0
        self._offenders_at_s: list[float] = []
        self._changed_at_s = 0.0

    @property
    def is_calm(self) -> bool:
        """Whether the budget is full and no request is suspected."""
        return self.current_tokens == self.full_tokens and not self._failures

    def fail(self, step: FailedStep, now_s: float) -> StepDecision:
        """Record a failed step, and return what follows."""
        fresh = [name for name in step.tokens if name in step.fresh]
        suspects = fresh or list(step.tokens)
        self._changed_at_s = now_s
        self._failed_in_a_row += 1
        for name in suspects:
            self._failures[name] = self._failures.get(name, 0) + 1
            before = (self.current_tokens, self.ceiling_tokens, self.learned_tokens)
            self._before.setdefault(name, before)
        if self._failed_in_a_row > MOST_FAILURES:
            return StepDecision(self.current_tokens, gives_up=True)
        if len(step.tokens) > 1:
            self._single_failures.clear()
        else:
            self._single_failures.append((step.total_tokens, step.tried_bytes))
            if self._is_proven(step):
                return self._end(suspects[0], now_s)
        # The first failure at a size that has worked may be chance: the caches are free now.
        if self._failed_in_a_row > 1 or step.total_tokens > self._largest_success_tokens:
            self._lower(step, fresh)
        if step.is_alone:
            return StepDecision(self.current_tokens, alone=suspects[0])
        again = [name for name in fresh if self._failures[name] > 1]
        if again and len(step.tokens) > 1:
            return StepDecision(self.current_tokens, alone=again[0])
        return StepDecision(self.current_tokens)

    def succeed(self, tokens: int, produced: Collection[str]) -> None:
        """Record a step that worked, with the requests that produced a token in it."""
        self._largest_success_tokens = max(self._largest_success_tokens, tokens)
        self.learned_tokens = None
        if self.current_tokens < self.full_tokens:
            self.learned_tokens = self.current_tokens
        self._failed_in_a_row = 0
        self._single_failures.clear()
        self._offenders_at_s.clear()
        for name in produced:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Drop what is known of a request that made progress or ended."""
        self._failures.pop(name, None)
        self._before.pop(name, None)

    def alone_s(self, name: str) -> float:
        """Return how long a suspected request may run alone; longer after each failure."""
        failures = min(self._failures.get(name, 0), 8)
        return ALONE_S * float(2**failures)

    def names(self) -> list[str]:
        """Return the requests that are suspected."""
        return list(self._failures)

    def grow(self, now_s: float) -> bool:
        """Double the budget after a quiet time, below what failed; return whether it changed."""
        if self.current_tokens >= self.full_tokens or now_s - self._changed_at_s < QUIET_S:
            return False
        wanted = min(self.current_tokens * 2, self.full_tokens)
        if self.ceiling_tokens is not None:
            wanted = min(wanted, max(1, self.ceiling_tokens - 1))
        self._changed_at_s = now_s
        has_grown = wanted > self.current_tokens
        self.current_tokens = max(self.current_tokens, wanted)
        return has_grown

    def _is_proven(self, step: FailedStep) -> bool:
        """Return whether the only request of a step is the one that does not fit.

        One failure may be chance. After two in a row, it is proven if its step cannot get smaller,
        or if a smaller step did not need less.
        """
        if len(self._single_failures) < 2:
            return False
        if not step.can_split or step.total_tokens <= SMALL_TOKENS:
            return True
        tokens, tried_bytes = self._single_failures[-2]
        if tried_bytes is None or step.tried_bytes is None:
            return False
        return step.total_tokens < tokens and step.tried_bytes >= tried_bytes

    def _end(self, name: str, now_s: float) -> StepDecision:
        """Return the end of a request; its failures say nothing about other requests' steps."""
        self._single_failures.clear()
        self.current_tokens, self.ceiling_tokens, self.learned_tokens = self._before[name]
        self.forget(name)
        earlier = [at_s for at_s in self._offenders_at_s if now_s - at_s <= OFFENDERS_WITHIN_S]
        self._offenders_at_s = [*earlier, now_s]
        gives_up = len(self._offenders_at_s) >= MOST_OFFENDERS
        return StepDecision(self.current_tokens, offender=name, gives_up=gives_up)

    def _lower(self, step: FailedStep, fresh: Collection[str]) -> None:
        """Halve the budget below what failed; the requests that ran before keep their token."""
        total = step.total_tokens
        wanted = total // 2
        if fresh and step.can_split:
            # A budget of half would leave nothing for a prompt next to many streams.
            others = len(step.tokens) - len(fresh)
            wanted = max(wanted, others + sum(step.tokens[name] for name in fresh) // 2)
        wanted = max(1, min(wanted, total - 1))
        self.current_tokens = min(self.current_tokens, wanted)
        self.ceiling_tokens = min(total, self.ceiling_tokens or total)
        self._largest_success_tokens = min(self._largest_success_tokens, total - 1)
