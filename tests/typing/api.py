"""The public API as users type it: checked by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

import oomguard
from oomguard import Diagnosis
from oomguard.testing import active_device, limit_memory, oom_error


@oomguard.guard
def plain(prompt: str, *, n: int = 1) -> list[str]:
    return [prompt] * n


@oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 8192}, pin=["dtype"])
def options(prompt: str) -> str:
    return prompt


@oomguard.guard(batch="papers")
def split(papers: list[str]) -> list[str]:
    return papers


@oomguard.guard(batch=("texts", "labels"))
def split_together(texts: list[str], labels: list[int]) -> list[tuple[str, int]]:
    return list(zip(texts, labels, strict=True))


@oomguard.guard
def stream(n: int) -> Iterator[int]:
    yield n


@oomguard.guard
async def astream(n: int) -> AsyncIterator[int]:
    yield n


@oomguard.watch
def watched(prompt: str, *, n: int = 1) -> list[str]:
    return [prompt] * n


@oomguard.watch(sample_every_s=1)
async def awatched(prompt: str) -> str:
    return prompt


def uses() -> None:
    strings: list[str] = plain("x", n=2)
    string: str = options("x")
    print(strings, string, stream(1), astream(1))
    with oomguard.guard(on_incident=lambda incident: print(incident.kind)) as g:
        print([attempt.succeeded for attempt in g.attempts], g.diagnosis)
    oomguard.enable_metrics()
    oomguard.enable_metrics(registry=CollectorRegistry())
    with oomguard.guard(snapshot=Path("snapshot.pickle")) as g:
        taken: Path | None = g.snapshot
        print(taken)
    for attempt in oomguard.attempts(batch_size=64):
        with attempt:
            print(attempt.settings["batch_size"], attempt.number)
    for attempt in oomguard.attempts(snapshot=Path("snapshot.pickle"), batch_size=64):
        with attempt:
            dumped: Path | None = attempt.snapshot
            print(dumped)
    found: Diagnosis = oomguard.diagnose(Path("error.log"))
    print(found.verdict, oomguard.diagnose("text"), oomguard.diagnose(ValueError("x")))
    for incident in found.incidents:
        for patch in incident.plan:
            print(patch.setting, patch.old, patch.new, str(patch.effect), patch.applicable)
    start: oomguard.StartPlan = oomguard.plan(
        Path("folder"), gpu_memory="24GiB", max_model_len=8192, enforce_eager=True
    )
    print(
        start.fits,
        start.budget.kv_cache_pool_bytes,
        [patch.new for patch in start.changes],
        start.needed,
    )
    call: oomguard.CallBudget = oomguard.plan(
        "org/name", engine="transformers", gpu_memory=24 << 30, batch_size=4
    )
    print(call.fits, call.largest_batch_size)
    with oomguard.watch(sample_every_s=0.5) as seen, seen.span("papers"):
        seen.mark("begin")
    print(
        seen,
        [(row.what, row.use.peak_bytes) for row in seen.rows if row.use],
        [use.limit_bytes for use in seen.uses],
    )
    seen.to_csv("watch.csv", samples=True)
    seen.to_png(Path("watch.png"))
    seen.to_trace("watch.trace.json")
    print(seen.timeline.samples[0].bytes, watched("x", n=2))
    changed: oomguard.Comparison = oomguard.diff(Path("old.log"), found, new_start=2)
    print(
        changed.headline, changed.differs, [row.name for row in changed.rows], changed.explanations
    )


def tests_of_their_own() -> None:
    with limit_memory(
        "8 GiB", caching_allocator=True, other_processes="2 GiB", fail_at=[3, 7], wording="cuda 2.6"
    ) as device:
        device.other_processes_bytes = 1 << 30
        print(
            device.peak_bytes,
            device.reserved_bytes,
            device.peak_reserved_bytes,
            device.free_bytes,
            device.allocations,
        )
        device.reset_peak()
        device.empty_cache()
    print(active_device() is None)
    raise oom_error("mps 2.7", tried="2 GiB", capacity=8 << 30)


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


async def alengths(texts: list[str]) -> list[int]:
    return lengths(texts)


async def maps() -> None:
    results: oomguard.Results[int] = oomguard.map(
        lengths,
        ["a"],
        store=Path("s.sqlite"),
        identity={"model": "org/name"},
        key=lambda text: text[:8],
        batch_size=8,
    )
    for result in results:
        if isinstance(result, oomguard.FailedItem):
            print(result.key, result.index, result.error, result.never_fits)
        else:
            print(result + 1)
    print(
        results[0],
        results[1:],
        results.failed,
        results.computed,
        results.reused,
        results.other_results,
        results.attempts,
    )
    for one in oomguard.imap(lengths, iter(["a"]), store="s.sqlite", on_error="record"):
        print(one)
    awaited: oomguard.Results[int] = await oomguard.amap(
        alengths, ["a"], store="s.sqlite", progress=False
    )
    print(awaited)


def places() -> None:
    placed: dict[str, oomguard.PlacedDevices] = oomguard.place({"serve": 3, "extract": [3]})
    env: dict[str, str] = placed["serve"].env
    visible: str = placed["extract"].visible
    indices: tuple[int, ...] = placed["extract"].indices
    uuids: tuple[str | None, ...] = placed["extract"].uuids
    print(env, visible, indices, uuids)
    try:
        oomguard.place({"serve": 400})
    except oomguard.PlacementError as error:
        print(error.hint, error.is_for_now)


def on_ray() -> None:
    diagnosis = oomguard.diagnose("log")
    arguments: dict[str, int] = oomguard.ray_patched(
        {"max_model_len": 8}, diagnosis, engine_version="0.11.0"
    )
    environment = oomguard.ray_runtime_env({"max_num_seqs": 8}, base={"pip": ["x"]}, ship=False)
    print(arguments, environment["env_vars"])


class Job:
    @oomguard.guard(batch="papers")
    def run(self, papers: list[str]) -> int:
        return len(papers)


def what_happened() -> None:
    number: int = Job().run(["a"])
    print(number, plain.attempts, split.diagnosis, Job().run.attempts)
