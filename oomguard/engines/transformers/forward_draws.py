"""Whether a forward draws random numbers: a part of it would draw others than the whole call, so it is not run in parts.

But for single numbers, which are the same whatever the rows: versions of transformers draw one a layer that is left out at random in
training, in training or not. Each part draws those that the first one drew.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from oomguard.observe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.draws import States

WHY_NOT: Final = "the call draws random numbers: parts would draw others than the whole call"


@contextlib.contextmanager
def noting_draws(model: Any, note: Callable[[str], object]) -> Iterator[None]:
    """Call ``note`` with the reason where torch's generators have moved meanwhile."""
    from oomguard.engines.transformers.draws import are_equal, states_now

    device = getattr(model, "device", None)
    with torch_memory.on_host():  # where they stand is told by tensors, which are the host's
        before, others = states_now(device), _others()
    yield
    with torch_memory.on_host():
        now = states_now(device)
    if not are_equal(before, now) or _others() != others:
        note(WHY_NOT)


class AlikeDraws:
    """What the parts of a call draw where every draw gives one number for all rows.

    Attributes:
        is_known: whether a trace has shown it; the parts may draw nothing else.
    """

    def __init__(self) -> None:
        self.is_known = False
        # Where the generators stood before the first part, and after it.
        self._first: tuple[States, States] | None = None

    @contextlib.contextmanager
    def of_part(self, model: Any, note: Callable[[str], object]) -> Iterator[None]:
        """Have a part draw what the first part drew; call ``note`` with the reason where it drew anything else."""
        from oomguard.engines.transformers.draws import are_equal, set_states, states_now

        device, others = getattr(model, "device", None), _others()
        with torch_memory.on_host():
            before = states_now(device)
            if self._first is not None:
                set_states(self._first[0])
        yield
        with torch_memory.on_host():
            now = states_now(device)
        if self._first is None:
            self._first = before, now
            if not are_equal(before, now):
                tell_of_draws(WHY_NOT)
        if not are_equal(self._first[1], now) or _others() != others:
            note(WHY_NOT)


def _others() -> tuple[object, ...]:
    """Return where the generators of Python and of numpy stand."""
    numpy = sys.modules.get("numpy.random")
    state = None if numpy is None else numpy.get_state(legacy=True)
    return random.getstate(), state and (state[1].tobytes(), *state[2:])


def tell_of_draws(_why: str) -> None:
    """Log that a whole call was made again, and drew: what it drew when it failed cannot be drawn again."""
    from oomguard.log import get_logger

    hint = "other ones than a call that runs at once"
    get_logger().warning("a call that draws random numbers was made again", hint=hint)
