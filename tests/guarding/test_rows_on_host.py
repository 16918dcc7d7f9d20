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


def _classes_behind_rows(logits: Any, reduction: str, ignored: int = -100) -> Any:
    shifted = logits[:, :-1].float().transpose(1, 2)
    return F.cross_entropy(shifted, _targets()[:, 1:], reduction=reduction, ignore_index=ignored)


def _nothing_to_mean(logits: Any) -> Any:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), torch.full((ROWS * TOKENS,), -100))


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


def _scattered(logits: Any) -> Any:
    logits.scatter_(2, _targets()[..., None], 9.0)
    logits.index_add_(0, torch.tensor([0, 2]), torch.ones(2, TOKENS, VOCABULARY))
    return logits.sum(-1)


def _into_another(logits: Any) -> Any:
    kept = torch.zeros(ROWS, VOCABULARY)
    kept += logits[:, 2]
    kept[:, 1] = logits[:, 2, 0]
    return kept


def _with_addend(logits: Any) -> list[Any]:
    flat, to_one = logits.view(-1, VOCABULARY), torch.ones(VOCABULARY)
    to_three, each = torch.ones(VOCABULARY, 3), torch.arange(ROWS * TOKENS).float()
    addends = [each[:, None].expand(-1, 3), torch.ones(1, 3), torch.ones(3), torch.ones(())]
    found = [torch.addmm(addend, flat, to_three) for addend in addends]
    found += [torch.addmv(addend, flat, to_one) for addend in (each, torch.ones(1))]
    found += [torch.baddbmm(each.view(ROWS, TOKENS, 1), logits, to_three[None].expand(ROWS, -1, -1))]
    return [*found, torch.baddbmm(torch.ones(3), logits, to_three.expand(ROWS, -1, -1)), flat.mv(to_one)]


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "last token": lambda x: x[:, -1].log_softmax(-1),
    "greedy": lambda x: x.argmax(-1),
    "probabilities of the targets": lambda x: x.log_softmax(-1).gather(2, _targets()[..., None]).squeeze(-1).sum(1),
    "logsumexp": lambda x: x[:, :-1].logsumexp(-1),
    "mean over tokens": lambda x: (x * _mask()[..., None]).sum(1) / _mask().sum(1, keepdim=True),
    "mean": lambda x: x.mean(dim=1),
    "most likely": lambda x: x.softmax(-1).topk(3, dim=-1),
    "largest": lambda x: x.max(dim=-1),
    "sampling filter": _filtered,
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "mean loss": lambda x: _cross_entropy(x, "mean"),
    "loss of each token": lambda x: _cross_entropy(x, "none"),
    "sum of losses": lambda x: _cross_entropy(x, "sum"),
    "loss without some tokens": lambda x: _cross_entropy(x, "mean", 5),
    "loss of nothing": _nothing_to_mean,
    "loss of each token, classes behind the rows": lambda x: _classes_behind_rows(x, "none"),
    "mean loss, classes behind the rows": lambda x: _classes_behind_rows(x, "mean", 5),
    "sum of losses, classes behind the rows": lambda x: _classes_behind_rows(x, "sum"),
    "loss of each pixel": lambda x: F.cross_entropy(
        x.transpose(1, 2).unflatten(2, (2, -1)), _targets().unflatten(1, (2, -1)), reduction="none"
    ),
    "rows in another order": lambda x: x[torch.tensor([3, 1, 2])].sum(-1),
    "masked": lambda x: x[_mask().bool()].sum(-1),
    "transposed": lambda x: x.transpose(0, 1).sum(-1),
    "half": lambda x: x[:, -1].to(torch.float16),
    "upsampled": lambda x: F.interpolate(x[:6].unflatten(2, (2, -1)), scale_factor=2, mode="bilinear").argmax(1),
    "upsampled by the nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest").amax(-1),
    "pooled": lambda x: F.adaptive_avg_pool2d(x.unflatten(2, (2, -1)), 2),
    "projection": lambda x: x @ torch.ones(VOCABULARY, 3),
    "linear": lambda x: F.linear(x, torch.ones(3, VOCABULARY), torch.ones(3)),
    "products with an addend": _with_addend,
    "layer norm": lambda x: F.layer_norm(x, (VOCABULARY,)).sum(-1),
    "unit length": lambda x: F.normalize(x[:, 0], dim=-1),
    "similarity": lambda x: F.normalize(x[:, 0], dim=-1) @ F.normalize(x[:, 0], dim=-1).T,
    "joined": lambda x: torch.cat([x[:2], torch.ones(1, TOKENS, VOCABULARY)]).sum(-1),
    "stacked": lambda x: torch.stack(list(x[:3])).sum(-1),
    "broadcast": lambda x: (torch.ones(2, 1, TOKENS, 1) * x[None, :2]).sum(-1),
    "split": lambda x: [part.sum(-1) for part in x.split(7)],
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())).sum(-1),
    "sorted": lambda x: x[:, -1].sort(descending=True),
    "written in place": _written,
    "scattered": _scattered,
    "into another": _into_another,
    "dropout that is off": lambda x: F.dropout(x, 0.1, training=False)[:, 0].sum(-1),
    "one number": lambda x: (x[0, 0, 0].item(), float(x[1, 2, 3]), f"{x[0, 0, 0]:.3f}", bool(x[0, 0, 0] > 0)),
    "a list": lambda x: x[:2, 0, :3].tolist(),
    "an array": lambda x: x.numpy().shape,
    "to the host": lambda x: x.cpu()[:, -1].sum(-1),
    "all rows at once": lambda x: x[:, :, 0].std(0),
    "all equal": lambda x: torch.equal(x[:2], x[:2].clone()),
    "shape": lambda x: (
        x.shape,
        x.dtype,
        x.device,
        x.dim(),
        len(x),
        x.numel(),
        x.nbytes,
        x.is_contiguous(),
        x.requires_grad,
    ),
}
# Programs whose steps need no more at once than the device has free: they run where the whole result has no room.
NEEDS_ALL = {"written in place", "scattered", "all equal", "to the host"}


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


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_computed_of_rows_on_the_host_equals_what_is_computed_on_the_device(name: str, inference: bool) -> None:
    with torch.inference_mode() if inference else torch.no_grad():
        alone = PROGRAMS[name](_logits())
        found = PROGRAMS[name](_waiting(_logits()))
        with limit_memory("1 MiB"):  # with room for all of it
            counted = PROGRAMS[name](_waiting(_logits()))
    _assert_same(found, alone)
    _assert_same(counted, alone)


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - NEEDS_ALL))
def test_a_program_that_keeps_little_runs_where_the_whole_result_has_no_room(name: str) -> None:
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


def test_an_operation_that_is_not_known_changes_the_rows_and_no_copy_of_them() -> None:
    rows = _waiting(torch.ones(3, 3))
    assert rows.cumsum_(0) is rows
    assert rows.tolist() == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]


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


@pytest.mark.parametrize(
    "move", [lambda rows: rows.to("cpu"), lambda rows: rows.cpu(), lambda rows: rows.float().cpu()]
)
def test_a_result_that_was_made_in_inference_mode_comes_to_the_host_after_it(move):
    from oomguard.guarding.rows_on_host import RowsOnHost

    host = _logits()
    with torch.inference_mode():
        rows = RowsOnHost(host, torch.device("meta"), 1 << 20)  # a device that is not the host

    moved = move(rows)

    assert type(moved) is torch.Tensor
    assert torch.equal(moved, host)


def test_an_operation_that_fails_in_parts_is_made_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from oomguard.guarding import rows_on_host

    monkeypatch.setattr(rows_on_host, "cut_arguments", lambda *_: ("mat1",))  # as if nothing were added to each row
    with torch.no_grad():
        _assert_same(_with_addend(_waiting(_logits())), _with_addend(_logits()))


def test_what_an_operation_of_the_program_raises_is_raised() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match"):
        _waiting(_logits()) + torch.ones(7)
