"""A core that is gone without a word: vLLM notices it, and leaves its synchronous caller at an empty queue. This wakes the caller."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from oomguard.observe.host import read_cgroup

if TYPE_CHECKING:
    from oomguard.engines.vllm.in_process.lasting_client import LastingClient

LOOKS_EVERY_S: Final = 0.25
EMPTY_FOR_S: Final = 1.0
NAME: Final = "oomguard-waker"


def watch(client: LastingClient) -> None:
    """Watch the client's core until it dies, is followed by another one, or the program lets go of the client."""
    inner = weakref.ref(client.inner)
    threading.Thread(target=_wake, args=(weakref.ref(client), inner), name=NAME, daemon=True).start()


def _wake(attended: weakref.ref[LastingClient], watched: weakref.ref[Any]) -> None:
    empty_since_s: float | None = None
    while True:
        time.sleep(LOOKS_EVERY_S)
        client, inner = attended(), watched()
        if client is None or inner is None or client.inner is not inner or client.is_given_up:
            return
        if not inner.resources.engine_dead:
            client.before = read_cgroup() or client.before
        elif type(inner).__name__ == "AsyncMPClient":
            return  # its task of outputs is cancelled, which wakes who waits
        elif not inner.outputs_queue.empty():
            empty_since_s = None
        else:
            empty_since_s = empty_since_s or time.monotonic()
            if time.monotonic() - empty_since_s >= EMPTY_FOR_S:
                inner.outputs_queue.put_nowait(death())
                return
        del client, inner


def death() -> Exception:
    """Return vLLM's exception for a core that has died."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error: Exception = EngineDeadError()
    return error
