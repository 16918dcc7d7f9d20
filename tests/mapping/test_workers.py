"""Several processes on one store: each item by one of them, and what a killed one had begun is free at once."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import oomguard
from oomguard.mapping.store import Claims

ITEM = b"sixteen bytes .."
# Notes each batch in a line of its own before it is computed, and takes so many milliseconds an item.
WORKER = """
import os, sys, time, oomguard

def fn(items):
    with open("computed.txt", "a") as out:
        out.write(f"{os.getpid()} {' '.join(map(str, items))}\\n")
    time.sleep(len(items) * float(sys.argv[1]) / 1000)
    return [item * item for item in items]

results = oomguard.map(fn, range(int(sys.argv[2])), store="results.sqlite", batch_size=4, identity={})
print(results.computed, list(results) == [item * item for item in range(int(sys.argv[2]))])
"""


def computed(folder: Path) -> list[tuple[int, list[int]]]:
    path = folder / "computed.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), [int(item) for item in items]) for pid, *items in map(str.split, lines)]


def ended(worker) -> tuple[int, bool]:
    out, errors = worker.communicate(timeout=60)
    assert worker.returncode == 0, errors
    count, same = out.split()
    return int(count), same == "True"


def test_two_workers_share_the_items_and_both_get_all_results(store, start):
    workers = [start(WORKER, 3, 200) for _ in range(2)]
    counts, same = zip(*map(ended, workers), strict=True)
    assert all(same)
    assert sum(counts) == 200
    assert min(counts) > 0
    assert Counter(item for _, items in computed(store.parent) for item in items) == dict.fromkeys(
        range(200), 1
    )


def test_kills_leave_each_item_stored_once(store, start):
    count, killed = 160, []
    workers = [start(WORKER, 12, count) for _ in range(2)]
    for number in range(4):
        victim = workers[number % 2]
        before = len(computed(store.parent))
        while len(computed(store.parent)) < before + 5 and victim.poll() is None:
            time.sleep(0.005)
        if victim.poll() is not None:
            break
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        killed.append(victim.pid)
        workers[number % 2] = start(WORKER, 12, count)
    assert all(same for _, same in map(ended, workers))
    assert len(killed) >= 2
    batches = computed(store.parent)
    in_flight = {
        pid: next(items for other, items in reversed(batches) if other == pid)
        for pid in killed
        if pid in dict(batches)
    }
    again = Counter(item for _, items in batches for item in items) - Counter(range(count))
    assert set(again) <= {item for items in in_flight.values() for item in items}
    with closing(sqlite3.connect(store)) as database:
        assert database.execute("SELECT count(*), count(DISTINCT item) FROM result").fetchone() == (
            count,
            count,
        )
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_worker_waits_for_others_and_takes_over_from_killed(store, start, upper):
    worker = start(WORKER, 10_000, 4)  # 40 seconds
    while not computed(store.parent):
        time.sleep(0.01)
    began_s = time.monotonic()
    threading.Timer(0.5, worker.kill).start()

    def fn(items):
        upper.batches.append(items)
        return [item * item for item in items]

    assert list(oomguard.map(fn, range(4), store=store, identity={}, batch_size=4)) == [0, 1, 4, 9]
    worker.communicate()
    assert 0.3 < time.monotonic() - began_s < 20
    assert upper.computed == [0, 1, 2, 3]


def test_two_calls_in_one_process_exclude_each_other_too(store):
    counts, computed = [], []

    def fn(items):
        computed.extend(items)
        time.sleep(0.002 * len(items))
        return items

    def work():
        counts.append(oomguard.map(fn, range(60), store=store, batch_size=3, identity={}).computed)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(computed) == list(range(60))
    assert sum(counts) == 60


def test_results_of_another_worker_arrive_in_order(store, upper):
    begun, computed = threading.Event(), []

    def slow(items):
        computed.extend(items)
        begun.set()
        time.sleep(0.2 if 0 in items else 0)
        return items

    other = threading.Thread(
        target=lambda: oomguard.map(slow, range(3), store=store, batch_size=3, identity={})
    )
    other.start()
    begun.wait()
    assert list(
        oomguard.imap(slow, iter(range(8)), store=store, batch_size=2, identity={})
    ) == list(range(8))
    other.join()
    assert sorted(computed) == list(range(8))


def test_claims_exclude_each_other_by_computation_and_item(store):
    with closing(Claims(store)) as one, closing(Claims(store)) as other:
        assert one.take(1, ITEM, 0)
        assert not other.take(1, ITEM, 0)
        assert other.take(1, ITEM, 1)
        assert other.take(2, ITEM, 0)
        one.give_back(1, ITEM, 0)
        assert other.take(1, ITEM, 0)


def test_a_fork_that_outlives_its_worker_keeps_no_claims(store, start):
    """As a process that loads data does, which its parent's death leaves behind."""
    worker = start(
        """
        import os, sys, time
        from pathlib import Path
        from oomguard.mapping.store import Claims
        claims = Claims(Path("results.sqlite"))
        assert claims.take(1, bytes(sys.argv[1], "ascii"), 0)
        if os.fork() == 0:
            print("forked", flush=True)
            sys.stdin.read()
        else:
            time.sleep(60)
        """,
        ITEM.decode(),
    )
    assert worker.stdout.readline() == "forked\n"
    with closing(Claims(store)) as claims:
        assert not claims.take(1, ITEM, 0)
        worker.kill()
        worker.wait()
        assert claims.take(1, ITEM, 0), "the fork still runs"
    worker.communicate()


def test_failure_that_another_worker_found_is_not_retried(store):
    tried = []

    def slow(items):
        tried.append(items)
        if 1 in items:
            time.sleep(0.4)
            raise ValueError("no")
        return items

    def work(out):
        out.append(
            oomguard.map(slow, [0, 1, 2], store=store, batch_size=1, on_error="record", identity={})
        )

    found: list = []
    threads = [threading.Thread(target=work, args=(found,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[failed.index for failed in results.failed] for results in found] == [[1], [1]]
    assert sorted(item for items in tried for item in items) == [0, 1, 2]
