"""What Trainer keeps of the batches before: it waits on the host where the device has no room for it."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
import numpy as np  # noqa: E402
from model_calls import made, padded  # noqa: E402

import oomguard  # noqa: E402
from oomguard.engines.transformers import watched_calls  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402


@pytest.fixture
def trainer(tmp_path):
    """Evaluates a masked language model in batches of four; the logits of all batches stay on the device."""
    model = made("BertForMaskedLM")
    given = {
        "per_device_eval_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return lambda **more: transformers.Trainer(
        model, transformers.TrainingArguments(tmp_path, **given, **more)
    )


@pytest.fixture(scope="module")
def data():
    batch = padded(64, 48, side="right")
    return [{name: value[row] for name, value in batch.items()} for row in range(64)]


def predicted(trainer, data, share):
    with limit_memory("4 GiB") as device:
        whole = trainer.predict(data).predictions
        capacity = int(device.peak_bytes * share)
    with limit_memory(capacity), pytest.raises(torch.OutOfMemoryError):
        trainer.predict(data)
    with limit_memory(capacity), oomguard.guard() as g:
        parts = trainer.predict(data).predictions
    return whole, parts, g


def test_logits_that_pile_up_wait_on_the_host_and_are_the_same(trainer, data, caplog):
    whole, parts, _ = predicted(trainer(), data, 0.6)

    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)
    assert "Moved results of earlier batches to the host" in caplog.text


def test_batches_that_are_kept_apart_stay_apart(trainer, data):
    whole, parts, _ = predicted(trainer(eval_do_concat_batches=False), data, 0.6)

    assert [part.shape for part in parts] == [part.shape for part in whole]
    for part, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-5, atol=1e-5)


def test_results_of_another_thread_are_left_alone():
    from transformers.trainer_pt_utils import EvalLoopContainer

    with limit_memory("1 MiB"), oomguard.guard():
        others = EvalLoopContainer()
        thread = threading.Thread(target=others.add, args=(torch.zeros(64),))
        thread.start()
        thread.join()
        assert watched_calls.held_bytes() == 0
        own = EvalLoopContainer()
        own.add(torch.zeros(64))
        assert watched_calls.held_bytes() == 256
        watched_calls.move_to_host()
        assert (watched_calls.held_bytes(), others.arrays) == (0, None)
    assert own.get_arrays().shape == (64,)
