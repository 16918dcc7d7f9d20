"""Calls of a real model on the simulated device: rows, exact peaks, attempts of a guard inside, an out-of-memory."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import made, padded  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return made("LlamaForCausalLM", attention="sdpa", num_hidden_layers=2, eos_token_id=None)


def generate(model, rows=6):
    return model.generate(**padded(rows=rows), max_new_tokens=3, do_sample=False)


def peak_of(call):
    with limit_memory("4 GiB") as device:
        call()
        return device.peak_bytes


def simulated(uses):
    (use,) = [use for use in uses if use.device == "simulated"]
    return use


def test_a_call_is_a_row_with_its_size_and_the_devices_own_peak(model):
    expected = peak_of(lambda: generate(model))
    with limit_memory("4 GiB") as device, oomguard.watch() as seen:
        result = generate(model)
        own = device.peak_bytes
    (row,) = seen.rows

    assert (row.what, row.model, row.kind) == ("generate", "LlamaForCausalLM", "call")
    assert (row.rows, row.prompt_tokens, row.max_new_tokens) == (
        6,
        padded()["input_ids"].shape[1],
        3,
    )
    assert simulated(seen.uses).peak_bytes == row.use.peak_bytes == own == expected
    assert simulated(seen.uses).limit_bytes == 4 << 30
    assert row.attempts == ()
    assert len(result) == 6


def test_outermost_call_is_the_row_and_each_forward_of_a_loop(model):
    with oomguard.watch() as seen, torch.inference_mode():
        generate(model)
        for _ in range(2):
            model(**padded(rows=2))
    assert [(row.what, row.rows) for row in seen.rows] == [
        ("generate", 6),
        ("forward", 2),
        ("forward", 2),
    ]


def test_rows_of_several_calls_keep_their_own_peaks(model):
    with limit_memory("4 GiB") as device, oomguard.watch() as seen:
        generate(model, 6)
        large = device.peak_bytes
        device.reset_peak()
        generate(model, 2)
        small = device.peak_bytes
    first, second = seen.rows

    assert first.use.peak_bytes == simulated(seen.uses).peak_bytes == large
    assert second.use.peak_bytes == small < large


def test_inner_device_shows_all_that_it_counted(model):
    expected = peak_of(lambda: generate(model))
    with oomguard.watch() as seen, limit_memory("4 GiB"):
        generate(model)
    use = simulated(seen.uses)

    assert (use.before_bytes, use.peak_bytes, use.after_bytes) == (None, expected, None)


def test_nested_guard_splits_and_its_attempts_join_the_row(subtests, model):
    def check(watch_first):
        capacity = int(peak_of(lambda: generate(model)) * 0.7)
        whole = generate(model)
        seen, g = oomguard.watch(), oomguard.guard()
        first, second = (seen, g) if watch_first else (g, seen)
        with limit_memory(capacity), first, second:
            parts = generate(model)
        (row,) = seen.rows

        assert torch.equal(whole, parts)
        assert [timed.attempt for timed in row.attempts] == list(g.attempts)
        assert [timed.attempt.succeeded for timed in row.attempts] == [False, True]
        failed, ran = row.attempts
        assert row.began_s <= failed.began_s <= failed.ended_s <= ran.began_s <= ran.ended_s
        assert row.use.peak_bytes <= capacity
        assert f"6 -> {ran.attempt.settings['batch_size']}" in " ".join(str(seen).split())

    for watch_first in [True, False]:
        with subtests.test(watch_first=watch_first):
            check(watch_first)


def test_a_function_that_is_split_by_its_argument_is_a_row():
    @oomguard.guard(batch="items")
    def work(items):
        return list(torch.zeros(len(items), 1 << 18).sum(dim=1))

    with limit_memory("5 MiB"), oomguard.watch() as seen:
        assert len(work(["x"] * 8)) == 8
    (row,) = seen.rows

    assert (row.what.rpartition(".")[2], row.model, row.rows) == ("work", "", 8)
    assert not row.attempts[0].attempt.succeeded


def test_an_out_of_memory_leaves_as_it_is_with_its_note_once(model):
    capacity = int(peak_of(lambda: generate(model, 1)) * 0.7)
    with limit_memory(capacity), pytest.raises(torch.OutOfMemoryError) as plain, oomguard.guard():
        generate(model, 1)
    with (
        limit_memory(capacity),
        pytest.raises(torch.OutOfMemoryError) as caught,
        oomguard.watch() as seen,
        oomguard.guard(),
    ):
        generate(model, 1)
    (row,) = seen.rows

    assert len(caught.value.__notes__) == len(plain.value.__notes__)
    assert (row.error, seen.timeline.error) == ("OutOfMemoryError", "OutOfMemoryError")
    assert "ended with OutOfMemoryError" in str(seen)


def test_nothing_of_a_failed_call_is_kept_alive_by_the_watch(model):
    capacity = int(peak_of(lambda: generate(model)) * 0.5)
    with limit_memory(capacity) as device, oomguard.watch() as seen:
        with pytest.raises(torch.OutOfMemoryError):
            generate(model)
        left = device.live_bytes
    weights = sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values())

    assert seen.rows[0].error == "OutOfMemoryError"
    assert left <= weights * 1.2


def test_nested_watches_see_the_same_call(model):
    with limit_memory("4 GiB"), oomguard.watch() as outer:
        with oomguard.watch() as inner:
            generate(model)
        generate(model, 2)
    assert [row.rows for row in inner.rows] == [6]
    assert [row.rows for row in outer.rows] == [6, 2]
    assert outer.rows[0].use == inner.rows[0].use


def test_a_watched_generator_sees_the_calls_of_its_steps(model):
    @oomguard.watch
    def answers():
        for rows in (1, 2):
            yield generate(model, rows)

    assert [len(answer) for answer in answers()] == [1, 2]
    assert [row.rows for row in answers.seen.rows] == [1, 2]


def test_a_watch_draws_no_random_numbers(model):
    def sample():
        torch.manual_seed(3)
        return model.generate(**padded(rows=2), max_new_tokens=3, do_sample=True)

    expected, state = sample(), torch.get_rng_state()
    with oomguard.watch():
        assert torch.equal(sample(), expected)
    assert torch.equal(torch.get_rng_state(), state)
