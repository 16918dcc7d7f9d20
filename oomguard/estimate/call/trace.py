"""Measure the peak memory of a transformers ``generate`` by a run under fake tensors.

The run needs no GPU and no weights, and takes seconds for a model of eight billion parameters. It
happens in a child process because fake tensors of a CUDA build would create a context on the
device. The result excludes the kernels' scratch memory and the caching allocator's rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.installation import install_hint
from oomguard.core.records import ShownRecord
from oomguard.estimate import Fit, answer
from oomguard.estimate.child_python import call_child

# The input and the result of an estimate for one ``generate`` call.


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """Hold the numbers of one ``generate`` call.

    ``config`` is the model's configuration; ``dtype`` is torch's name for the weights' data type.
    """

    config: Mapping[str, Any]
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int = 1
    attn_implementation: str = "sdpa"
    cache_implementation: str | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, repr=False)
class CallBudget(ShownRecord):
    """Report the bytes of one transformers ``generate`` call on one GPU.

    Attributes:
        weights_bytes: the weights.
        kv_bytes_per_token: one token of one row in all layers.
        kv_cache_bytes: the cache at the end of the call.
        peak_bytes: the largest allocation at once, including weights.
        reserved_bytes: memory that torch's caching allocator reserves at the peak.
        cuda_context_bytes: the CUDA context.
        largest_batch_size: the number of rows that would fit, 0 if none does.
        uncertainty_bytes: the uncertainty of the peak in both directions.
        traced: whether the estimate ran the model's own code under fake tensors.
        assumptions: one line for each value that was neither given nor read.
        unread: keys of the configuration that may shape the cache or the weights but were not read.
    """

    model: str
    gpu_total_bytes: int
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int
    attn_implementation: str
    cache_implementation: str | None
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    peak_bytes: int
    reserved_bytes: int
    cuda_context_bytes: int
    largest_batch_size: int
    uncertainty_bytes: int
    traced: bool
    assumptions: tuple[str, ...]
    unread: tuple[str, ...] = ()

    @property
    def fit(self) -> Fit:
        """Return whether the call fits on the GPU: ``yes``, ``no``, or ``unsure``."""
        return answer(self.spare_bytes, self.uncertainty_bytes, unread=bool(self.unread))

    @property
    def fits(self) -> bool:
        """Return whether the reserved memory and the CUDA context surely fit on the GPU."""
        return self.fit == "yes"

    @property
    def spare_bytes(self) -> int:
        """Return the GPU's bytes beyond the reserved memory and the CUDA context."""
        return self.gpu_total_bytes - self.reserved_bytes - self.cuda_context_bytes


# The live bytes of a call's first steps, and the extrapolation to the rest.

# Traced steps before the extrapolation: the first is the prefill, and the second may still warm up.
STEPS: Final = 5
# In repeating steps a storage lives at most this many steps: the next step uses a result, and its
# views live one step longer.
_OLDEST: Final = 2
# Steps that the allocator's replay repeats at most. Its waste is visible long before, and replays
# must be fast.
_MOST_REPEATS: Final = 256
_LEAST_REPEATS: Final = 16
_MOST_EVENTS: Final = 40_000


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """Hold the memory of a call's first steps, in bytes.

    Attributes:
        weights_bytes: the weights.
        start_bytes: everything alive at the start of the call, including weights.
        peaks_bytes: the peak of each step, including that.
        events: allocations and frees in order if requested: (storage number, bytes, or 0 for a
            free).
        events_seen: the number of events up to the end of each step.
        end_bytes: the peak of the call's last step if it was traced separately; None otherwise.
    """

    weights_bytes: int
    start_bytes: int
    peaks_bytes: tuple[int, ...]
    events: tuple[tuple[int, int], ...] = ()
    events_seen: tuple[int, ...] = ()
    end_bytes: int | None = None

    def last_step_bytes(self, steps: int) -> int:
        """Return the largest peak of the steps after the first, or 0 with only one step.

        Later steps end at ``end_bytes`` if it is known. Otherwise each adds as many bytes as the
        last traced one.
        """
        peaks = self.peaks_bytes
        if len(peaks) < 2:
            return 0
        left = steps - len(peaks)
        if left > 0 and self.end_bytes is not None:
            return max(self.end_bytes, *peaks[1:])
        last = peaks[-1] + (left * (peaks[-1] - peaks[-2]) if len(peaks) > 2 and left > 0 else 0)
        return max(last, *peaks[1:])

    def peak_bytes(self, steps: int) -> int:
        """Return the most bytes alive at once in a call of ``steps`` steps."""
        return max(self.peaks_bytes[0], self.last_step_bytes(steps))

    def all_events(self, steps: int) -> Iterator[tuple[int, int]]:
        """Yield the allocations and frees of ``steps`` steps by repeating the last traced one.

        Every size grows as between the last two traced steps. In a very long call one step
        represents several. If the last two steps differ, only the traced ones follow.
        """
        yield from self.events
        left = steps - len(self.events_seen)
        if left > 0:
            pattern = self._pattern()
        else:
            pattern = None
        if pattern is None:
            return
        born: dict[tuple[int, int], int] = {}
        for before in range(_OLDEST):
            first = self.events_seen[-2 - before]
            for at, entry in enumerate(pattern):
                if entry.bytes:
                    born[-before, at] = self.events[first + at][0]
        fresh = max(number for number, _ in self.events)
        repeats = min(
            left, _MOST_REPEATS, max(_LEAST_REPEATS, _MOST_EVENTS // max(1, len(pattern)))
        )
        for step in range(1, repeats + 1):
            for at, entry in enumerate(pattern):
                if entry.bytes:
                    fresh += 1
                    born[step, at] = fresh
                    yield fresh, entry.bytes + step * left // repeats * entry.rise_bytes
                else:
                    yield born.pop((step - entry.age, entry.place)), 0

    def _pattern(self) -> list[_Repeated] | None:
        """Return the events of the last step, or None if an earlier step did something else."""
        if len(self.events_seen) < 2 + _OLDEST:
            return None
        ends = self.events_seen[-2 - _OLDEST :]
        *others, before, last = (self.events[start:end] for start, end in pairwise(ends))
        if any(len(step) != len(last) for step in (*others, before)):
            return None
        older = {number for number, _ in self.events[: ends[0]]}
        # The age in steps and the position of each storage from the earlier steps.
        earlier: dict[int, tuple[int, int]] = {}
        for age, step in enumerate((before, *reversed(others)), 1):
            for at, (number, size) in enumerate(step):
                if size:
                    earlier[number] = (age, at)
        newer: dict[int, int] = {}
        pattern = []
        for at, ((_, size_before), (number, size)) in enumerate(zip(before, last, strict=True)):
            if bool(size_before) != bool(size):
                return None
            if size:
                if number in older or number in earlier or number in newer:
                    return None  # one that grew in place
                newer[number] = at
                pattern.append(_Repeated(size, size - size_before, 0, at))
            elif number in newer:
                pattern.append(_Repeated(0, 0, 0, newer[number]))
            elif number in earlier:
                pattern.append(_Repeated(0, 0, *earlier[number]))
            else:
                return None
        return pattern


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Describe one repeating event: a new storage, ``rise_bytes`` larger than a step before.

    With 0 bytes it is the free of the storage that was new ``age`` steps ago at ``place``.
    """

    bytes: int
    rise_bytes: int
    age: int
    place: int


_LIMIT_S: Final = 600
_ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


def traced_steps(call: PlannedCall) -> TracedSteps:
    """Run a call's first steps under fake tensors.

    Raises:
        InputError: torch or transformers is missing, or cannot run the model.
        SettingError: a number of the call is not above zero.
    """
    for name in ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams"):
        if getattr(call, name) <= 0:
            raise SettingError(f"{name} is {getattr(call, name)}")
    question = {
        **{name: getattr(call, name) for name in call.__slots__},
        "config": dict(call.config),
    }
    answer = call_child(
        "oomguard.estimate.call.trace_process",
        question,
        limit_s=_LIMIT_S,
        environment=_ENVIRONMENT,
        failed="the trace of the model failed",
        late="the trace took more than {} seconds",
        hint=f"if torch or transformers is missing: {install_hint('hf')}",
        late_hint="use fewer prompt tokens or beams",
    )
    return TracedSteps(
        weights_bytes=answer["weights_bytes"],
        start_bytes=answer["start_bytes"],
        peaks_bytes=tuple(answer["peaks_bytes"]),
        events=tuple((number, size) for number, size in answer["events"]),
        events_seen=tuple(answer["events_seen"]),
        end_bytes=answer["end_bytes"],
    )
