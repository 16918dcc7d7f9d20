"""A result that has no room on its device stays on the host; what is computed of it equals what is computed on the device."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import oomguard
from oomguard.testing import limit_memory

torch = pytest.importorskip("torch")
F = torch.nn.functional

ROWS, TOKENS, VOCABULARY = 24, 10, 64


def _logits() -> Any:
    return torch.randn(ROWS, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0))


def _targets() -> Any:
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def _mask() -> Any:
    return (_targets() % 3 > 0).float()


def _cross_entropy(logits: Any, reduction: str, ignored: int = -100) -> Any:
    targets = _targets()[:, 1:].reshape(-1)
    shifted = logits[:, :-1].reshape(-1, VOCABULARY)
    return F.cross_entropy(shifted, targets, reduction=reduction, ignore_index=ignored)


def _filtered(logits: Any) -> Any:
    last = logits[:, -1] / 0.7
    least = last.topk(5).values[..., -1, None]
    return last.masked_fill(last < least, -torch.inf).softmax(-1)


def _written(logits: Any) -> Any:
    logits[:, :, 3] = -1.0
    logits[logits > 2] = 2.0
    logits[0] += 1
    logits.div_(2).clamp_(min=-1)
    logits[:, 0].zero_()
    return logits.clone()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "probabilities of the targets": lambda x: x.log_softmax(-1).gather(2, _targets()[..., None]).squeeze(-1).sum(1),
    "sampling filter": _filtered,
    "mean loss": lambda x: _cross_entropy(x, "mean"),
    "masked": lambda x: x[_mask().bool()].sum(-1),
    "similarity": lambda x: F.normalize(x[:, 0], dim=-1) @ F.normalize(x[:, 0], dim=-1).T,
    "written in place": _written,
    "one number": lambda x: (x[0, 0, 0].item(), float(x[1, 2, 3]), f"{x[0, 0, 0]:.3f}", bool(x[0, 0, 0] > 0)),
    "all rows at once": lambda x: x[:, :, 0].std(0),
}
# Programs whose steps need no more at once than the device has free: they run where the whole result has no room.
NEEDS_ALL = {"written in place"}


def _assert_same(found: Any, alone: Any) -> None:
    """Fail where two results differ in their types, shapes or entries, to the last bits of float32."""
    mine, theirs = (torch.utils._pytree.tree_flatten(result) for result in (found, alone))
    assert mine[1] == theirs[1]
    for one, other in zip(mine[0], theirs[0], strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert one == other


def _waiting(host: Any, part_bytes: int = 4000) -> Any:
    from oomguard.guarding.rows_on_host import RowsOnHost

    return RowsOnHost(host, torch.device("cpu"), part_bytes)


def test_what_is_computed_of_rows_on_the_host_equals_what_is_computed_on_the_device(subtests):
    for inference in [False, True]:
        for name, value in PROGRAMS.items():
            with subtests.test(inference=inference, name=name):
                with torch.inference_mode() if inference else torch.no_grad():
                    alone = value(_logits())
                    found = value(_waiting(_logits()))
                    with limit_memory("1 MiB"):  # with room for all of it
                        counted = value(_waiting(_logits()))
                _assert_same(found, alone)
                _assert_same(counted, alone)


def test_a_program_that_keeps_little_runs_where_the_whole_result_has_no_room(subtests):
    for name in sorted(PROGRAMS.keys() - NEEDS_ALL):
        with subtests.test(name=name):
            logits = _logits()
            with torch.no_grad():
                alone = PROGRAMS[name](logits)
                with limit_memory(logits.nbytes * 2 // 3) as device:
                    found = PROGRAMS[name](_waiting(logits))
                    assert device.peak_bytes <= device.capacity_bytes
            _assert_same(found, alone)


def test_what_needs_all_rows_at_once_runs_out_of_memory_in_the_devices_words_with_the_operation_in_a_note() -> None:
    logits = _logits()
    with limit_memory(logits.nbytes // 2), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        torch.fft.fft(_waiting(logits))
    assert "_fft_r2c takes all rows of a result at once" in "".join(raised.value.__notes__)


def test_rows_on_the_host_may_be_pickled_saved_and_copied() -> None:
    rows = _waiting(_logits())
    stored = io.BytesIO()
    torch.save(rows, stored)
    stored.seek(0)
    assert torch.equal(pickle.loads(pickle.dumps(rows)), _logits())
    assert torch.equal(torch.load(stored), _logits())
    other = copy.deepcopy(rows)
    other.zero_()
    assert torch.equal(rows, _logits())
    assert not other.any()


def test_random_numbers_are_drawn_for_all_rows_at_once() -> None:
    torch.manual_seed(3)
    alone = _logits().softmax(-1)[:, -1].multinomial(1), F.dropout(_logits(), 0.5)
    torch.manual_seed(3)
    found = _waiting(_logits()).softmax(-1)[:, -1].multinomial(1), F.dropout(_waiting(_logits()), 0.5)
    torch.testing.assert_close(found, alone)


def test_a_plain_call_whose_logits_have_no_room_together_gives_the_last_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=2000
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 2000, (32, 40))
    with torch.inference_mode():
        alone = model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
        with limit_memory("6 MiB"), oomguard.guard() as g:  # all logits are 9.8 MiB
            out = model(input_ids=ids, use_cache=False)
            found = out.logits[:, -1].log_softmax(-1)
    assert isinstance(out.logits, torch.Tensor)
    assert type(found) is torch.Tensor
    assert len(g.attempts) == 2
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
