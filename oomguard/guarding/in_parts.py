"""A call handed over to be run in parts: our own mistake there never takes the place of what the user's call does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from oomguard.engines.protocol import ReadCall, WatchedCall
from oomguard.guarding import neighbours
from oomguard.guarding.beginning import Generators
from oomguard.guarding.failure import run_guarded
from oomguard.guarding.micro_batch import MicroBatchRun
from oomguard.guarding.mistake import tell_of_mistake
from oomguard.guarding.owner import Owner

Outcome = tuple[Any, BaseException | None]


def read_or_none(read: ReadCall, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WatchedCall | None:
    """Read a call; return None where that fails, as of arguments that the call itself refuses."""
    with contextlib.suppress(Exception):
        return read(model, args, kwargs)
    return None


def may_split(call: WatchedCall | None) -> bool:
    """Return whether a call's rows can be run apart."""
    with contextlib.suppress(Exception):
        return call is not None and call.not_splittable is None
    return False


def in_parts(
    owner: Owner,
    wrapped: Callable[..., Any],
    call: WatchedCall,
    failed: list[BaseException] | None = None,
    *,
    seconds: float | None = None,
    measured: Mapping[str, float] | None = None,
) -> Outcome:
    """Return the call's result and None, or None and the exception to raise: its own, also where our own mistake ends the run.

    ``failed`` holds the exception of the whole call, where it has been run already.
    """
    if failed:
        owner.failing(failed[0])
    first, generators = (failed[0], None) if failed else (None, Generators.now())
    run, mistake = run_guarded(MicroBatchRun, (owner, wrapped, call), {})
    if mistake is None:
        try:
            outcome, mistake = run_guarded(run.run, (failed,), {"seconds": seconds, "measured": measured})
        finally:
            neighbours.leave()
        if mistake is None:
            ended: Outcome = outcome
            return ended
    tell_of_mistake(mistake, first)
    if generators is None:
        return None, first
    owner.known.forget(call)
    generators.put_back()
    return run_guarded(wrapped, call.args, call.kwargs)
