"""What was told of an earlier call of a model holds until something changes that its code may go by."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.model_state import state_of  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

IDS = torch.randint(1, 97, (48, 16), generator=torch.Generator().manual_seed(0))


GLOBAL = {"centred": False}


class Holder:
    def __init__(self, held):
        self.held = held

    def is_centred(self):
        return self.held


class Hidden(torch.nn.Module):
    centred = False


def given(centred):
    return centred


def closure():
    on = False

    def turn():
        nonlocal on
        on = True

    return lambda: on, turn


class Model(transformers.PreTrainedModel):
    """Rows by themselves, until a switch is turned."""

    config_class = transformers.PretrainedConfig
    centred = False

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(97, 32)
        self.wide = torch.nn.Linear(32, 512)
        self.register_buffer("switch", torch.zeros(()))
        self.options, self.steps, self.inner = {"centred": False}, [], Holder(Holder(Holder(False)))
        self.of_object, self.of_partial = Holder(False).is_centred, functools.partial(given, centred=False)
        self.is_on, self.turn = closure()
        self.listed = [Hidden()]

    def after(self, hidden):
        return hidden

    def forward(self, input_ids):
        hidden = self.after(self.embed(input_ids))
        for step in self.steps:
            hidden = step(hidden)
        if self.centred or self.config.centred or self.switch.item() or GLOBAL["centred"] or self.options["centred"]:
            hidden = centre(hidden)
        if self.inner.held.held.held or self.of_object() or self.of_partial() or self.is_on() or self.listed[0].centred:
            hidden = centre(hidden)
        if self.wide.bias[0] > 1:
            hidden = centre(hidden)
        return self.wide(hidden).tanh().sum(-1)


def centre(hidden):
    return hidden - hidden.mean(0)


def made():
    torch.manual_seed(0)
    return Model(transformers.PretrainedConfig(centred=False)).eval()


CHANGES = {
    "an attribute": lambda model: setattr(model, "centred", True),
    "the configuration": lambda model: setattr(model.config, "centred", True),
    "an entry of a dict": lambda model: model.options.update(centred=True),
    "a weight's data": lambda model: model.wide.bias.data.fill_(2),
}


def test_a_change_is_seen_and_a_call_is_none(subtests):
    for name, value in CHANGES.items():
        with subtests.test(name=name):
            model = made()
            before = state_of(model)
            with torch.inference_mode():
                model(IDS)
            assert state_of(model) == before

            value(model)

            assert state_of(model) != before


OF_ALL_MODELS = {
    "a global": (GLOBAL, "centred"),
    "a method of the class": (Model, "after"),
    "an option of a class": (Hidden, "centred"),
    "a library's function": (torch.nn.functional, "embedding"),
}


def test_a_change_outside_of_the_model_is_seen(subtests, monkeypatch):
    for name, value in OF_ALL_MODELS.items():
        with subtests.test(name=name):
            owner, key = value
            model = made()
            before = state_of(model)

            put = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
            put(owner, key, centre)

            assert (state_of(model) != before) is (name != "a library's function")  # no own code names it


def test_the_state_keeps_nothing_alive():
    model = made()
    kept = weakref.ref(model.inner)
    state = state_of(model)
    del model
    gc.collect()
    assert kept() is None
    assert state is not None


def test_a_later_call_is_looked_at_again_where_rows_look_at_each_other_since():
    model = made()
    with limit_memory("1 GiB") as device, torch.inference_mode():
        model(IDS)
    with limit_memory(int(0.6 * device.peak_bytes)), oomguard.guard() as g, torch.inference_mode():
        model(IDS)
        assert g.attempts[-1].succeeded
        CHANGES["an attribute"](model)
        with pytest.raises(torch.OutOfMemoryError) as failed:
            model(IDS)
    assert any(
        each in "".join(failed.value.__notes__) for each in ("a row depends on those beside it", "beside other rows")
    )
