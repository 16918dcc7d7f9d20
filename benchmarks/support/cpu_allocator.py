"""What the real CPU allocator gives out, from its own events as torch.profiler records them."""

from collections.abc import Callable


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that were given out at once while ``call`` ran, beyond what was
    there before.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = (
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
