from __future__ import annotations

import asyncio
import threading
import traceback

import pytest

import oomguard
from oomguard.errors import SettingError

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import limit_memory  # noqa: E402

VOCAB, ROWS, PROMPT, NEW = 2048, 48, 384, 12
CAPACITY = "256 MiB"


@pytest.fixture(scope="module")
def model():
    """A real Llama in float32 with random weights, 14 MiB of them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
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


def test_without_the_guard_the_simulated_device_runs_out_of_memory(model, batch):
    with limit_memory(CAPACITY), pytest.raises(torch.OutOfMemoryError):
        generate(model, batch)


def test_the_context_manager_splits_the_batch_and_every_token_is_the_same(model, batch, expected):
    with limit_memory(CAPACITY), oomguard.guard() as g:
        result = generate(model, batch)
    assert torch.equal(result, expected)
    assert [a.succeeded for a in g.attempts] == [False, True]
    assert g.attempts[0].incident.kind == "cuda_oom"
    assert g.attempts[0].incident.causes[0].id == "batch_too_large"
    assert g.attempts[1].patches[0].setting == "batch_size"
    assert 1 <= g.attempts[1].settings["batch_size"] < ROWS


def test_the_decorator_does_the_same(model, batch, expected):
    @oomguard.guard
    def run():
        return generate(model, batch)

    with limit_memory(CAPACITY):
        assert torch.equal(run(), expected)


def test_the_decorator_takes_methods_and_options(model, batch, expected):
    class Job:
        @oomguard.guard(allow="output-preserving")
        def run(self, rows):
            return generate(model, rows)

    with limit_memory(CAPACITY):
        assert torch.equal(Job().run(batch), expected)


def test_the_prediction_is_kept_beside_what_was_measured(model, batch):
    with limit_memory(CAPACITY) as device, oomguard.guard() as g:
        generate(model, batch)
    predicted = g.attempts[1].patches[0].predicts["peak_bytes"]
    measured = g.attempts[1].measured["peak_bytes"]
    assert measured <= device.capacity_bytes
    assert measured == pytest.approx(predicted, rel=0.25)


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
    assert [a.succeeded for a in g.attempts] == [True]
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


def test_an_error_inside_generate_that_is_no_memory_failure_passes_through(model, batch):
    with pytest.raises(ValueError) as caught, oomguard.guard() as g:  # noqa: PT011
        generate(model, batch, max_new_tokens=-1)
    assert not hasattr(caught.value, "__notes__")
    assert g.diagnosis is None


def test_when_not_one_row_fits_the_first_exception_comes_back_with_the_diagnosis(model, batch):
    with limit_memory("15 MiB"), pytest.raises(torch.OutOfMemoryError) as caught, oomguard.guard() as g:
        generate(model, batch)
    assert type(caught.value) is torch.OutOfMemoryError
    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate")
    (text,) = caught.value.__notes__
    assert "oomguard: CUDA out of memory" in text
    assert "one row needs" in text
    assert not g.attempts[-1].succeeded


def test_at_most_two_of_our_frames_stand_above_the_engines(model, batch):
    @oomguard.guard
    def run():
        return generate(model, batch)

    with limit_memory("15 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    engine = next(i for i, name in enumerate(files) if "transformers" in name)
    assert sum("oomguard" in name and "tests" not in name for name in files[:engine]) <= 2
    assert any("modeling_llama" in name for name in files)


def test_code_that_is_no_watched_call_is_diagnosed_and_raised():
    with limit_memory("8 MiB"), pytest.raises(torch.OutOfMemoryError) as caught, oomguard.guard() as g:
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
    with limit_memory(CAPACITY), oomguard.guard(pin=["batch_size"]) as outer, oomguard.guard() as inner:
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


def test_a_result_that_cannot_be_put_together_again_is_not_split(model, batch):
    with limit_memory(CAPACITY), pytest.raises(torch.OutOfMemoryError) as caught, oomguard.guard():
        generate(model, batch, return_dict_in_generate=True)
    assert "return_dict_in_generate" in caught.value.__notes__[0]


def test_a_plain_function_is_split_along_the_argument_it_names():
    calls = []

    @oomguard.guard(batch="numbers")
    def work(numbers, factor):
        calls.append(len(numbers))
        wide = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 2**17).clone() * factor
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
    with limit_memory(CAPACITY), oomguard.guard(on_incident=incidents.append, on_patch=patches.append):
        generate(model, batch)
    assert [i.kind for i in incidents] == ["cuda_oom"]
    assert [p.setting for p in patches] == ["batch_size"]


def test_disabled_means_off(model, batch, monkeypatch):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    with limit_memory(CAPACITY), pytest.raises(torch.OutOfMemoryError) as caught, oomguard.guard() as g:
        generate(model, batch)
    assert not g.attempts
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("options", [{"allow": "everything"}, {"pin": ["no_such"]}, {"floors": {"no_such": 1}}])
def test_a_wrong_option_is_refused(options):
    with pytest.raises(SettingError):
        oomguard.guard(**options)


def test_no_tensor_of_the_failed_attempt_is_kept(model, batch):
    with limit_memory(CAPACITY) as device, oomguard.guard() as g:
        result = generate(model, batch)
        weights = sum(p.nbytes for p in model.parameters())
        held = result.nbytes + sum(v.nbytes for v in batch.values())
        assert device.live_bytes <= weights + held + 2**20
    assert g.attempts
