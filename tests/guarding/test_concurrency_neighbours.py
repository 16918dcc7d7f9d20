"""Guarded calls of several threads on one device: one that runs out of memory beside others goes on alone, and nobody starves."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import oomguard
from oomguard.guarding import concurrency

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import SimulatedDevice, limit_memory  # noqa: E402

ROWS, PROMPT, NEW = 32, 64, 24


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(3, 512, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class OneAtATime(SimulatedDevice):
    """A device for several threads, whose operations see none that is half done."""

    one_operation = threading.RLock()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self.one_operation:
            return super().__torch_dispatch__(func, types, args, kwargs)


def seen_by_another_thread(device):
    """Return the same device for one more thread: what either makes is alive on both."""
    view = OneAtATime(device.capacity_bytes)
    view._storages = device._storages
    return view


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(concurrency, "_MOST_WAIT_S", 5.0)
    yield
    assert not concurrency._running
    assert not concurrency._alone


def failure():
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB"
    )


def in_threads(device, guarded, many):
    """Return what ``many`` threads got of the same call, begun at the same moment."""
    begun = threading.Barrier(many)

    def work(_number):
        with seen_by_another_thread(device):
            begun.wait()
            return guarded()

    with ThreadPoolExecutor(many) as pool:
        return list(pool.map(work, range(many)))


def room_for(model, batch, calls, call):
    """Return a device with room for so many of a call, and what the call gives."""
    with limit_memory("1 GiB") as device:
        device.adopt([*model.parameters(), *batch.values()])
        base, expected = device.live_bytes, call()
        peak = device.peak_bytes - base
    return limit_memory(base + round(calls * peak)), expected


def test_calls_that_fit_only_one_by_one_all_run_whole(model, batch, caplog):
    def call():
        return model.generate(**batch, max_new_tokens=NEW, do_sample=False)

    device, expected = room_for(model, batch, 1.5, call)
    with device:
        device.adopt([*model.parameters(), *batch.values()])
        found = in_threads(device, oomguard.guard(call), 3)

    assert all(torch.equal(result, expected) for result in found)
    assert "retrying this call alone" in caplog.text
    assert "splitting" not in caplog.text


def test_functions_and_forward_calls_of_threads_all_run(model, batch, subtests):
    many = 3

    def logits(ids):
        with torch.inference_mode():
            return model(ids, use_cache=False, logits_to_keep=1).logits.argmax(-1)

    def call():
        return guarded(batch["input_ids"])

    for guarded in (oomguard.guard(logits), oomguard.guard(batch="ids")(logits)):
        with subtests.test(guarded is call):
            device, expected = room_for(model, batch, 0.5, lambda: logits(batch["input_ids"]))
            with device:
                device.adopt([*model.parameters(), *batch.values()])
                found = in_threads(device, call, many)
            assert all(torch.equal(result, expected) for result in found)
            # Other threads may free results while the first part is measured.
            assert sum(not one.succeeded for one in guarded.attempts) <= 2


@contextlib.contextmanager
def another_thread_holds_all(device, model):
    """Let a guarded call of another thread leave less than a row of room on the device, for half a second."""
    begun = threading.Event()
    held = [torch.zeros(device.capacity_bytes - device.live_bytes - (160 << 10), dtype=torch.int8)]

    def other():
        concurrency.begin(model)
        begun.set()
        time.sleep(0.5)
        held.clear()
        concurrency.end()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        thread.join()


def test_what_the_failed_call_drew_is_drawn_again(model, batch):
    def call():
        torch.manual_seed(7)
        return model.generate(**batch, max_new_tokens=NEW, do_sample=True)

    device, expected = room_for(model, batch, 1.2, call)
    with device:
        device.adopt([*model.parameters(), *batch.values()])
        with another_thread_holds_all(device, model):
            result = oomguard.guard(call)()
    assert torch.equal(result, expected)


def test_a_call_with_no_other_beside_it_does_not_wait(model):
    concurrency.begin(model)
    assert not concurrency.have_ended(failure(), model)
    concurrency.end()


def test_an_error_of_another_kind_comes_out_at_once(model, monkeypatch):
    monkeypatch.setattr(concurrency, "_MOST_WAIT_S", 60.0)
    with beside(model):
        began_s = time.monotonic()
        assert not concurrency.have_ended(ValueError("my own mistake"), model)
        assert time.monotonic() - began_s < concurrency._MOST_WAIT_S / 2


def test_a_call_that_cannot_be_made_again_comes_out_at_once(model, batch, monkeypatch):
    monkeypatch.setattr(concurrency, "_MOST_WAIT_S", 60.0)

    class Streamer:
        def put(self, value):
            pass

        def end(self):
            pass

    with beside(model), limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError):
        began_s = time.monotonic()
        with oomguard.guard():
            model.generate(**batch, max_new_tokens=NEW, streamer=Streamer(), num_beams=1)
    assert time.monotonic() - began_s < concurrency._MOST_WAIT_S / 2


def test_thread_with_its_own_wait_is_not_held_up_for_good(model, monkeypatch):
    monkeypatch.setattr(concurrency, "_MOST_WAIT_S", 0.2)
    with beside(model):  # it ends only after this thread has gone on
        assert concurrency.have_ended(failure(), model)
        concurrency.leave()


def test_a_call_that_begins_meanwhile_waits_its_turn_once(model, monkeypatch):
    monkeypatch.setattr(concurrency, "_MOST_WAIT_S", 1.0)
    order = []

    def other():
        for _ in range(3):
            concurrency.begin(model)
            order.append(time.monotonic())
            concurrency.end()

    with beside(model, seconds=0.1):
        assert concurrency.have_ended(failure(), model)
    began_s = time.monotonic()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    concurrency.leave()
    assert order[0] - began_s > 0.5
    assert order[-1] - order[0] < 0.5


def test_calls_on_another_device_are_none_of_its_business(model):
    class Elsewhere:
        def parameters(self):
            return iter([torch.zeros(1, device="meta")])

    with beside(Elsewhere()):
        assert not concurrency.have_ended(failure(), model)


class beside:
    """A guarded call of another thread, until the block ends or for some seconds."""

    def __init__(self, model, seconds=None):
        self._begun, self._over, self._seconds = threading.Event(), threading.Event(), seconds
        self._thread = threading.Thread(target=self._work, args=(model,))

    def _work(self, model):
        concurrency.begin(model)
        self._begun.set()
        self._over.wait(self._seconds)
        concurrency.end()

    def __enter__(self):
        self._thread.start()
        self._begun.wait()

    def __exit__(self, *exc_info):
        self._over.set()
        self._thread.join()
