"""Run one pattern: bare without a limit, bare under it, guarded under it; and say how it ended."""

import dataclasses
import gc
import signal
import time
import warnings
from typing import Any

import device
import numpy
import oomguard
import torch
from compare import differences
from oomguard.testing import SimulatedDevice
from registry import Job, Pattern

SHARE = 0.4
EASE = 0.6
SECONDS = 150
REFUSAL = "not automatic"


def _storages(result: Any, found: dict[int, int], depth: int = 0) -> dict[int, int]:
    """Bytes of each tensor storage that the result holds."""
    if isinstance(result, torch.Tensor):
        storage = result.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(result, numpy.ndarray):
        found[result.ctypes.data] = result.nbytes
    elif isinstance(result, dict):
        for value in result.values():
            _storages(value, found, depth + 1)
    elif isinstance(result, (list, tuple)):
        for value in result:
            _storages(value, found, depth + 1)
    elif hasattr(result, "layers") and depth < 6:
        for layer in result.layers:
            _storages([layer.keys, layer.values], found, depth + 1)
    elif hasattr(result, "self_attention_cache") and depth < 6:
        _storages([result.self_attention_cache, result.cross_attention_cache], found, depth + 1)
    return found


@dataclasses.dataclass
class Ran:
    """One run: its result or its error, and the most that was alive at once."""

    result: Any = None
    error: BaseException | None = None
    peak: int = 0
    hooks: dict[str, Any] = dataclasses.field(default_factory=dict)


def run(pattern: Pattern, size: int, capacity: int = device.HUGE, guard: bool = False) -> Ran:
    """Prepare afresh and call on a device of ``capacity`` bytes, inside the guard if wanted."""
    torch.manual_seed(0)
    job = pattern.build(size)
    gc.collect()
    device.configure(capacity, job.models)
    simulated = SimulatedDevice(capacity)
    ran = Ran()
    with warnings.catch_warnings(), simulated:
        warnings.simplefilter("ignore")
        simulated.adopt(device.tensors_of(job.models))
        torch.manual_seed(1)
        signal.alarm(SECONDS)
        try:
            if guard:
                ran.result = _guarded(job, ran)
            else:
                ran.result = job.call()
        except Exception as error:
            ran.error = error
        finally:
            signal.alarm(0)
    ran.peak = max(simulated.peak_bytes, device.thread_peak())
    return ran


def _guarded(job: Job, ran: Ran) -> Any:
    """The call under a block, or the pattern's own decorator with hooks that count."""
    patches: list[str] = []
    failures: list[Any] = []
    ran.hooks = {"patches": patches, "failures": failures}

    def note_patch(patch: Any) -> None:
        patches.append(f"{patch.setting} {patch.old} -> {patch.new}")

    hooks = {"on_patch": note_patch, "on_incident": failures.append}
    if job.guarded:
        return job.guarded(**hooks)
    try:
        with oomguard.guard(**hooks) as g:
            return job.call()
    finally:
        ran.hooks["attempts"] = [str(a.error) if a.error else "ran" for a in g.attempts]


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not done after {SECONDS} s")


signal.signal(signal.SIGALRM, _too_long)


def is_oom(error: BaseException | None) -> bool:
    """Whether this is the simulated device's error."""
    return isinstance(error, torch.OutOfMemoryError)


def limit_for(pattern: Pattern) -> tuple[dict[str, Any], Ran]:
    """The reference run, and a limit between what the smallest size needs beside the whole result,
    and the peak.
    """
    reference = run(pattern, pattern.rows)
    if reference.error:
        raise reference.error
    small = run(pattern, pattern.small)
    if small.error:
        raise small.error
    held = sum(_storages(reference.result, {}).values())
    floor = small.peak + int(pattern.keeps * held)
    limit = floor + int(SHARE * (reference.peak - floor))
    if not pattern.must_fail:
        floor = 0
        limit = int(EASE * reference.peak)
    numbers = dict(peak=reference.peak, small_peak=small.peak, result_bytes=held, floor=floor, limit=limit)
    return numbers, reference


def check_bare(pattern: Pattern) -> tuple[dict[str, Any], Ran, str]:
    """All of the bare side; the last value says what is at fault, or nothing."""
    numbers, reference = limit_for(pattern)
    again = run(pattern, pattern.rows)
    moved = differences(reference.result, again.result, pattern.exact)
    if moved:
        return numbers, reference, f"not repeatable: {moved[:2]}"
    if numbers["floor"] > 0.97 * numbers["peak"]:
        return numbers, reference, "no room between the floor and the peak"
    bare = run(pattern, pattern.rows, numbers["limit"])
    if bare.error and not pattern.must_fail:
        numbers["limit"] = 2 * numbers["peak"]
        bare = run(pattern, pattern.rows, numbers["limit"])
    if bare.error:
        numbers["bare"] = f"{type(bare.error).__name__}: {str(bare.error)[:160]}"
    else:
        numbers["bare"] = "ran"
    if pattern.must_fail and not is_oom(bare.error):
        return numbers, reference, f"bare under the limit: {numbers['bare']}"
    if pattern.must_fail and is_oom(run(pattern, pattern.small, numbers["limit"]).error):
        return numbers, reference, "the smallest size does not fit"
    return numbers, reference, ""


def judge(pattern: Pattern, checked: dict[str, Any] | None = None) -> dict[str, Any]:
    """The whole pattern; ``checked`` is what ``check_bare`` found before, so that only the
    reference runs again.
    """
    started = time.monotonic()
    record = dict(name=pattern.name, source=pattern.source, expected=pattern.expect, right=list(pattern.right))
    if checked:
        numbers = checked
        reference = run(pattern, pattern.rows)
        fault = ""
    else:
        numbers, reference, fault = check_bare(pattern)
    record |= {k: v for k, v in numbers.items() if k not in ("outcome", "why", "name")}
    if fault:
        return record | dict(outcome="dropped", why=fault)
    begun = time.monotonic()
    guarded = run(pattern, pattern.rows, numbers["limit"], guard=True)
    record |= dict(seconds_guarded=round(time.monotonic() - begun, 1), guarded_peak=guarded.peak)
    record |= _ending(reference, guarded, pattern.exact)
    record["as_expected"] = record["outcome"] in pattern.right
    return record | dict(seconds=round(time.monotonic() - started, 1))


def _ending(reference: Ran, guarded: Ran, exact: bool) -> dict[str, Any]:
    """The outcome, and what was seen of it."""
    hooks = guarded.hooks
    seen = dict(patches=hooks["patches"], incidents=len(hooks["failures"]), attempts=hooks.get("attempts"))
    if guarded.error is None:
        wrong = differences(reference.result, guarded.result, exact)
        return seen | dict(outcome="wrong" if wrong else "equal", differences=wrong[:6])
    notes = list(getattr(guarded.error, "__notes__", []))
    seen |= dict(error=f"{type(guarded.error).__name__}: {str(guarded.error)[:400]}", notes=notes)
    if is_oom(guarded.error):
        refused = any(REFUSAL in note for note in notes)
        return seen | dict(outcome="refused" if refused else "original error")
    ours = isinstance(guarded.error, oomguard.OomguardError)
    return seen | dict(outcome="refused" if ours else "other error")
