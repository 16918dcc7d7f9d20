"""Figure: hangs and deaths injected into a real `vllm serve` under `oomguard run --restart on-failure`, and false restarts under load.

In turn: a plugin stops the scheduler; the engine core gets SIGSTOP; it gets SIGKILL, and vLLM ends with status 0; a step raises, and
it ends with status 0 as well. A hang is found where the run says so and starts the server again within the stated time, a death where the
run starts it again. Then so many minutes of load whose prompts take several steps that each last up to 0.8 of the limit, with clients that
send half a request, that keep an idle connection, and that give up. Needs .venv-vllm; `--resume FILE` keeps each case.
"""

import argparse
import math
import random
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from oomguard.serving.looking import answer_limit_s, looks_every_s
from support.figure import conclude, skip
from support.resume import Results
from support.tiny_engine import PYTHON, make_tiny
from support.watched_server import WatchedServer, watched_server

KINDS = ("scheduler stopped", "core stopped", "core killed", "step raises")
# A server ends by itself within seconds of its engine's death; the machine may be busy.
DEATH_S = 60.0
CHUNK_TOKENS, PROMPT_WORDS = 256, 700
SLICE_MINUTES = 10  # of load, on one server


def stated_s(kind: str, limit_s: float) -> float:
    """Return the time within which a case is found: the limit, two looks, and the request of one token that decides."""
    if kind in KINDS[2:]:
        return DEATH_S
    return limit_s + answer_limit_s(limit_s) + 2 * looks_every_s(limit_s) + 10.0  # what an answer of /metrics may take


def inject(server: WatchedServer, kind: str, *, under_load: bool) -> None:
    """Do it; half of the stopped schedulers get their request only then, so that no counter ever shows it."""
    if under_load:
        server.load(3000)
        time.sleep(1.0)
    if kind == "scheduler stopped":
        (server.orders / "stuck").touch()
    elif kind == "step raises":
        (server.orders / "fail").touch()
    else:
        server.core().send_signal(signal.SIGSTOP if kind == "core stopped" else signal.SIGKILL)
    if not under_load:
        server.load(10)


def found_in(server: WatchedServer, kind: str, limit_s: float, *, under_load: bool) -> dict[str, Any]:
    """Inject one, wait until the run has found it, and return after how many seconds and with what words."""
    if not server.answers():
        return {"kind": kind, "found": False, "why": "the server did not start"}
    before, starts = len(server.told("the server hangs")), len(server.told("running again as it was"))
    inject(server, kind, under_load=under_load)
    began_s = time.monotonic()
    words = "the server hangs" if kind in KINDS[:2] else "running again as it was"
    wanted = (before if kind in KINDS[:2] else starts) + 1
    found = server.wait_for(words, wanted, stated_s(kind, limit_s))
    took_s = time.monotonic() - began_s
    (server.orders / "stuck").unlink(missing_ok=True)
    again = server.wait_for("running again as it was", starts + 1, 60)
    last = server.told(words)
    return {
        "kind": kind,
        "under_load": under_load,
        "found": found and again,
        "seconds": round(took_s, 1),
        "why": last[-1].get("why", last[-1]["event"]) if last else "nothing was said",
    }


def group_of(rounds: range, limit_s: float) -> list[dict[str, Any]]:
    """Inject one of each kind into one run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny(folder)
        rows = []
        with watched_server(folder, limit_s) as server:
            for i in rounds:
                under_load = bool(i // len(KINDS) % 2)
                rows.append(found_in(server, KINDS[i % len(KINDS)], limit_s, under_load=under_load))
                print(f"{i + 1}: {rows[-1]}", flush=True)
        return rows


def client(server: WatchedServer, until_s: float, seed: int, counted: list[int]) -> None:
    """Ask until the time is over, as clients do: long prompts, some given up."""
    chance = random.Random(seed)
    while time.monotonic() < until_s:
        gives_up = chance.random() < 0.2
        status = server.ask(chance.randint(100, PROMPT_WORDS), chance.randint(1, 4), 5 if gives_up else 600)
        counted.append(status or 0)
        time.sleep(chance.uniform(0, 10))


def half_a_request(server: WatchedServer, until_s: float) -> None:
    """Send the first part of a request and nothing more, and keep another connection without any."""
    while time.monotonic() < until_s:
        with (
            socket.create_connection(("127.0.0.1", server.port)) as half,
            socket.create_connection(("127.0.0.1", server.port)),
        ):
            half.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            time.sleep(min(120.0, max(0.0, until_s - time.monotonic())))


def loaded(minutes: float, limit_s: float) -> dict[str, Any]:
    """Load a server whose steps take long; return what was said of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny(folder)
        with watched_server(folder, limit_s, ["--max-num-batched-tokens", str(CHUNK_TOKENS)]) as server:
            if not server.answers():
                raise SystemExit("the server did not start")
            (server.orders / "slow").write_text(f"{0.1 * limit_s} {0.8 * limit_s}")
            until_s, counted = time.monotonic() + 60 * minutes, []
            threads = [threading.Thread(target=client, args=(server, until_s, seed, counted)) for seed in (1, 2)]
            threads.append(threading.Thread(target=half_a_request, args=(server, until_s)))
            for thread in threads:
                thread.start()
            while time.monotonic() < until_s:
                time.sleep(1)
            (server.orders / "slow").unlink()
            for thread in threads:
                thread.join()
            said = [
                event["event"]
                for event in server.events()
                if event["event"].startswith(("the server hangs", "running"))
            ]
            return {"minutes": minutes, "requests": len(counted), "answered": counted.count(200), "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="hangs and deaths, in all (default 30)")
    parser.add_argument("--minutes", type=float, default=30, help="minutes of load (default 30); 0: none")
    parser.add_argument("--hang-after", type=float, default=10, help="the limit, in seconds (default 10)")
    parser.add_argument(
        "--resume", type=Path, help="keep each case's result here, and take those of this commit from it"
    )
    asked = parser.parse_args()
    if not PYTHON.is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    results, limit_s = Results(asked.resume), asked.hang_after
    rows: list[dict[str, Any]] = []
    for start in range(0, asked.rounds, len(KINDS)):
        rounds = range(start, min(asked.rounds, start + len(KINDS)))
        rows += results.kept(f"rounds {rounds} limit {limit_s}", lambda rounds=rounds: group_of(rounds, limit_s))
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        if own:
            most = max(row.get("seconds", 0) for row in own)
            told = sum(row["found"] for row in own)
            print(
                f"{kind}: {told} of {len(own)} found, after {most} s at most (stated {stated_s(kind, limit_s):.0f} s)"
            )
    loads = []
    for number in range(math.ceil(asked.minutes / SLICE_MINUTES)):
        minutes = min(SLICE_MINUTES, asked.minutes - number * SLICE_MINUTES)
        case = f"load {number} of {minutes:g} minutes limit {limit_s}"
        loads.append(results.kept(case, lambda minutes=minutes: loaded(minutes, limit_s)))
        print(f"load: {loads[-1]}", flush=True)
    found, said = sum(row["found"] for row in rows), [event for load in loads for event in load["said"]]
    conclude(
        f"{found} of {len(rows)} hangs and deaths found within the stated time; {len(said)} false alarms or restarts in "
        f"{sum(load['minutes'] for load in loads):g} minutes of load, {sum(load['answered'] for load in loads)} requests answered "
        "(goal: all, 0)",
        met=found == len(rows) and not said,
    )


if __name__ == "__main__":
    main()
