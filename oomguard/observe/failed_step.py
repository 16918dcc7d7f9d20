"""The requests in the step that an engine died in, named for who has to find the one that killed it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from oomguard.facts import Fact, number_of

_REQUEST: Final = re.compile(r"([^\s,:{}]+): (\d+)")
_MOST_NAMED: Final = 5


def step_requests(facts: Mapping[str, Fact]) -> dict[str, int]:
    """Return the requests of the step that failed with their tokens, the largest first; empty where none were printed.

    Of very many only the first are read; then the last of these may be cut, and is left out.
    """
    told = facts.get("step_requests")
    rows = _REQUEST.findall(str(told.value)) if told is not None else []
    found = {name: int(tokens) for name, tokens in (rows if "step_tokens" in facts else rows[:-1])}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def failed_step(facts: Mapping[str, Fact]) -> str | None:
    """Return in words which requests were in the step that failed; None where that was not printed.

    A request that takes far more tokens than the others was being read; one token each is the next word of an answer.
    """
    requests = step_requests(facts)
    if not requests:
        return None
    named = ", ".join(f"{name} ({tokens})" for name, tokens in list(requests.items())[:_MOST_NAMED])
    more = len(requests) - _MOST_NAMED
    total = number_of(facts, "step_tokens")
    count = "1 request" if len(requests) == 1 else f"{len(requests)} requests"
    size = f"at least {count}" if total is None else f"{count} of {int(total)} tokens"
    return f"in the step that failed: {size}, {named}{f' and {more} more' if more > 0 else ''}"
