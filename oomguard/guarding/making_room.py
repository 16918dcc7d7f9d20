"""What lies on the device beside a call that ran out of memory: results of its own finished parts and of calls before it, other calls."""

from __future__ import annotations

from typing import Final

from oomguard.engines.known import held_results_bytes, move_results
from oomguard.engines.protocol import WatchedCall
from oomguard.guarding import neighbours
from oomguard.guarding.failure import clear, run_guarded, scan_error
from oomguard.guarding.gathered import Gathered
from oomguard.log import get_logger
from oomguard.observe import torch_memory
from oomguard.observe.exceptions import may_be_oom

# Smaller results than this share of what was asked for make no room for it on the host.
_PARKED_SHARE: Final = 16


def make_room(error: BaseException, gathered: Gathered, call: WatchedCall) -> bool:
    """Move results to the host where a call failed for memory beside them, else let other calls end; return whether it may run again."""
    return _move_results(error, gathered) or (call.not_splittable is None and neighbours.have_ended(error, call.model))


def _move_results(error: BaseException, gathered: Gathered) -> bool:
    own, earlier = gathered.device_bytes, held_results_bytes()
    failure = scan_error(error).first_cause if (own or earlier) and may_be_oom(error) else None
    if failure is None or (own + earlier) * _PARKED_SHARE < (failure.number("tried_bytes") or 0):
        return False
    clear(error)
    failed = [run_guarded(move, (), {})[1] for move, size in ((gathered.park, own), (move_results, earlier)) if size]
    torch_memory.release()
    if earlier and not any(failed):
        get_logger().warning("results of earlier batches wait on the host", size_bytes=earlier)
    return not any(failed)
