"""A watch on a real GPU (`make test-gpu`): its figures are torch's own, to the byte, and what it costs is told."""

from __future__ import annotations

import contextlib
import gc
import math
import time

import pytest

import oomguard
from support.paired import interval, trimmed

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ALLOCATED, RESERVED = ("cuda:0", "allocated"), ("cuda:0", "reserved")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    config = transformers.LlamaConfig(
        vocab_size=4096, pad_token_id=0, eos_token_id=None, bos_token_id=1, **sizes
    )
    yield transformers.LlamaForCausalLM(config).eval().to("cuda")
    gc.collect()
    torch.cuda.empty_cache()


def generate(model, rows=4, tokens=64, new=16):
    ids = torch.randint(3, 4096, (rows, tokens), generator=torch.Generator().manual_seed(1)).to(
        "cuda"
    )
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)


def of(uses, counter):
    (use,) = [use for use in uses if (use.device, use.what) == counter]
    return use


def test_peaks_are_torchs_own_per_call_and_per_watch(model, told):
    generate(model)
    torch.cuda.empty_cache()
    gc.collect()
    own = []
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with oomguard.watch() as seen:
        for rows in (4, 64, 16):
            generate(model, rows, tokens=256)
            # CUDA's peak began anew with the call: it is the call's.
            own.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        gc.collect()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    rows = [
        (of(row.uses, ALLOCATED).peak_bytes, of(row.uses, RESERVED).peak_bytes) for row in seen.rows
    ]
    whole = [of(seen.uses, counter) for counter in (ALLOCATED, RESERVED)]
    peaks, edges = (
        [use.peak_bytes for use in whole],
        [(use.before_bytes, use.after_bytes) for use in whole],
    )
    own_peaks = [max(kind) for kind in zip(*own, strict=True)]
    own_edges = [*zip(before, after, strict=True)]
    told("peaks of three calls, allocated and reserved, by the watch", rows, f"torch's {own}")
    told("of the whole watch", peaks, f"torch's {own_peaks}")
    told("before and after", edges, f"torch's {own_edges}")
    assert rows == own
    assert peaks == own_peaks
    assert edges == own_edges
    assert not any(use.sampled for use in whole)


def test_nvml_is_seen_beside_torch(model, told):
    with oomguard.watch() as seen:
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        time.sleep(0.3)
        del held
    uses = {use.what: use for use in seen.uses if use.device == "cuda:0"}

    told("counters of cuda:0 with 1 GiB held", {what: use.peak_bytes for what, use in uses.items()})
    assert uses["in use"].peak_bytes >= of(seen.uses, RESERVED).peak_bytes
    assert uses["in use"].limit_bytes >= torch.cuda.get_device_properties(0).total_memory


def test_a_watched_job_takes_about_as_long_as_without(model, told):
    def seconds(around):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with around:
            for _ in range(8):
                generate(model)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    logs = []
    for pair in range(22):
        order = (True, False) if pair % 2 else (False, True)
        ran = {
            side: seconds(oomguard.watch() if side else contextlib.nullcontext()) for side in order
        }
        if pair >= 2:  # the first ones are warm-up
            logs.append(math.log(ran[True] / ran[False]))
    ratio, (low, high) = math.exp(trimmed(logs)), interval(logs)

    told(
        "time of a watched job of 8 calls beside itself without, 20 pairs",
        f"{ratio:.4f} ({low:.4f} to {high:.4f})",
        "<= 1.01",
    )
    assert ratio <= 1.1  # 20 pairs on one machine cannot resolve the goal of 1.01
