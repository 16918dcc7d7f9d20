"""What tests and benchmarks of placement share: simulated GPUs, a model to plan, jobs at one
moment, and who held which lease when.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import simulated_gpus
from simulated_gpus import Gpus

from oomguard.cluster.placement.leases import LeaseFolder
from oomguard.cluster.placement.placer import earlier_starts
from support.supervising import RUN

# Llama 3.1 8B: 15 GiB in bfloat16, which fits on 24 GiB with requests of 8,192 tokens.
LLAMA_8B = json.loads(
    (Path(simulated_gpus.__file__).parent / "models" / "llama-3.1-8b.json").read_text()
)
LIMIT_S = 180


def made(folder: Path, count: int = 4, *, library: Path | None = None) -> Gpus:
    """Return simulated GPUs in a folder, with an engine and a model to serve with it."""
    gpus = Gpus(folder, simulated_gpus.build(folder) if library is None else library)
    gpus.are_alike(count)
    gpus.engine()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    return gpus


def serve(gpus: Gpus, *flags: str) -> list[str]:
    """Return the command that serves that model."""
    return ["vllm", "serve", str(gpus.folder / "model"), "--max-model-len", "8192", *flags]


def start(
    gpus: Gpus, options: Sequence[str], command: Sequence[str], **env: str
) -> subprocess.Popen[str]:
    """Start ``oomguard run`` on them."""
    return subprocess.Popen(
        [*RUN, *options, "--", *command],
        env={**os.environ, **gpus.env, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass
class Watch:
    """Looks, many times a second and without taking anything, which devices are leased and how many
    starts wait.

    ``idle_s`` is the longest time that a device was free while a start waited that could use it.
    """

    gpus: Gpus
    idle_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _look(self) -> None:
        folder = LeaseFolder(self.gpus.folder / "leases")
        keys = [row.split()[1] for row in (self.gpus.folder / "devices").read_text().splitlines()]
        since_s: float | None = None
        while not self._stop.wait(0.02):
            with folder.gate():  # not between a choice and its lease
                waiting = list(earlier_starts(folder, None))
                free = set(keys) - set(folder.holders(keys))
            now = time.monotonic()
            if any(free & set(one.usable) for one in waiting):
                if since_s is None:
                    since_s = now
                self.idle_s = max(self.idle_s, now - since_s)
            else:
                since_s = None


def overlaps(gpus: Gpus, until: str) -> list[str]:
    """Return which starts met on a device: each has it from its first look at it to ``until``."""
    spans: dict[int, dict[str, float]] = {}
    names: dict[int, list[str]] = {}
    for at_s, pid, what, uuids in gpus.happened():
        spans.setdefault(pid, {})[what] = at_s
        names[pid] = uuids
    ordered = sorted(spans, key=lambda pid: spans[pid]["starts"])
    return [
        f"{one} and {other} on {set(names[one]) & set(names[other])}"
        for i, one in enumerate(ordered)
        for other in ordered[i + 1 :]
        if set(names[one]) & set(names[other])
        and spans[other]["starts"] < spans[one].get(until, float("inf"))
    ]
