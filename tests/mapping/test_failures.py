"""Items that fail: for memory alone, for something else; the rest goes on, and the next call tries them again."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

MIB = 2**20


def sums(sizes_mib):
    """Sum a tensor of each item's size, all in one tensor."""
    parts = torch.ones(sum(sizes_mib) * MIB // 4).split([size * MIB // 4 for size in sizes_mib])
    return [int(part.sum()) for part in parts]


def test_oversized_batch_runs_in_parts_and_its_size_is_reused(store):
    called = []

    def fn(items):
        called.append(len(items))
        return list(torch.zeros(len(items), MIB).sum(dim=1))

    with limit_memory("40 MiB"):
        results = oomguard.map(fn, range(64), store=store, batch_size=32, identity={})
    assert len(list(results)) == 64
    assert called[0] == 32
    assert called.count(32) == 1, "the second batch begins with what fits"
    assert max(called[1:]) <= 10
    assert [patch.setting for attempt in results.attempts for patch in attempt.patches] == [
        "batch_size"
    ]


def test_finished_parts_are_stored_before_the_batch_ends(store):
    computed = []

    def fn(items):
        result = list(torch.zeros(len(items), MIB).sum(dim=1))
        computed.append(list(items))
        if len(computed) == 3:
            raise KeyboardInterrupt
        return result

    with limit_memory("40 MiB"), pytest.raises(KeyboardInterrupt):
        oomguard.map(fn, range(32), store=store, batch_size=32, identity={})
    finished = [item for batch in computed[:2] for item in batch]
    results = oomguard.map(fn, finished, store=store, identity={})
    assert results.reused == len(finished) > 0


def test_item_that_never_fits_is_reported_and_the_rest_continue(store):
    sizes = [1, 2, 30, 1, 1, 40, 2]
    papers = [(f"paper-{place}", size) for place, size in enumerate(sizes)]
    with limit_memory("16 MiB"):
        results = oomguard.map(
            lambda batch: sums([size for _, size in batch]),
            papers,
            store=store,
            key=lambda paper: paper[0],
            batch_size=4,
            identity={},
        )
    assert [(failed.index, failed.key, failed.never_fits) for failed in results.failed] == [
        (2, "paper-2", True),
        (5, "paper-5", True),
    ]
    assert results.failed[0].error.startswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 MiB"
    )
    assert "why:" in results.failed[0].error
    assert [result if isinstance(result, int) else "failed" for result in results] == [
        "failed" if size >= 30 else size * MIB // 4 for size in sizes
    ]


def test_what_failed_is_tried_again_by_the_next_call(store):
    with limit_memory("16 MiB"):
        assert len(oomguard.map(sums, [1, 30, 2], store=store).failed) == 1
    with limit_memory("64 MiB"):
        again = oomguard.map(sums, [1, 30, 2], store=store)
    assert (again.failed, again.computed, again.reused) == ((), 1, 2)


def test_another_exception_stops_with_what_is_finished_kept(store):
    def fn(items):
        if 7 in items:
            raise ValueError("no JSON in this answer")
        return items

    with pytest.raises(ValueError, match="no JSON") as caught:
        oomguard.map(fn, range(20), store=store, batch_size=3)
    assert caught.value.__notes__[0] == "oomguard: raised for items[6] to items[8]"
    assert "6 items that this call finished are kept" in caught.value.__notes__[1]


def test_recorded_exceptions_name_their_item_and_others_run(store):
    computed = []

    def fn(items):
        for item in items:
            if item % 10 == 7:
                raise ValueError(f"no JSON in answer {item}")
        computed.extend(items)
        return items

    results = oomguard.map(fn, range(30), store=store, batch_size=16, on_error="record")
    assert [(failed.index, failed.error, failed.never_fits) for failed in results.failed] == [
        (item, f"ValueError: no JSON in answer {item}", False) for item in (7, 17, 27)
    ]
    assert sorted(computed) == [item for item in range(30) if item % 10 != 7], "each once"


def test_function_without_a_result_per_item_is_named(subtests, store):
    def check(returned, told):
        with pytest.raises(oomguard.UsageError, match=f"fn returned {told}"):
            oomguard.map(
                lambda items: returned, [1, 2, 3], store=store, on_error="record", identity={}
            )

    for name, returned, told in [
        ("short", [1, 2], "a list of 2 results for 3 items"),
        ("text", "abc", "a str"),
        ("nothing", None, "a NoneType"),
        ("dict", {"a": [1, 2, 3]}, "a dict"),
    ]:
        with subtests.test(name):
            check(returned, told)


def test_a_tensor_of_one_row_an_item_gives_rows(store):
    results = oomguard.map(
        lambda items: torch.tensor(items).float().outer(torch.ones(2)), [1, 2, 3], store=store
    )
    assert [row.tolist() for row in results] == [[1, 1], [2, 2], [3, 3]]


def test_one_long_prompt_runs_another_way_before_giving_up(store):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from model_calls import made

    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    prompts = [torch.randint(3, 60, (length,)).tolist() for length in (24, 480)]

    def answer(batch):
        (prompt,) = batch
        ids = torch.tensor([prompt])
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False
        ).tolist()

    expected = [answer([prompt])[0] for prompt in prompts]
    with limit_memory("4 GiB") as device:
        answer(prompts[1:])
        capacity = device.peak_bytes
    with limit_memory(int(capacity * 0.7)):
        results = oomguard.map(
            answer, prompts, store=store, batch_size=1, identity={"model": "tiny"}
        )
    assert list(results) == expected
    changed = {patch.setting for attempt in results.attempts for patch in attempt.patches}
    assert changed
    assert changed <= {"prefill_chunk_size", "attn_implementation"}


def test_switched_off_a_memory_failure_is_as_any_other(store, monkeypatch):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    with limit_memory("16 MiB"), pytest.raises(torch.OutOfMemoryError):
        oomguard.map(sums, [1, 30, 2], store=store)
