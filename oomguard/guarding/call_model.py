"""The model behind the failure of a guarded call: its trace, what its rows held, and what of it may be done another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from oomguard.engines.protocol import WatchedCall
from oomguard.engines.reason import told
from oomguard.guarding.failure import row_bytes_at_failure
from oomguard.incident import Incident
from oomguard.observe import torch_memory
from oomguard.remedy.modelled_call import CallModel
from oomguard.remedy.variant import Variant

# Kernels' scratch memory, and pieces that no block fits in, are a small part of what a call takes: after a traced size that
# failed this share of the room is filled.
_TRUSTED_FAILURES: Final = 1
_ROOM_AFTER_FAILURE_RATIO: Final = 0.85


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The rows that failed together.

    Attributes:
        rows: how many.
        not_splittable: why they cannot be run apart; None where they can.
        failures: how often the call has failed before. A size that a trace gave and that failed is taken for nearly right
            once; after that the trace is wrong for this call, and what is measured counts.
        others_ran: whether rows of the same call ran.
        attempts_left: how often the rest may be run again.
    """

    rows: int
    not_splittable: str | None
    failures: int
    others_ran: bool
    attempts_left: int


def model_of(
    call: WatchedCall, failure: Incident, failed: FailedRows, variants: Callable[[], Mapping[str, Variant]]
) -> CallModel:
    """Return the model of a call whose rows failed together; a trace of it may show that they cannot be run apart."""
    base = torch_memory.live_bytes(call.model)
    if failed.not_splittable is not None:
        failed = replace(failed, not_splittable=told(failed.not_splittable))
    trace = call.traced() if failed.failures <= _TRUSTED_FAILURES and failed.not_splittable is None else None
    if trace is not None and not failed.failures and (why := trace.why_together()) is not None:
        failed, trace = replace(failed, not_splittable=why), None
    model = CallModel(
        failed.rows,
        base,
        seen_row_bytes=row_bytes_at_failure(failure, base, failed.rows),
        trace=trace,
        room_ratio=_ROOM_AFTER_FAILURE_RATIO if failed.failures else 1.0,
        total_rows=call.rows,
        beside_row_bytes=call.beside_row_bytes,
        is_cached=torch_memory.is_cached(),
        not_splittable=failed.not_splittable,
        others_ran=failed.others_ran,
        attempts_left=failed.attempts_left,
    )
    model.traced_rows(failure)
    if model.not_splittable is None and (why := call.not_splittable) is not None:
        model.not_splittable, model.trace = told(why), None
    model.variants = variants()  # after the trace: what it found forbids other ways too
    return model


def why_together(call: WatchedCall) -> str | None:
    """Return what makes a row of a call depend on those beside it; None where nothing does, or that cannot be told."""
    trace = call.traced()
    return None if trace is None else trace.why_together()


def why_not_again(call: WatchedCall) -> str | None:
    """Return what a call that is made once more would find changed by the first; None where nothing, or that cannot be told."""
    trace = call.traced()
    return None if trace is None else trace.why_not_again()
