"""A program whose memory grows: ``hog.py RATE_GIB_PER_S BEGIN_MIB MOST_MIB [deaf] [twice]``."""

import contextlib
import mmap
import os
import signal
import sys
import time

_POPULATE_WRITE = 23  # linux/mman.h MADV_POPULATE_WRITE: get the pages at once
STEP = 2 << 20


def grow(rate_gib: float, begin_mib: int, most_mib: int) -> None:
    """Take memory at a rate up to a size, and wait."""
    memory = mmap.mmap(-1, most_mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # large pages come faster
    began_s = time.monotonic()
    at = 0
    while at < most_mib << 20:
        memory.madvise(_POPULATE_WRITE, at, STEP)
        at += STEP
        grown_gib = (at - (begin_mib << 20)) / (1 << 30)
        ahead_s = began_s + max(0.0, grown_gib) / rate_gib - time.monotonic()
        if grown_gib <= 0:
            began_s = time.monotonic()
        elif ahead_s > 0:
            time.sleep(ahead_s)
    took_s = time.monotonic() - began_s
    print(f"full after {took_s:.2f} s", flush=True)
    time.sleep(600)


def main() -> None:
    rate_gib = float(sys.argv[1])
    begin_mib, most_mib = (int(word) for word in sys.argv[2:4])
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "twice" in sys.argv:  # a child takes one half
        rate_gib /= 2
        begin_mib //= 2
        os.fork()
    grow(rate_gib, begin_mib, most_mib)


if __name__ == "__main__":
    main()
