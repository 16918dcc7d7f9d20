"""A guard that goes to another process with the function that it guards: what it permits and knows goes with it, what happened stays."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from oomguard.guarding.known_sizes import KnownSizes
from oomguard.snapshots.taking import Recording

if TYPE_CHECKING:
    from oomguard.guarding.guard import Guard

_HAPPENED = {"diagnosis": None, "partial": None}


def state_of(guard: Guard) -> dict[str, Any]:
    """Return what another process makes the guard of."""
    path = None if guard.recording is None else guard.recording.path
    happened: dict[str, Any] = {"_attempts": deque(maxlen=guard._attempts.maxlen), "reported": set(), **_HAPPENED}
    state = {**vars(guard), **happened, "recording": path, "known": guard.known.learned()}
    del state["_lock"]
    return state


def restore(guard: Guard, state: dict[str, Any]) -> None:
    """Make the guard of what ``state_of`` returned, with what others of its job have learned since."""
    from oomguard.guarding.after_kill import AfterKill  # only a guard that was sent has others elsewhere
    from oomguard.guarding.shared_sizes import share

    vars(guard).update(state)
    guard._lock, guard.known = threading.Lock(), KnownSizes()
    guard.recording = None if state["recording"] is None else Recording(state["recording"])
    guard.known.take(state["known"])
    guard.known.after_kill = AfterKill(state["_name"], guard.policy)
    share(state["_name"], guard.known)
