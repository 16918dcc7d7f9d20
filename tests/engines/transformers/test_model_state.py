"""What was told of an earlier call of a model holds until something changes that its code may go by."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.model_state import state_of  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

IDS = torch.randint(1, 97, (48, 16), generator=torch.Generator().manual_seed(0))


class Model(transformers.PreTrainedModel):
    """Rows by themselves, until a switch is turned."""

    config_class = transformers.PretrainedConfig
    centred = False

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(97, 32)
        self.wide = torch.nn.Linear(32, 512)
        self.register_buffer("switch", torch.zeros(()))

    def after(self, hidden):
        return hidden

    def forward(self, input_ids):
        hidden = self.after(self.embed(input_ids))
        if self.centred or self.config.centred or self.switch.item():
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
    "a buffer": lambda model: model.switch.fill_(1),
    "a method": lambda model: setattr(model, "after", centre),
    "a module": lambda model: setattr(model, "embed", torch.nn.Sequential(model.embed)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_a_call_is_none(name):
    model = made()
    before = state_of(model)
    with torch.inference_mode():
        model(IDS)
    assert state_of(model) == before

    CHANGES[name](model)

    assert state_of(model) != before


def test_what_is_no_module_has_no_state():
    assert state_of(object()) is None


@pytest.mark.parametrize("name", ["an attribute", "a method"])
def test_a_later_call_is_looked_at_again_where_rows_look_at_each_other_since(name):
    model = made()
    with limit_memory("1 GiB") as device, torch.inference_mode():
        model(IDS)
    with limit_memory(int(0.6 * device.peak_bytes)), oomguard.guard() as g, torch.inference_mode():
        model(IDS)
        assert g.attempts[-1].succeeded
        CHANGES[name](model)
        with pytest.raises(torch.OutOfMemoryError) as failed:
            model(IDS)
    assert "a row depends on those beside it" in "".join(failed.value.__notes__)
