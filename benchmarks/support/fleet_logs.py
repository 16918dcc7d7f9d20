"""Many made logs of a fleet, with known failures, as Kubernetes, Ray and SLURM lay them out: text of our own, the same for every run."""

import datetime
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from support.vllm_log import INCIDENTS, healthy, start_up

VERSION = 1  # of the made logs: raised when their content changes
_BLOCKS = 48
_BEGAN = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
_KINDS = {kind: text for _share, kind, text in INCIDENTS}
# Of each hundred logs so many end well, or with this failure.
_SHARES = {
    None: 55,
    "cuda_oom": 20,
    "kv_cache_too_small_for_max_len": 15,
    "startup_free_memory_below_utilization": 10,
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The folder, its logs in the order in which a reader lists them, and how many hold which failure."""

    folder: Path
    logs: int
    size_bytes: int
    kinds: Counter[str]


def make_fleet(folder: Path, logs: int, size_bytes: int) -> Fleet:
    """Make so many logs of so many bytes together below a folder; those that are there already are kept."""
    rng = random.Random(19)
    each = size_bytes // logs
    lines = healthy(seed=5)
    blocks = ["".join(next(lines) for _ in range(400)) for _ in range(_BLOCKS)]
    kinds: Counter[str] = Counter()
    total = 0
    for number in range(logs):
        kind = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        path, pid = folder / _name(number, rng), rng.randrange(100, 99999)
        when = (_BEGAN + datetime.timedelta(minutes=rng.randrange(20 * 24 * 60))).strftime("%m-%d %H:%M:%S")
        parts = [start_up(rng, when, pid)]
        failure = "" if kind is None else _KINDS[kind].format(pid=pid, when=when)
        length = len(parts[0]) + len(failure)
        while length < each:
            block = blocks[rng.randrange(_BLOCKS)]
            parts.append(block[: block.rfind("\n", 0, each - length + 200) + 1] or block)
            length += len(parts[-1])
        text = "".join([*parts, failure])
        if kind is not None:
            kinds[kind] += 1
        total += len(text)
        if not path.exists() or path.stat().st_size != len(text):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii", newline="\n")
            written = (_BEGAN + datetime.timedelta(days=24)).timestamp()
            os.utime(path, (written, written))
    return Fleet(folder, logs, total, kinds)


def _name(number: int, rng: random.Random) -> str:
    """Return where the log of this number lies: a pod's, a Ray worker's, a SLURM task's in turn."""
    uid = f"{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}-{rng.getrandbits(16):04x}"
    if number % 3 == 0:
        return f"pods/inference_engine-{number % 40}-{number:06d}_{uid}/vllm/0.log"
    if number % 3 == 1:
        job = f"{number % 60:08x}"
        return f"node-{number % 8}/session_2026-11-0{1 + number % 9}_10-00-00_000000_7/logs/worker-{number:056x}-{job}-{number}.err"
    return f"slurm/slurm-{4000 + number % 50}_{number}.out"
