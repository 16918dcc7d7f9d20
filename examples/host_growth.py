"""What `oomguard run` says of a process whose memory grows by 1.3 GiB an hour, with two days in a second."""

import os

from oomguard.analyst.host_trend import Growth, MemorySample
from oomguard.supervisor.host_memory import Level

GIB = 1 << 30
LIMIT = 64 * GIB


def main() -> None:
    growth = Growth()
    for minute in range(40 * 60):
        used = round(12.8 * GIB + 1.28 * GIB * minute / 60)
        sample = MemorySample(Level("limit", LIMIT, LIMIT - used), used, {os.getpid(): used})
        line = growth.line(growth.add(60.0 * minute, sample))
        if line is not None:
            print(f"after {minute // 60} h: {line}".replace(f"pid {os.getpid()}", "pid 71"))


if __name__ == "__main__":
    main()
