"""Guarded calls of several threads on one device: one that runs out of memory beside others is made again alone, and nobody starves."""

from __future__ import annotations

import threading
import time

import pytest

import oomguard
from oomguard.guarding import turns

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import SimulatedDevice, limit_memory  # noqa: E402

ROWS, PROMPT, NEW = 8, 64, 24


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


def seen_by_another_thread(device: SimulatedDevice) -> SimulatedDevice:
    """Return the same device for one more thread: what either makes is alive on both."""
    view = SimulatedDevice(device.capacity_bytes)
    view._storages = device._storages
    return view


def in_threads(device, call, many):
    """Return what ``many`` threads got of the same call, begun at the same moment under guards of their own."""
    begun, found = threading.Barrier(many), [None] * many

    def work(number):
        with oomguard.guard() as guard, seen_by_another_thread(device):
            begun.wait()
            found[number] = (call(), guard.attempts)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_calls_that_fit_one_by_one_and_not_together_all_run_whole(model, batch):
    def call():
        return model.generate(**batch, max_new_tokens=NEW, do_sample=False)

    with limit_memory("1 GiB") as device:
        device.adopt(model.parameters())
        base, expected = device.live_bytes, call()
        peak = device.peak_bytes - base
    with limit_memory(base + round(1.5 * peak)) as device:
        device.adopt([*model.parameters(), *batch.values()])
        found = in_threads(device, call, 3)

    assert all(torch.equal(result, expected) for result, _ in found)
    assert [[attempt.settings["batch_size"] for attempt in attempts] for _, attempts in found] == [[ROWS]] * 3


def test_nothing_waits_for_a_thread_that_is_in_no_call(model):
    begun_s = time.monotonic()
    with turns.alone(model, 5.0, pytest.fail) as had_others:
        assert not had_others
    assert time.monotonic() - begun_s < 1


def test_a_thread_that_waits_in_its_own_way_is_not_held_up_for_good(model, monkeypatch):
    monkeypatch.setattr(turns, "_LEAST_WAIT_S", 0.1)
    ended = threading.Event()

    def other():
        turns.begin(model)
        ended.wait(10)
        turns.end()

    thread = threading.Thread(target=other)
    thread.start()
    while not turns._running:
        time.sleep(0.01)
    with turns.alone(model, 0.0, lambda: None) as had_others:  # the other one waits for this thread
        assert had_others
        ended.set()
    thread.join()
    assert not turns._running
    assert not turns._alone


def test_a_call_that_begins_meanwhile_waits_its_turn(model):
    order = []

    def other():
        turns.begin(model)
        order.append("other")
        turns.end()

    with turns.alone(model, 1.0, pytest.fail):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("alone")
    thread.join()
    assert order == ["alone", "other"]


def test_calls_on_another_device_are_none_of_its_business(model):
    class Elsewhere:
        def parameters(self):
            return iter([torch.zeros(1, device="meta")])

    with turns.alone(model, 1.0, pytest.fail):
        thread = threading.Thread(target=lambda: (turns.begin(Elsewhere()), turns.end()))
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
