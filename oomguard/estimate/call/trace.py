"""Peak memory of a transformers ``generate``, from running the model's own code under fake tensors
in a child process.

It takes no GPU and no weights, and seconds for a model of eight billion parameters. It runs in a
child, since fake tensors of a CUDA build would create a context on the device. Scratch memory of
kernels and the caching allocator's rounding are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.installation import install_hint
from oomguard.core.records import Record
from oomguard.estimate.child_python import ask_child

# The records of a call of ``generate`` before it is made: its numbers, and where the bytes of the
# GPU go.


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """The numbers of one call of ``generate``; ``config`` is the model's, ``dtype`` torch's name
    for the type of the weights.
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
class CallBudget(Record):
    """The budget of one call of transformers' ``generate`` on one GPU, in bytes.

    Attributes:
        weights_bytes: the weights.
        kv_bytes_per_token: one token of one row in all layers.
        kv_cache_bytes: the cache at the end of the call.
        peak_bytes: the most that is allocated at once, weights included.
        reserved_bytes: what torch's caching allocator holds then.
        cuda_context_bytes: the CUDA context.
        largest_batch_size: how many rows would fit, 0 where not one does.
        uncertainty_bytes: by how much the peak may be off, to either side.
        traced: whether the model's own code was run under fake tensors.
        assumptions: what was neither given nor read, a line each.
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

    @property
    def fits(self) -> bool:
        """Whether the call's reserved memory and the CUDA context fit on the GPU."""
        return self.reserved_bytes + self.cuda_context_bytes <= self.gpu_total_bytes


# What running a call's first steps under fake tensors showed: the bytes alive at each, and what
# follows for the rest.

# Steps to run before the rest is drawn as a line: the first is the prefill, the next may still warm
# up.
STEPS: Final = 5
# Steps that a storage outlives at most where steps repeat: what a step gave is at hand in the next,
# and its views until the one after.
_OLDEST: Final = 2
# Steps to repeat for the allocator's replay, and their events: its waste shows long before that
# many, and a replay is asked for often.
_MOST_REPEATS: Final = 256
_LEAST_REPEATS: Final = 16
_MOST_EVENTS: Final = 40_000


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """What was alive in a call's first steps.

    Attributes:
        weights_bytes: the weights.
        start_bytes: all that was alive when the call began, weights included.
        peaks_bytes: the peak of each step, with all of that.
        events: where asked for, allocations and ends in order: (storage number, bytes, or 0 for its
            end).
        events_seen: the number of events up to the end of each step.
        end_bytes: the peak of the call's last step, where it was traced apart from the first ones.
    """

    weights_bytes: int
    start_bytes: int
    peaks_bytes: tuple[int, ...]
    events: tuple[tuple[int, int], ...] = ()
    events_seen: tuple[int, ...] = ()
    end_bytes: int | None = None

    def last_step_bytes(self, steps: int) -> int:
        """Return the largest peak of the steps after the first; 0 where there is only one.

        Steps beyond those traced end at ``end_bytes`` where that was traced; else each adds as much
        as the last one did.
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
        """Return the most that is alive at once in a call of ``steps`` steps."""
        return max(self.peaks_bytes[0], self.last_step_bytes(steps))

    def all_events(self, steps: int) -> Iterator[tuple[int, int]]:
        """Yield the allocations and ends of ``steps`` steps: those traced, then the last step for
        each that is left.

        Every size grows as it did between the last two traced steps; of very many steps one stands
        for several. Where the last two did not do the same, only the traced ones are yielded.
        """
        yield from self.events
        left = steps - len(self.events_seen)
        if left > 0:
            pattern = self._pattern()
        else:
            pattern = None
        if pattern is None:
            return
        born = {
            (-before, at): self.events[self.events_seen[-2 - before] + at][0]
            for before in range(_OLDEST)
            for at, entry in enumerate(pattern)
            if entry.bytes
        }
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
        """Return what the last step does, None where one of the steps before it did
        something else.
        """
        if len(self.events_seen) < 2 + _OLDEST:
            return None
        ends = self.events_seen[-2 - _OLDEST :]
        *others, before, last = (self.events[start:end] for start, end in pairwise(ends))
        if any(len(step) != len(last) for step in (*others, before)):
            return None
        older = {number for number, _ in self.events[: ends[0]]}
        # The storages of the steps before the last: how many steps ago, and at which place there.
        earlier = {
            number: (age, at)
            for age, step in enumerate((before, *reversed(others)), 1)
            for at, (number, size) in enumerate(step)
            if size
        }
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
    """One event of a step: a new storage of ``bytes``, ``rise_bytes`` more than a step ago.

    With 0 bytes it is the end of the storage that was new ``age`` steps ago at ``place``.
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
    answer = ask_child(
        "oomguard.estimate.call.trace_process",
        question,
        limit_s=_LIMIT_S,
        environment=_ENVIRONMENT,
        failed="the model cannot be traced",
        late="the trace took more than {} seconds",
        hint=f"if torch or transformers is missing: {install_hint('hf')}",
        late_hint="fewer prompt tokens or beams",
    )
    return TracedSteps(
        weights_bytes=answer["weights_bytes"],
        start_bytes=answer["start_bytes"],
        peaks_bytes=tuple(answer["peaks_bytes"]),
        events=tuple((number, size) for number, size in answer["events"]),
        events_seen=tuple(answer["events_seen"]),
        end_bytes=answer["end_bytes"],
    )
