from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

WIDTH = 2**10


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, WIDTH)


def guarded_calls(function, rows, memory="1 MiB"):
    """Return the rows of each call of the guarded function, and the note of the failure that it ends with."""
    sizes = []

    @oomguard.guard(batch="rows")
    def step(rows):
        sizes.append(len(rows))
        return function(rows)

    with limit_memory(memory), pytest.raises(torch.OutOfMemoryError) as caught:
        step(rows)
    return sizes, "".join(caught.value.__notes__)


def test_step_that_fails_in_its_forward_is_not_applied_in_parts(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def train(rows):
        loss = model(rows).tanh().tanh().tanh().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [float(loss)] * len(rows)

    sizes, note = guarded_calls(train, torch.randn(256, 8))
    assert sizes == [256]
    assert torch.equal(model.weight, before)
    assert "train" in note


def test_a_step_that_fails_in_its_backward_is_not_run_again(model):
    def train(rows):
        model(rows).sum().backward()
        torch.zeros(2**19)
        return rows

    assert guarded_calls(train, torch.randn(16, 8))[0] == [16]


def test_helper_that_trains_later_is_stopped_before_a_change(model):
    def apply(rows):
        model(rows).sum().backward()

    def train(rows):
        torch.zeros(len(rows), WIDTH, 2)  # fails before any frame tells of training
        apply(rows)
        return rows

    sizes, note = guarded_calls(train, torch.randn(256, 8))
    assert len(sizes) == 2
    assert model.weight.grad is None
    assert "inference_mode" in note


def test_a_forward_whose_gradients_are_recorded_is_not_split(model):
    def forward(rows):
        return model(rows).tanh().tanh().tanh()

    sizes, note = guarded_calls(forward, torch.randn(256, 8), "2 MiB")
    assert sizes == [256]
    assert "inference_mode" in note


def test_a_forward_without_gradients_is_split(subtests, model):
    def check(mode):
        @oomguard.guard(batch="rows")
        def forward(rows):
            with mode():
                return model(rows).tanh().tanh().tanh()[:, 0]

        rows = torch.randn(256, 8)
        expected = forward(rows)
        with limit_memory("1 MiB"):
            result = forward(rows)
        assert torch.allclose(result, expected)

    for mode in [torch.no_grad, torch.inference_mode]:
        with subtests.test(mode=mode):
            check(mode)


def test_failure_locals_are_released_after_reading(model):
    import weakref

    kept = []

    def forward(rows):
        hidden = model(rows)
        kept.append(weakref.ref(hidden))
        return hidden.tanh().tanh().tanh()

    guarded_calls(forward, torch.randn(256, 8), "2 MiB")
    assert [reference() for reference in kept] == [None]


def test_a_mode_without_gradients_in_a_librarys_frame_counts(model):
    """A pipeline turns gradients off in its own code, around the call of the model."""
    from types import ModuleType

    library = ModuleType("transformers.pipelines.base")
    source = "import torch\ndef forward(model, rows):\n    with torch.no_grad():\n        return model(rows).tanh().tanh()[:, 0]\n"
    exec(source, library.__dict__)

    @oomguard.guard(batch="rows")
    def embed(rows):
        return library.forward(model, rows)

    with limit_memory("1 MiB"):
        assert embed(torch.randn(256, 8)).shape == (256,)
