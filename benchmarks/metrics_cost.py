"""Figures: what `oomguard run --metrics` costs a healthy server, beside the same server under a run without; and whether the
counters of healthy and broken commands equal their journal.

Both servers run all the time, and a pair of requests is answered within milliseconds; who is asked first alternates. In each 201st
pair the run with metrics is scraped while its server answers: by count, not by the clock; how often it was is printed.
Each round starts both anew, in the other order, all that belongs to them on one core and the client on another: on cores of their own
two servers that are the same differ by more than what is looked for. The figure is the mean over the rounds, each the middle 80 % of
its pairs' logarithms, with a 95 % interval by bootstrap over the rounds: two starts of one server differ by more than their pairs do.
"""

import argparse
import contextlib
import http.client
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.commands import ROOT, oomguard_command
from support.counted import BROKEN, counted, records, run, scraped
from support.figure import conclude
from support.paired import interval, trimmed

WIDTH_GOAL, RATIO_GOAL = 0.02, 1.01
START_S, WARM_UP, SCRAPED_EVERY = 60, 100, 201  # an odd number: both orders meet it
CORES = sorted(os.sched_getaffinity(0))
SERVERS_CORE = CORES[0]
# Another process asks, as Prometheus is one: its work is not the client's whose time is taken.
SCRAPER = """
import sys, urllib.request
for line in sys.stdin:
    print(len(urllib.request.urlopen(sys.argv[1]).read()), flush=True)
"""
COMMANDS = {
    "healthy": ("true",),
    "fails of something else": ("sh", "-c", "exit 7"),
    "killed": ("sh", "-c", "kill -9 $$"),
    "fails, then fits": BROKEN,
    "never fits": (*BROKEN, "--fits", "100", "--estimate", "1792"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(options: list[str], folder: Path, name: str) -> Iterator[tuple[int, str]]:
    """Start the server under a run, and yield its port and where its metrics are, empty without any."""
    port, log = free_port(), folder / f"{name}.log"
    program = [sys.executable, str(ROOT / "benchmarks" / "support" / "http_server.py"), str(port)]
    command = [*oomguard_command(), "run", "--journal", str(folder / "journal.sqlite3"), *options, "--", *program]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    os.sched_setaffinity(process.pid, {SERVERS_CORE})  # what it starts inherits it
    try:
        deadline = time.monotonic() + START_S
        while "READY" not in (text := log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{text[-2000:]}")
            time.sleep(0.05)
        told = re.search(r"http://\S+/metrics", text)
        yield port, told[0] if told else ""
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def latency_s(connection: http.client.HTTPConnection) -> float:
    """Seconds that one answer takes."""
    began = time.perf_counter()
    connection.request("GET", "/")
    connection.getresponse().read()
    return time.perf_counter() - began


class Scraper:
    """Asks for the metrics when it is told to; does nothing without an address."""

    def __init__(self, url: str) -> None:
        words = [sys.executable, "-c", SCRAPER, url]
        self._process = (
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) if url else None
        )

    def begin(self) -> None:
        if self._process is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def end(self) -> int:
        """Wait for the answer; how many there were."""
        return 0 if self._process is None else int(int(self._process.stdout.readline()) > 0)

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(30)


def round_of(pairs: int, second: list[str], *, second_first: bool) -> tuple[list[float], list[float], int]:
    """Start both servers; the logarithms of second over first, those of pairs that met a scrape, and how many scrapes answered."""
    logs: list[float] = []
    met: list[float] = []
    scrapes = 0
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as started:
        folder = Path(name)
        options: list[list[str]] = [[], second]
        order = (1, 0) if second_first else (0, 1)
        places = {i: started.enter_context(server(options[i], folder, str(i))) for i in order}
        connections = [http.client.HTTPConnection("127.0.0.1", places[i][0], timeout=30) for i in (0, 1)]
        scraper = started.enter_context(contextlib.closing(Scraper(places[1][1])))
        for i in range(WARM_UP + pairs):
            took, is_scraped = {}, i % SCRAPED_EVERY == 0
            for number in (0, 1) if i % 2 else (1, 0):
                if number and is_scraped:
                    scraper.begin()
                took[number] = latency_s(connections[number])
                if number and is_scraped:
                    scrapes += scraper.end()
            if i >= WARM_UP:
                logs.append(math.log(took[1] / took[0]))
                met += logs[-1:] if is_scraped else []
        for connection in connections:
            connection.close()
    return logs, met, scrapes


def equal_the_journal() -> int:
    """Run each command; how many have counters that equal what their journal comes to."""
    equal = 0
    for what, command in COMMANDS.items():
        with tempfile.TemporaryDirectory() as name:
            journal, file = Path(name) / "journal.sqlite3", Path(name) / "run.prom"
            run("-q", "--journal", str(journal), "--metrics", str(file), command=command)
            found = {key: value for key, value in scraped(file.read_text()).items() if key[0].endswith("_total")}
            del found[("oomguard_failed_attempts_seconds_total",)]
            kept = counted(records(journal))
            equal += found == kept
            print(f"{what}: {'the same' if found == kept else f'{found}, {kept}'}")
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=400, help="pairs of requests in a round (default 400)")
    parser.add_argument("--rounds", type=int, default=40, help="how often both servers are started (default 40)")
    parser.add_argument("--control", action="store_true", help="no metrics on either side: what the method sees")
    options = parser.parse_args()
    os.sched_setaffinity(0, set(CORES) - {SERVERS_CORE} or set(CORES))
    rounds, met, pairs, scrapes = [], [], 0, 0
    for number in range(options.rounds):
        second = [] if options.control else ["--metrics", "0"]
        found, while_scraped, answered = round_of(options.pairs, second, second_first=bool(number % 2))
        rounds.append(trimmed(found))
        print(f"round {number + 1}: {math.exp(rounds[-1]):.3f}", flush=True)
        pairs, met, scrapes = pairs + len(found), met + while_scraped, scrapes + answered
    print(f"requests that met a scrape, {len(met)} of {pairs}: {math.exp(trimmed(met)):.3f} times as long")
    equal = equal_the_journal()
    ratio, (low, high) = math.exp(trimmed(rounds)), interval(rounds)
    half = (high - low) / 2
    conclude(
        f"latency of a server with metrics that are scraped {scrapes} times beside one without, {pairs} pairs in {len(rounds)} starts of "
        f"both: {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}, +- {half:.1%} (goal: at most +- {WIDTH_GOAL:.0%}, not wholly beyond "
        f"{RATIO_GOAL}); counters equal the journal: {equal} of {len(COMMANDS)} commands (goal: all)",
        met=half <= WIDTH_GOAL and low <= RATIO_GOAL and equal == len(COMMANDS),
    )


if __name__ == "__main__":
    main()
