"""The public API as users type it: checked by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import oomguard
from oomguard import Diagnosis


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


def uses() -> None:
    strings: list[str] = plain("x", n=2)
    string: str = options("x")
    print(strings, string, stream(1), astream(1))
    with oomguard.guard(on_incident=lambda incident: print(incident.kind)) as g:
        print([attempt.succeeded for attempt in g.attempts], g.diagnosis)
    for attempt in oomguard.attempts(batch_size=64):
        with attempt:
            print(attempt.settings["batch_size"], attempt.number)
    found: Diagnosis = oomguard.diagnose(Path("error.log"))
    print(found.verdict, oomguard.diagnose("text"), oomguard.diagnose(ValueError("x")))
    for incident in found.incidents:
        for patch in incident.plan:
            print(patch.setting, patch.old, patch.new, str(patch.effect), patch.applicable)
    start: oomguard.StartPlan = oomguard.plan(
        Path("folder"), gpu_memory="24GiB", max_model_len=8192, enforce_eager=True
    )
    print(start.fits, start.budget.kv_cache_pool_bytes, [patch.new for patch in start.changes], start.needed)
    call: oomguard.CallBudget = oomguard.plan("org/name", engine="transformers", gpu_memory=24 << 30, batch_size=4)
    print(call.fits, call.largest_batch_size)
    changed: oomguard.Comparison = oomguard.diff(Path("old.log"), found, new_start=2)
    print(changed.headline, changed.differs, [row.name for row in changed.rows], changed.explanations)


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


async def alengths(texts: list[str]) -> list[int]:
    return lengths(texts)


async def maps() -> None:
    results: oomguard.Results[int] = oomguard.map(
        lengths, ["a"], store=Path("s.sqlite"), identity={"model": "org/name"}, key=lambda text: text[:8], batch_size=8
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
    awaited: oomguard.Results[int] = await oomguard.amap(alengths, ["a"], store="s.sqlite", progress=False)
    print(awaited)
