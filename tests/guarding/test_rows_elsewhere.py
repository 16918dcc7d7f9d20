"""Results that hold their rows behind another axis, or several entries for each, are put together where a trace proves it."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import limit_memory  # noqa: E402

ROWS, TOKENS, WIDTH = 16, 32, 32
SIZES = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EXTRAS = {
    "tokens before rows": lambda states: states.transpose(0, 1).contiguous(),
    "windows of a row after each other": lambda states: states.view(-1, 4, TOKENS // 4, WIDTH).flatten(0, 1),
}
REFUSED = {
    "rows over again": lambda states: states[:, 0].repeat(2, 1),
    "no rows": lambda states: states.new_zeros(3, 2),
}


class WithExtra(transformers.BertModel):
    """Gives what ``extra`` makes of its states beside them."""

    extra = None

    def forward(self, input_ids):
        states = super().forward(input_ids=input_ids).last_hidden_state
        return {"states": states, "extra": self.extra(states)}


def called(extra):
    """A call of such a model, and the bytes at its peak."""
    torch.manual_seed(0)
    model = WithExtra._from_config(transformers.BertConfig(**SIZES, vocab_size=64), attn_implementation="eager").eval()
    model.extra = extra
    ids = torch.randint(3, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))

    def call():
        with torch.no_grad():
            return model(input_ids=ids)

    with limit_memory("1 GiB") as device:
        call()
    return call, device.peak_bytes


def test_rows_behind_another_axis_and_several_entries_of_a_row_are_put_together(subtests):
    for name, extra in EXTRAS.items():
        with subtests.test(name):
            call, peak = called(extra)
            whole = call()
            with limit_memory(int(peak * 0.7)), oomguard.guard(pin=["attn_implementation"]) as g:
                parts = call()
            assert len(g.attempts) == 2
            for found, wanted in zip(
                torch.utils._pytree.tree_leaves(parts), torch.utils._pytree.tree_leaves(whole), strict=True
            ):
                torch.testing.assert_close(found, wanted)
                assert found.stride() == wanted.stride()


def test_entries_whose_rows_are_not_in_order_are_refused_by_their_name_before_any_part_runs(subtests):
    for name, extra in REFUSED.items():
        with subtests.test(name):
            call, peak = called(extra)
            with (
                limit_memory(int(peak * 0.7)),
                pytest.raises(torch.OutOfMemoryError) as raised,
                oomguard.guard(pin=["attn_implementation"]) as g,
            ):
                call()
            assert "its result['extra'] does not hold the rows along one of its axes" in "".join(raised.value.__notes__)
            assert g.partial is None
