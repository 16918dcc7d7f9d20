"""Seed 002 on the real vLLM: a vision server that does not start; what the seed changed, and what
makes room.

    python examples/seed_vision.py

The seed's 8 GiB card is here a share of this machine's memory, which leaves nothing for the KV
cache, and a limit on what a process may map (`ulimit -v`), in which the profile of the images does
not fit.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import struct
import tempfile
import threading
import urllib.request
import zlib
from pathlib import Path

import psutil
from seed_run import (
    GIB,
    JOBS,
    VERSION,
    Ran,
    conclude,
    make_model,
    node_bytes,
    run,
    show,
    size,
    table,
)

import oomguard

STEP = 8192
IMAGE_TOKENS = 576
# The seed's utilization and length, before and after.
BEFORE = (0.80, 4096)
AFTER = (0.70, 2048)
# What 80 % stands for here: less than the worker holds before its KV cache.
ASKED_BYTES = round(0.4 * GIB)
# Of what the profile takes, the part that the limit leaves free.
ROOM_RATIO = 0.6
_LEFT = re.compile(r"less than requested memory for kv \((-[\d.]+)/([\d.]+) GiB")
_IMAGES = re.compile(r"profiled with (\d+) image items")


def command(setting: tuple[float, int], port: int) -> list[str]:
    """The user's own start script, with the seed's share of 8 GiB as the same part of what is asked
    for here.
    """
    utilization, length = asked(setting)
    return ["python", str(JOBS / "start_server.py"), str(port), f"{utilization:g}", str(length)]


def picture(side: int = 336) -> str:
    """A PNG as a data URL: a plain red square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\xff\0\0" * side) * side
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def describe(port: int) -> dict:
    """Ask the server for the description of one picture; raises OSError while it does
    not answer.
    """
    parts = [
        {"type": "image_url", "image_url": {"url": picture()}},
        {"type": "text", "text": "describe this image"},
    ]
    asked = {
        "model": "./vision",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 8,
        "ignore_eos": True,
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(
        url, json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["usage"]


class Widest(threading.Thread):
    """Watches what the processes below this one map: the most that any of them did."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            for child in psutil.Process().children(recursive=True):
                self.bytes = max(self.bytes, peak_bytes(child.pid))


def peak_bytes(pid: int) -> int:
    """The most that a process has mapped; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak")), 0)


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    usage: dict = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model("vision", folder)
        takes = profiled(folder)
        widest = Widest()
        widest.start()
        advised = run(command(AFTER, port), folder)
        widest.over.set()
        limit = widest.bytes - round((1 - ROOM_RATIO) * takes)
        guarded = run(
            command(BEFORE, port),
            folder,
            limit_bytes=limit,
            oomguard=[],
            until=lambda: usage.update(describe(port)),
        )
    show(guarded)
    rows = told(advised, guarded, usage)
    table("A vision server: what its images, its share and its length leave", rows)
    smaller = size((1 - AFTER[0] / BEFORE[0]) * ASKED_BYTES)
    left = _LEFT.findall(advised.out)[:1], _LEFT.findall(guarded.out)[:1]
    table(
        "The seed's account, and what was found",
        [
            ["what it says", "what was found"],
            [
                "70 % for 80 % leaves 1.6 GB more",
                f"it takes {smaller}: {rows[1][5]} at 70 %, {rows[-2][5]} at 80 %",
            ],
            [
                "2048 tokens for 4096 make room",
                "a request of 4096 takes 4 MiB: never what was missing",
            ],
            [
                "the model is too large for the card",
                f"its images are: {size(takes)} planned, {terms(guarded)}",
            ],
        ],
    )
    conclude(checks(left, guarded, usage))


def told(advised: Ran, guarded: Ran, usage: dict) -> list[list[object]]:
    """A row for the seed's remedy, and one for each attempt of `oomguard run`."""
    images = _IMAGES.findall(guarded.out)
    left = [f"{gib} GiB" for gib, _ in dict.fromkeys(_LEFT.findall(guarded.out))]
    rows: list[list[object]] = [
        [
            "",
            "utilization",
            "length",
            "tokens a step",
            "images at once",
            "left for the KV cache",
            "outcome",
        ],
        [
            "the seed's fix",
            *asked(AFTER),
            STEP,
            *_IMAGES.findall(advised.out)[:1],
            _LEFT.findall(advised.out)[0][0] + " GiB",
            "died",
        ],
    ]
    for attempt in guarded.attempts:
        ratio, length = asked(BEFORE)
        changed = attempt["settings"]
        pool = attempt["measured"].get("kv_cache_available_bytes")
        answered = f"answered a prompt of {usage.get('prompt_tokens')} tokens"
        if attempt["kind"] == "host_oom":
            kv = ""
        elif attempt["kind"]:
            kv = left.pop(0)
        else:
            kv = size(pool or 0)
        rows.append(
            [
                "with oomguard" if rows[2:] else "as the seed had it, limited",
                changed.get("gpu_memory_utilization", ratio),
                changed.get("max_model_len", length),
                changed.get("max_num_batched_tokens", STEP),
                images.pop(0) if images else "",
                kv,
                {"host_oom": "died in the profile", None: answered}.get(attempt["kind"], "died"),
            ]
        )
    return rows


def asked(setting: tuple[float, int]) -> tuple[float, int]:
    """Utilization and length as they are given here."""
    return round(setting[0] / BEFORE[0] * ASKED_BYTES / node_bytes(), 4), setting[1]


def terms(ran: Ran) -> str:
    """What the first failed allocation was for."""
    found = re.search(r"\((\d+ images x [^)]*)\)", ran.panel)
    if found:
        return found.group(1)
    return "not named"


def checks(left: tuple[list, list], guarded: Ran, usage: dict) -> dict[str, bool]:
    why = re.search(r"Why: .*?\((\w+), confidence", guarded.panel)
    if guarded.attempts:
        settings = guarded.attempts[-1]["settings"]
    else:
        settings = {}
    fix, before = (tuple(map(float, found[0])) if found else (0.0, 0.0) for found in left)
    return {
        f"the seed's fix does not start: it asks for {fix[1]} GiB, not {before[1]}": fix[0] < 0
        and 0 < fix[1] < before[1],
        "the profile's failure is told as that of the images": why is not None
        and why.group(1) == "multimodal_profile",
        "the server answers a request with an image": usage.get("prompt_tokens", 0) > IMAGE_TOKENS,
        "after one relaunch for each of the two, the length kept": len(guarded.attempts) == 3
        and set(settings) == {"max_num_batched_tokens", "gpu_memory_utilization"},
    }


def profiled(folder: Path) -> int:
    """What the encoder takes while a start profiles it, before anything is started."""
    given = {
        "max_model_len": BEFORE[1],
        "max_num_seqs": 16,
        "max_num_batched_tokens": STEP,
        "dtype": "float32",
    }
    plans = [
        oomguard.plan(
            folder / "vision",
            gpu_memory="8GiB",
            engine_version=VERSION,
            limit_mm_per_prompt=limit,
            **given,
        )
        for limit in (None, {"image": 0})
    ]
    with_images, without = (plan.budget.peak_activation_bytes for plan in plans)
    return with_images - without


if __name__ == "__main__":
    main()
