"""Arguments that nobody has listed are taken for rows only where the model's code, and its rows, say that they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import padded, whole_and_in_parts  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ROWS = 16


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Own(transformers.BertModel):
    """Bert, whose states a function changes by one more argument."""

    def __init__(self, change):
        super().__init__(transformers.BertConfig(**SIZES, vocab_size=64), add_pooling_layer=False)
        self.change = change

    def forward(self, input_ids, attention_mask=None, offsets=None):
        states = (
            super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        )
        return self.change(states.mean(1), offsets)


def own(change, offsets=None):
    torch.manual_seed(0)
    model, given = Own(change).eval(), random(ROWS, 32) if offsets is None else offsets
    return lambda: model(**padded(ROWS), offsets=given)


HALVES = {
    "a table that tokens look up": lambda x, y: x + y[x.argmax(1) % len(y)],
    "an average": lambda x, y: x + y.mean(0),
}


def test_call_that_uses_rows_otherwise_has_no_line_to_paste(subtests):
    def check(change):
        call = own(change)

        def without_gradients():
            with torch.no_grad():
                return call()

        with pytest.raises(torch.OutOfMemoryError) as raised:
            whole_and_in_parts(without_gradients, pin=["attn_implementation"])

        notes = "".join(raised.value.__notes__)
        assert "not run in parts: Own is your own code" in notes
        assert "cannot help: truncate_prompt_tokens: " in notes
        assert "do first: " not in notes
        assert "above def" not in notes
        assert not hasattr(raised.value, "partial")

    for name, change in HALVES.items():
        with subtests.test(name):
            check(change)
