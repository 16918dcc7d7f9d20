from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import traceback
import weakref
from bisect import bisect_left
from pathlib import Path

import pytest

import oomguard
from oomguard.core.errors import SettingError

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import limit_memory  # noqa: E402

VOCAB, ROWS, PROMPT, NEW = 512, 24, 192, 4
CAPACITY = "10 MiB"


@pytest.fixture(scope="module")
def model():
    """A real Llama in float32 with random weights, a MiB of them; its attention is what takes memory."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def batch():
    """Rows of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, : row * 3] = 0
        ids[row, : row * 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def expected(model, batch):
    return model.generate(**batch, max_new_tokens=NEW, do_sample=False)


def generate(model, batch, **options):
    return model.generate(**batch, **{"max_new_tokens": NEW, "do_sample": False, **options})


def test_context_manager_splits_and_every_token_is_equal(model, batch, expected):
    with limit_memory(CAPACITY), oomguard.guard() as g:
        result = generate(model, batch)
    assert torch.equal(result, expected)
    assert [a.succeeded for a in g.attempts] == [False, True]
    assert g.attempts[0].incident.kind == "cuda_oom"
    assert g.attempts[0].incident.causes[0].id == "batch_too_large"
    assert g.attempts[1].patches[0].setting == "batch_size"
    assert 1 <= g.attempts[1].settings["batch_size"] < ROWS


def test_the_decorator_takes_methods_and_options(model, batch, expected):
    class Job:
        @oomguard.guard(allow="output-preserving")
        def run(self, rows):
            return generate(model, rows)

    with limit_memory(CAPACITY):
        assert torch.equal(Job().run(batch), expected)


def test_attempts_peak_is_its_own_and_the_users_counter_stays(model, batch):
    with limit_memory(CAPACITY) as device, oomguard.guard() as g:
        held = torch.zeros(device.capacity_bytes // 4 - 1)
        del held
        generate(model, batch)
    whole, split = (attempt.measured["peak_bytes"] for attempt in g.attempts)
    assert max(whole, split) < device.peak_bytes == device.capacity_bytes - 4


def test_rows_that_end_early_are_padded_as_in_one_batch(model, batch):
    with torch.no_grad():
        first = model(**batch).logits[:, -1].argmax(-1)
    options = {"eos_token_id": int(first[0]), "max_new_tokens": NEW}
    whole = generate(model, batch, **options)
    with limit_memory(CAPACITY), oomguard.guard() as g:
        parts = generate(model, batch, **options)
    assert len(g.attempts) == 2
    assert torch.equal(parts, whole)


def test_a_call_that_fits_is_run_once_as_it_is(model, batch, expected):
    with limit_memory("4 GiB"), oomguard.guard() as g:
        assert torch.equal(generate(model, batch), expected)
    assert g.attempts == ()
    assert g.diagnosis is None


def test_outside_the_guard_nothing_is_changed(model, batch):
    with limit_memory("4 GiB"), oomguard.guard():
        generate(model, {k: v[:2] for k, v in batch.items()})
    with limit_memory(CAPACITY), pytest.raises(torch.OutOfMemoryError) as caught:
        generate(model, batch)
    assert not hasattr(caught.value, "__notes__")


def test_a_key_error_passes_through_untouched():
    error = KeyError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    with pytest.raises(KeyError) as caught, oomguard.guard():
        raise error
    assert caught.value is error
    assert not hasattr(caught.value, "__notes__")


def test_first_exception_returns_if_not_one_row_fits(model, batch):
    with (
        limit_memory("0.55 MiB"),
        pytest.raises(torch.OutOfMemoryError) as caught,
        oomguard.guard() as g,
    ):
        generate(model, batch)
    assert type(caught.value) is torch.OutOfMemoryError
    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate")
    (text,) = caught.value.__notes__
    assert "oomguard: CUDA out of memory" in text
    assert "leave no memory for a single row" in text
    assert not g.attempts[-1].succeeded


def test_at_most_two_of_our_frames_stand_above_the_engines(model, batch):
    @oomguard.guard
    def run():
        return generate(model, batch)

    with limit_memory("0.55 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    package, engines = (str(Path(module.__file__).parent) for module in (oomguard, transformers))
    engine = next(i for i, name in enumerate(files) if name.startswith(engines + os.sep))
    assert sum(name.startswith(package + os.sep) for name in files[:engine]) in {1, 2}
    assert any("modeling_llama" in name for name in files)


def test_code_that_is_no_watched_call_is_diagnosed_and_raised():
    with (
        limit_memory("1.2 MiB"),
        pytest.raises(torch.OutOfMemoryError) as caught,
        oomguard.guard() as g,
    ):
        torch.zeros(2**22)
    assert "oomguard: CUDA out of memory" in caught.value.__notes__[0]
    assert g.diagnosis.verdict == "oom"


def test_a_pinned_setting_is_never_touched(model, batch):
    with (
        limit_memory(CAPACITY),
        pytest.raises(torch.OutOfMemoryError) as caught,
        oomguard.guard(pin=["batch_size"]) as g,
    ):
        generate(model, batch)
    assert len(g.attempts) == 1
    assert "pinned" in caught.value.__notes__[0]


def test_a_floor_holds(model, batch):
    with (
        limit_memory(CAPACITY),
        pytest.raises(torch.OutOfMemoryError) as caught,
        oomguard.guard(floors={"batch_size": ROWS - 1}),
    ):
        generate(model, batch)
    assert f"below your floor of {ROWS - 1}" in caught.value.__notes__[0]


def test_the_innermost_guard_rules(model, batch, expected):
    with (
        limit_memory(CAPACITY),
        oomguard.guard(pin=["batch_size"]) as outer,
        oomguard.guard() as inner,
    ):
        assert torch.equal(generate(model, batch), expected)
    assert len(inner.attempts) == 2
    assert not outer.attempts


def test_a_thread_outside_the_guard_sees_nothing(model, batch):
    seen = []

    def other():
        with limit_memory(CAPACITY):
            try:
                generate(model, batch)
            except torch.OutOfMemoryError as error:
                seen.append(getattr(error, "__notes__", None))

    with oomguard.guard():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [None]


def test_async_functions_are_guarded(model, batch, expected):
    @oomguard.guard
    async def run():
        await asyncio.sleep(0)
        return generate(model, batch)

    with limit_memory(CAPACITY):
        assert torch.equal(asyncio.run(run()), expected)


def test_generators_are_guarded_only_while_they_run(model, batch, expected):
    @oomguard.guard
    def run():
        yield generate(model, batch)
        yield "end"

    with limit_memory(CAPACITY):
        items = run()
        assert torch.equal(next(items), expected)
        with pytest.raises(torch.OutOfMemoryError):
            generate(model, batch)
        assert list(items) == ["end"]


def test_async_generators_are_guarded(model, batch, expected):
    @oomguard.guard
    async def run():
        yield generate(model, batch)

    async def collect():
        return [item async for item in run()]

    with limit_memory(CAPACITY):
        (result,) = asyncio.run(collect())
    assert torch.equal(result, expected)


def test_a_plain_function_is_split_along_the_argument_it_names():
    calls = []

    @oomguard.guard(batch="numbers")
    def work(numbers, factor):
        calls.append(len(numbers))
        wide = (
            torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 2**17).clone() * factor
        )
        return [float(x) for x in wide[:, 0]]

    with limit_memory("64 MiB"):
        assert work(list(range(100)), factor=2) == [2.0 * i for i in range(100)]
    assert calls[0] == 100
    assert sum(calls[1:]) == 100


def test_a_batch_argument_that_does_not_exist_is_refused():
    with pytest.raises(SettingError, match="has no argument 'papers'"):

        @oomguard.guard(batch="papers")
        def work(rows):
            return rows


def test_callbacks_get_the_incident_and_the_patch(model, batch):
    incidents, patches = [], []
    with (
        limit_memory(CAPACITY),
        oomguard.guard(on_incident=incidents.append, on_patch=patches.append),
    ):
        generate(model, batch)
    assert [i.kind for i in incidents] == ["cuda_oom"]
    assert [p.setting for p in patches] == ["batch_size"]


def test_disabled_means_off(model, batch, monkeypatch):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    with (
        limit_memory(CAPACITY),
        pytest.raises(torch.OutOfMemoryError) as caught,
        oomguard.guard() as g,
    ):
        generate(model, batch)
    assert not g.attempts
    assert not hasattr(caught.value, "__notes__")


def test_a_wrong_option_is_refused(subtests):
    for options in [{"allow": "everything"}, {"pin": ["no_such"]}, {"floors": {"no_such": 1}}]:
        with subtests.test(options=options), pytest.raises(SettingError):
            oomguard.guard(**options)


def test_no_tensor_of_the_failed_attempt_is_kept(model, batch):
    with limit_memory(CAPACITY) as device, oomguard.guard() as g:
        result = generate(model, batch)
        weights = sum(p.nbytes for p in model.parameters())
        held = result.nbytes + sum(v.nbytes for v in batch.values())
        assert device.live_bytes <= weights + held + 2**18
    assert g.attempts


def test_an_empty_batch_is_the_functions_own_business():
    assert oomguard.guard(batch="xs")(lambda xs: ("called", len(xs)))([]) == ("called", 0)


def test_result_without_one_entry_per_row_is_never_joined(subtests):
    def check(result):
        @oomguard.guard(batch="xs")
        def work(xs):
            torch.zeros(len(xs), 2**18).exp()
            return result(len(xs))

        with limit_memory("64 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
            work(list(range(100)))
        assert "its result" in caught.value.__notes__[0]

    for result in [
        lambda rows: {"n": rows},
        lambda rows: None,
        lambda rows: [1],
        lambda rows: ([1], [2]),
    ]:
        with subtests.test(result=result):
            check(result)


def test_arguments_that_see_the_whole_batch_prevent_a_split(subtests, model, batch):
    for name in [
        "streamer",
        "past_key_values",
        "cache",
        "encoder_outputs",
        "custom_generate",
        "negative_prompt_ids",
    ]:
        with subtests.test(name=name):
            from oomguard.engines.transformers.generate import GenerateCall

            call = GenerateCall.of(model, (), {**batch, name: object()})
            assert f"{name} belongs to the whole batch" in call.not_splittable


def test_lists_of_tensors_of_unknown_names_prevent_a_split():
    from oomguard.engines.transformers.generate import GenerateCall

    kwargs = {
        "input_ids": torch.zeros(4, 5, dtype=torch.long),
        "pixel_values": [torch.zeros(1)] * 4,
    }
    assert "pixel_values" in GenerateCall.of(None, (), kwargs).not_splittable


def test_one_guard_serves_two_tasks_at_once():
    shared = oomguard.guard()

    async def job(seconds):
        async with shared:
            await asyncio.sleep(seconds)

    async def both():
        await asyncio.gather(job(0.02), job(0.05))

    asyncio.run(both())


def test_send_and_throw_reach_the_generator():
    @oomguard.guard
    def echo():
        said = yield "ready"
        try:
            yield said
        except KeyError:
            yield "caught"

    items = echo()
    assert next(items) == "ready"
    assert items.send("hello") == "hello"
    assert items.throw(KeyError("x")) == "caught"


def test_splitting_a_coroutine_is_refused():
    with pytest.raises(SettingError, match="cannot be split"):

        @oomguard.guard(batch="xs")
        async def work(xs):
            return xs


def test_a_callback_that_fails_does_not_take_the_failures_place(model, batch, expected, caplog):
    def broken(_incident):
        raise ZeroDivisionError

    with limit_memory(CAPACITY), oomguard.guard(on_incident=broken):
        assert torch.equal(generate(model, batch), expected)
    assert "a callback failed" in caplog.text


def test_a_chain_of_causes_that_is_a_circle_ends():
    one, two = RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB."), RuntimeError("b")
    one.__cause__, two.__cause__ = two, one
    with pytest.raises(RuntimeError), oomguard.guard():
        raise one


def test_the_locals_of_another_failure_are_left_alone():
    @oomguard.guard(batch="xs")
    def work(xs):
        seen = len(xs)
        raise ValueError(seen)

    with pytest.raises(ValueError, match="3") as caught:
        work([1, 2, 3])
    assert caught.traceback[-1].frame.f_locals["seen"] == 3


def test_results_are_not_kept_alive_by_the_guard(model, batch):

    gc.collect()
    gc.disable()
    try:
        with oomguard.guard():
            result = generate(model, {k: v[:2] for k, v in batch.items()})
        storage = weakref.ref(result.untyped_storage())
        del result
        assert storage() is None
    finally:
        gc.enable()


def test_the_note_tells_only_the_attempts_of_its_own_call(model, batch):
    one = {k: v[:1] for k, v in batch.items()}
    with limit_memory(CAPACITY) as device, oomguard.guard():
        generate(model, batch)
        device.capacity_bytes = device.live_bytes + 2**12
        with pytest.raises(torch.OutOfMemoryError) as caught:
            generate(model, one)
    assert "tried: batch_size" not in caught.value.__notes__[0]


def largest_that_fits(run, rows, capacity):
    def fits(number):
        with limit_memory(capacity):
            try:
                run(number)
            except torch.OutOfMemoryError:
                return False
            return True

    return bisect_left(range(1, rows + 1), True, key=lambda number: not fits(number))


@pytest.fixture(scope="module")
def largest(model, batch):
    """The most rows of the batch that the device holds."""
    return largest_that_fits(
        lambda n: generate(model, {k: v[:n] for k, v in batch.items()}), ROWS, CAPACITY
    )


def test_one_failed_attempt_finds_nearly_the_largest_batch(model, batch, largest):
    with limit_memory(CAPACITY), oomguard.guard() as g:
        generate(model, batch)
    assert [a.succeeded for a in g.attempts] == [False, True]
    assert largest - 1 <= g.attempts[-1].settings["batch_size"] <= largest


@torch.library.custom_op("oomguard_test_guard::as_it_is", mutates_args=())
def as_it_is(ids: torch.Tensor) -> torch.Tensor:
    return ids.clone()


def test_rows_that_turn_out_heavier_are_run_fewer_at_a_time():
    @oomguard.guard(batch="rows")
    def work(rows):
        return [float(torch.zeros(weight, 2**18).exp()[0, 0]) for weight in [sum(rows)]] * len(
            rows
        )  # a MiB a weight

    with limit_memory("16 MiB"):
        assert len(work([1] * 6 + [4] * 6)) == 12


def test_plain_function_runs_a_few_rows_then_as_many_as_fit():
    calls = []

    @oomguard.guard(batch="rows")
    def work(rows):
        calls.append(len(rows))
        return torch.zeros(len(rows), 2**18).exp()[:, 0].clone()  # 2 MiB a row at the peak

    with limit_memory("64 MiB"):
        assert work(list(range(200))).shape == (200,)
    assert calls[0] == 200
    assert max(calls[1:]) in {30, 31}
    assert sum(calls[1:]) == 200


def test_a_call_that_succeeds_loads_nothing_and_keeps_nothing():
    guards = [oomguard.guard(), oomguard.guard(batch="rows")]
    functions = [made(lambda rows: rows) for made in guards]
    for function in functions:
        function([1])
    before = set(sys.modules)
    assert [function([1, 2]) for function in functions] == [[1, 2], [1, 2]]
    assert set(sys.modules) == before
    assert [made.attempts for made in guards] == [(), ()]


def test_parts_of_a_split_call_are_freed_without_a_collection():
    parts = []

    @oomguard.guard(batch="rows")
    def work(rows):
        result = torch.zeros(len(rows), 2**18).exp()[:, 0].clone()
        parts.append(weakref.ref(result))
        return result

    gc.collect()
    gc.disable()
    try:
        with limit_memory("64 MiB"):
            assert work(list(range(100))).shape == (100,)
        assert len(parts) > 1
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_parts_that_fit_only_one_by_one_are_diagnosed():
    @oomguard.guard(batch="rows")
    def work(rows):
        return list(
            torch.zeros(len(rows), 2**18).exp()
        )  # 2 MiB a row at the peak, one of them stays

    with limit_memory("40 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        work(list(range(64)))
    assert "oomguard: CUDA out of memory" in caught.value.__notes__[0]


class Model:
    pass


def test_non_function_is_refused_with_what_was_expected(subtests):
    for target in [Model, int, 5, "text"]:
        for make in [oomguard.guard, oomguard.guard(pin=["dtype"])]:
            with subtests.test(target=target, make=make):
                with pytest.raises(
                    oomguard.UsageError, match="guard expects a function, not "
                ) as error:
                    make(target)
                assert "with oomguard.guard()" in error.value.hint


def test_guard_below_ray_remote_class_is_located(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", sys)  # whatever it is: it is loaded
    with pytest.raises(oomguard.UsageError) as error:
        oomguard.guard(batch="rows")(Model)
    assert error.value.hint.endswith("for an actor class, put the guard above @ray.remote")
