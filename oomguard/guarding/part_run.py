"""Some rows of a call run by themselves: where there is no room to cut them out, they failed as where there is none to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oomguard.engines.protocol import WatchedCall
from oomguard.guarding.failure import run_guarded
from oomguard.observe.exceptions import may_be_oom


def run_rows(wrapped: Callable[..., Any], call: WatchedCall, start: int, stop: int) -> tuple[Any, BaseException | None]:
    """Return what rows ``start`` to ``stop`` give and None, or None and the exception that their call raised.

    Raises:
        Exception: a mistake of ours in cutting them out.
    """
    given, error = run_guarded(call.part, (start, stop), {})
    if error is None:
        args, kwargs = given
        return run_guarded(wrapped, args, kwargs)
    if not may_be_oom(error):
        raise error
    return None, error
