"""Forward calls that draw random numbers are not run in parts: a part would draw others, and a seed would give another result.

But for single numbers, which are the same whatever the rows.
"""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import padded  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402


class Noisy(transformers.BertForSequenceClassification):
    """Adds noise to what it gives, where ``noise`` is above 0."""

    noise = 1.0
    calls = 0

    def forward(self, input_ids, attention_mask=None):
        type(self).calls += 1
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        if self.noise:
            output["logits"] = output.logits + self.noise * torch.randn_like(output.logits)
        return output


@pytest.fixture
def noisy():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    Noisy.calls = 0
    return Noisy._from_config(config, attn_implementation="eager").eval()


def run(model, rows=16):
    torch.manual_seed(7)
    with torch.no_grad():
        return model(**padded(rows)).logits


def capacity_for(model, share=0.5):
    with limit_memory("4 GiB") as device:
        run(model)
    return int(device.peak_bytes * share)


def test_noise_is_seen_by_a_trace_before_any_part_runs(noisy):
    capacity = capacity_for(noisy)
    Noisy.calls = 0
    with limit_memory(capacity), pytest.raises(torch.OutOfMemoryError) as raised, oomguard.guard() as g:
        run(noisy)
    assert "draws random numbers" in "".join(raised.value.__notes__)
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError"]
    assert g.partial is None


def test_a_call_that_begins_in_parts_and_draws_is_run_whole_as_its_seed_says(noisy):
    capacity = capacity_for(noisy)
    whole = run(noisy, 4)
    with limit_memory(capacity), oomguard.guard() as g:
        noisy.noise = 0.0
        run(noisy)  # from here on fewer rows at a time are known to fit
        noisy.noise = 1.0
        assert torch.equal(run(noisy, 4), whole)
    assert [attempt.error for attempt in g.attempts[:2]] == ["OutOfMemoryError", ""]


class Dropping(transformers.BertForSequenceClassification):
    """Draws a number for each layer that training may leave out, as wav2vec 2.0 and LED of transformers 5.17 do, in training or not."""

    scales, draws_rows = False, False

    def forward(self, input_ids, attention_mask=None):
        numbers = [torch.rand([]) for _ in range(2)]
        if self.draws_rows:
            torch.rand(len(input_ids))
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        if self.scales:
            output["logits"] = output.logits * numbers[1]
        return output


@pytest.fixture
def dropping(noisy):
    Dropping.scales = Dropping.draws_rows = False
    model = Dropping._from_config(noisy.config, attn_implementation="eager").eval()
    model.load_state_dict(noisy.state_dict())
    return model


def test_parts_leave_the_generator_where_one_call_leaves_it(dropping):
    with limit_memory(capacity_for(dropping)), oomguard.guard():
        run(dropping)
        state = torch.get_rng_state()
    torch.manual_seed(7)
    torch.rand(2)  # by the call that failed
    torch.rand(2)
    assert torch.equal(state, torch.get_rng_state())
