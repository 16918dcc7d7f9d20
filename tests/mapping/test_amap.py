"""The async form: the event loop goes on, coroutine functions run on it, a cancelled call keeps what is finished."""

from __future__ import annotations

import asyncio

import pytest

import oomguard


async def shout(texts):
    await asyncio.sleep(0.01)
    return [text.upper() for text in texts]


def test_a_coroutine_function_runs_on_the_loop_that_awaits_it(store):
    loops = []

    async def fn(texts):
        loops.append(asyncio.get_running_loop())
        return await shout(texts)

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        task = asyncio.create_task(tick())
        results = await oomguard.amap(fn, ["a", "b", "c"], store=store, batch_size=1, identity={})
        task.cancel()
        assert ticks > 3
        assert set(loops) == {asyncio.get_running_loop()}
        return results

    assert list(asyncio.run(main())) == ["A", "B", "C"]


def test_plain_function_shares_results_with_map_and_the_loop(store, upper):
    results = asyncio.run(oomguard.amap(upper, ["a", "b"], store=store, identity={}))
    assert list(results) == ["A", "B"]
    assert oomguard.map(upper, ["a", "b"], store=store, identity={}).computed == 0


def test_cancelled_call_keeps_rows_and_records_no_failure(store):
    seen = []

    async def fn(texts):
        seen.extend(texts)
        if "c" in texts:
            await asyncio.sleep(60)
        return await shout(texts)

    async def main():
        call = oomguard.amap(
            fn, ["a", "b", "c", "d"], store=store, batch_size=1, identity={}, on_error="record"
        )
        task = asyncio.create_task(call)
        while "c" not in seen:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    fn_again = fn
    seen.clear()

    async def again():
        return await oomguard.amap(fn_again, ["a", "b"], store=store, identity={})

    assert list(asyncio.run(again())) == ["A", "B"]
    assert seen == []


def test_map_says_that_a_coroutine_function_is_for_amap(store):
    for form in (oomguard.map, oomguard.imap):
        with pytest.raises(oomguard.UsageError, match="coroutine function") as caught:
            form(shout, ["a"], store=store)
        assert "amap" in caught.value.hint
