"""The watch itself, on a program without torch: before, peak and after, threads, errors, nesting, the decorator."""

from __future__ import annotations

import asyncio
import functools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import oomguard
from oomguard.core.errors import SettingError, UsageError
from oomguard.core.measurements import Counter

MIB = 2**20
HOST = Counter("host", "resident")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "oomguard-watch"]


def test_the_hosts_memory_is_seen_before_at_most_and_after():
    # Pages of its own: a bytearray may take what the process has kept.
    with oomguard.watch() as seen, mmap.mmap(-1, 64 * MIB) as block:
        block.write(b"x" * (64 * MIB))
        seen.mark("full")
    (use,) = [use for use in seen.uses if use.device == "host"]

    assert use.before_bytes > 0
    assert use.peak_bytes - use.before_bytes >= 60 * MIB or not use.sampled
    assert use.after_bytes < use.before_bytes + 32 * MIB


def test_watch_loads_no_torch_and_leaves_no_thread():
    code = (
        "import sys, threading, oomguard\n"
        "with oomguard.watch(sample_every_s=0.01) as seen: x = bytearray(1000)\n"
        "assert seen.uses\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'rich', 'matplotlib') if m in sys.modules], threading.active_count())"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[] 1"


def test_one_thread_samples_for_all_watches():
    with oomguard.watch(sample_every_s=0.01) as outer:
        with oomguard.watch(sample_every_s=0.01) as inner:
            assert threads() == ["oomguard-watch"]
            time.sleep(0.1)
        assert threads() == ["oomguard-watch"]
    assert threads() == []
    assert len(outer.timeline.samples) >= len(inner.timeline.samples) >= 5


def test_exception_passes_unchanged_and_the_report_exists():
    error = ValueError("mine")
    with (
        pytest.raises(ValueError, match="mine") as caught,
        oomguard.watch() as seen,
        seen.span("work"),
    ):
        raise error

    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert [(row.what, row.error) for row in seen.rows] == [("work", "ValueError")]
    assert str(seen).endswith("ended with ValueError")
    assert threads() == []


def test_a_span_is_a_row_and_a_mark_a_moment():
    with oomguard.watch() as seen:
        with seen.span("load"):
            time.sleep(0.02)
        seen.mark("loaded")
    (row,) = seen.rows
    (mark,) = seen.timeline.marks

    assert (row.what, row.kind) == ("load", "span")
    assert 0.02 <= row.seconds <= mark.seconds <= seen.timeline.seconds
    assert mark.label == "loaded"


def test_decorated_function_has_a_row_per_call_and_its_result():
    @oomguard.watch
    def double(x: int) -> int:
        """Twice as much."""
        return 2 * x

    assert [double(1), double(2)] == [2, 4]
    assert double.__doc__ == "Twice as much."
    assert [(row.what.rpartition(".")[2], row.kind) for row in double.seen.rows] == [
        ("double", "function")
    ] * 2
    assert threads() == []


def test_coroutines_and_generators_are_watched_while_they_run():
    @oomguard.watch(sample_every_s=0.01)
    def count():
        for i in range(2):
            assert threads()
            yield i

    @oomguard.watch(sample_every_s=0.01)
    async def wait():
        assert threads()
        await asyncio.sleep(0.03)
        return 5

    @oomguard.watch
    async def stream():
        yield 7

    async def collect():
        return [item async for item in stream()]

    assert asyncio.run(wait()) == 5
    assert threads() == []
    assert len(wait.seen.timeline.samples) >= 3
    assert [row.kind for row in wait.seen.rows] == ["function"]
    assert list(count()) == [0, 1]
    assert asyncio.run(collect()) == [7]
    assert stream.seen.uses
    assert (count.seen.timeline.error, stream.seen.timeline.error) == ("", "")


def test_thread_stays_between_generator_steps_and_ends_after():
    @oomguard.watch(sample_every_s=0.01)
    def count():
        yield from range(20)

    names = set()
    for _ in count():
        names |= {
            thread.ident for thread in threading.enumerate() if thread.name == "oomguard-watch"
        }
    assert len(names) == 1
    until = time.monotonic() + 10
    while threads() and time.monotonic() < until:
        time.sleep(0.05)
    assert threads() == []
    with oomguard.watch(sample_every_s=0.01) as seen:
        time.sleep(0.05)
    assert len(seen.timeline.samples) >= 3


def test_any_callable_is_watched_under_a_name_of_its_own():
    class Model:
        def __call__(self, number):
            return number + 1

    class Served:
        async def __call__(self, number):
            return number + 2

    def add(first, second):
        return first + second

    watched = [
        oomguard.watch(call)
        for call in (functools.partial(functools.partial(add, 1)), Model(), len)
    ]
    assert [call(value) for call, value in zip(watched, (1, 1, "ab"), strict=True)] == [2, 2, 2]
    assert [call.seen.rows[0].what.rpartition(".")[2] for call in watched] == [
        "add",
        "Model",
        "len",
    ]
    served = oomguard.watch(Served())
    assert asyncio.run(served(1)) == 3
    assert [row.kind for row in served.seen.rows] == ["function"]


def test_watch_shows_masked_calls_and_itself_in_one_line():
    with oomguard.watch() as seen, seen.span("token=hf_abcdefghijklmnopqrstuvwxyz012345"):
        pass
    assert "Sample(seconds=" in repr(seen.timeline)
    assert "hf_abcdef" not in repr(seen.timeline)
    assert repr(seen) == "<oomguard.Watch: calls and spans: 1>"


def test_async_with_watches_too():
    async def body():
        async with oomguard.watch() as seen:
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(body()).uses


def test_a_watch_that_is_entered_again_goes_on():
    seen = oomguard.watch()
    for label in ("one", "two"):
        with seen, seen.span(label):
            pass
    assert [row.what for row in seen.rows] == ["one", "two"]
    assert seen.rows[1].began_s > seen.rows[0].began_s


def test_threads_that_share_a_watch_share_one_sampler():
    @oomguard.watch(sample_every_s=0.01)
    def work(i):
        time.sleep(0.03)
        return i

    pool = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert len(work.seen.rows) == 8
    assert threads() == []


def test_what_is_no_function_and_no_time_is_told():
    with pytest.raises(UsageError, match="not the class int"):
        oomguard.watch(int)
    for wrong in (0, -1, True, "0.1", float("nan"), float("inf")):
        with pytest.raises(SettingError, match="sample_every_s"):
            oomguard.watch(sample_every_s=wrong)


def test_the_switch_turns_it_off(monkeypatch):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    before = threads()  # that of a generator ends a moment later
    with oomguard.watch() as seen:
        assert threads() == before
    assert str(seen) == "OOMGUARD_DISABLE is set, so oomguard watches nothing"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_inside_a_watch_watches_for_itself():
    with oomguard.watch(sample_every_s=0.01) as outer:
        child = os.fork()
        if child == 0:
            with oomguard.watch(sample_every_s=0.01) as seen:
                time.sleep(0.05)
            os._exit(0 if len(seen.timeline.samples) >= 2 and seen.uses else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert outer.uses


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork_inside_a_watch_sees_only_its_own_memory():
    with oomguard.watch(sample_every_s=60) as seen:
        child = os.fork()
        if child == 0:
            seen.mark("empty")
            before = seen.timeline.samples[-1].bytes[HOST]
            with mmap.mmap(-1, 64 * MIB) as block:
                block.write(b"x" * (64 * MIB))
                seen.mark("full")
                last = seen.timeline.samples[-1].bytes[HOST]
            os._exit(0 if last - before > 32 * MIB else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork_while_the_sampler_holds_a_lock_does_not_hang():
    held, done = threading.Event(), threading.Event()

    def hold(watch):
        with watch._lock:
            held.set()
            done.wait(30)

    with oomguard.watch(sample_every_s=60) as seen:
        thread = threading.Thread(target=hold, args=(seen,))
        thread.start()
        held.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            with seen.span("in the child"):
                pass
            os._exit(0 if [row.what for row in seen.rows] == ["in the child"] else 1)
        done.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
    assert seen.rows == ()
