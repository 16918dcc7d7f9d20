"""Everyday calls on a real GPU (`make test-gpu`), each where it fails alone: one failure, the same results, nothing left alive."""

from __future__ import annotations

import gc

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
from everyday_calls import CALLS  # noqa: E402

from support.cuda_limit import limit_cuda  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # what transformers tells of a call is not asked here
]
MIB, SHARE = 1 << 20, 0.6


@pytest.fixture(autouse=True)
def _float32_as_it_is(tmp_path, monkeypatch):
    """No TF32: a result in parts is compared to the last bits. What a call writes lies in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()


def alive():
    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("name", CALLS)
def test_oversized_call_returns_the_whole_after_one_failure(name, told):
    call = CALLS[name]("cuda", 1)
    call()  # what is made once stays: the workspaces of cuBLAS
    held = alive()
    torch.cuda.reset_peak_memory_stats()
    whole = call().cpu()
    peak = torch.cuda.max_memory_allocated()
    capacity = held + int(SHARE * (peak - held))

    with limit_cuda(capacity), pytest.raises(torch.OutOfMemoryError):
        call()
    before = alive()
    with limit_cuda(capacity), oomguard.guard() as g:
        parts = call().cpu()
    after = alive()

    failed = sum(attempt.error != "" for attempt in g.attempts)
    changes = {patch.setting: patch.new for attempt in g.attempts for patch in attempt.patches}
    told(
        f"{name}, {(peak - held) // MIB} MiB beside what stays, on {SHARE} of it",
        f"{failed} failed, {changes}, {after - before} bytes more alive after it",
        "one, and none",
    )
    if whole.is_floating_point():
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4)
    else:
        assert torch.equal(parts, whole)
    assert failed == 1
    assert after == before
