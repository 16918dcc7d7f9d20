"""The simulated device's live peak beside a real GPU's (`make test-gpu`): the same calls of the same model, in float32."""

from __future__ import annotations

import gc
import os

import pytest

from oomguard.testing import limit_memory

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 1 << 20
SIZES = {"vocab_size": 4096, "hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8}


@pytest.fixture(autouse=True)
def _nothing_left():
    """What runs on the processor takes its cores; nothing stays on the GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    yield
    torch.set_num_threads(threads)
    gc.collect()
    torch.cuda.empty_cache()


def llama(attention="sdpa"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=1024, pad_token_id=0, eos_token_id=None, bos_token_id=1
    )
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention
    ).eval()


def generate(model, ids):
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)


def beams(model, ids):
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, num_beams=3
    )


@torch.no_grad()
def logits(model, ids):
    model(ids, use_cache=False)


def step(model, ids):
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


CASES = {
    "generate": (generate, "sdpa", (8, 256)),
    "generate, eager attention": (generate, "eager", (8, 256)),
    "beams": (beams, "sdpa", (4, 256)),
    "logits of a batch": (logits, "sdpa", (8, 256)),
    "logits of a long prompt": (logits, "sdpa", (1, 2048)),
    "a training step": (step, "sdpa", (4, 256)),
}


def simulated(call, model, ids):
    with limit_memory("1 TiB") as device:
        device.adopt([*model.parameters(), *model.buffers(), ids])
        call(model, ids)  # what is made once stays
        gc.collect()
        device.reset_peak()
        call(model, ids)
        return device.peak_bytes


def on_gpu(call, model, ids):
    """The peak as torch tells it, as it was asked for before rounding, and how much of both cuBLAS keeps."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated()
    model, ids = model.to("cuda"), ids.to("cuda")
    call(model, ids)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    call(model, ids)
    peak, asked = (
        torch.cuda.max_memory_allocated(),
        torch.cuda.memory_stats()["requested_bytes.all.peak"],
    )
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return peak - others, asked - others, before - torch.cuda.memory_allocated()


def test_live_peak_is_near_a_gpus_except_cublas_workspaces(subtests, told):
    for name, value in CASES.items():
        with subtests.test(name=name):
            call, attention, shape = value
            ids = torch.randint(
                3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1)
            )
            counted = simulated(call, llama(attention), ids)
            peak, asked, workspaces = on_gpu(call, llama(attention), ids)

            told(
                f"{name}, MiB counted by limit_memory and allocated on the GPU",
                f"{counted / MIB:.2f} and {peak / MIB:.2f} ({counted / peak:.4f}); without {workspaces / MIB:.2f} of cuBLAS "
                f"{counted / (peak - workspaces):.4f}, before rounding {counted / (asked - workspaces):.4f}",
            )
            assert (
                0.75 < counted / (peak - workspaces) < 1.25
            )  # other kernels, other workspaces: a figure to look at
