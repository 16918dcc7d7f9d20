"""What fails while vLLM loads weights, in the engine's own lines, is never the batch's: also where one matrix is a large part of a device."""

from __future__ import annotations

import json

import pytest

from oomguard import diagnose
from oomguard.remedy.policy import make_policy

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}
PACKAGES = "/usr/lib/python3.11/site-packages/"
LOADING = [
    'vllm/v1/worker/gpu_worker.py", line 594, in load_model',
    'vllm/v1/worker/gpu_model_runner.py", line {}, in load_model',
]
BUILDING = [
    'vllm/model_executor/models/llama.py", line 503, in __init__',
    'vllm/model_executor/layers/vocab_parallel_embedding.py", line 361, in __init__',
    'vllm/model_executor/layers/vocab_parallel_embedding.py", line 56, in create_weights',
    'torch/utils/_device.py", line 122, in __torch_function__',
]
OWN = [
    LOADING[0],
    LOADING[1].format(5057),
    'vllm/model_executor/model_loader/base_loader.py", line 53, in load_model',
]
DRAFT = [
    LOADING[0],
    LOADING[1].format(5073),
    'vllm/v1/spec_decode/llm_base_proposer.py", line 1390, in load_model',
    'vllm/v1/spec_decode/draft_model.py", line 60, in _get_model',
]
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 125.25 MiB. GPU 0 has a total capacity of {total} MiB of which {free} MiB is free. Including non-PyTorch memory, this process has {held} MiB memory in use. Of the allocated memory {held} MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."


def log_of(model: str, frames: list[str], drafts: str, message: str) -> str:
    error = "(Worker pid=77) ERROR 11-22 17:44:28 [multiproc_executor.py:953] "
    return "\n".join(
        [
            f"(APIServer pid=7) INFO 11-22 17:44:10 [utils.py:297] non-default args: {{'model': '{model}', 'max_model_len': 8192}}",
            f"(EngineCore pid=42) INFO 11-22 17:44:21 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='{model}', speculative_config={drafts}, dtype=torch.float16, max_seq_len=8192, tensor_parallel_size=1, quantization=None, device_config=cuda",
            f"(Worker pid=77) INFO 11-22 17:44:24 [gpu_model_runner.py:5042] Starting to load model {model}...",
            error + "WorkerProc failed to start.",
            error + "Traceback (most recent call last):",
            *(error + f'  File "{PACKAGES}{frame}' for frame in frames),
            error + message,
        ]
    )


@pytest.mark.parametrize("reads_model", [False, True])
@pytest.mark.parametrize(
    ("frames", "drafts", "sizes"),
    [
        (OWN, "None", {"total": "256.00", "free": "100.70", "held": "155.30"}),
        (
            DRAFT,
            "SpeculativeConfig(method='draft_model', model='draft', num_spec_tokens=3)",
            {"total": "400.00", "free": "118.20", "held": "281.80"},
        ),
    ],
)
def test_weights_that_do_not_fit_are_named_before_a_batch(
    tmp_path, frames, drafts, sizes, reads_model
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = log_of(str(tmp_path), [*frames, *BUILDING], drafts, CUDA.format(**sizes))
    found = diagnose(text, model=str(tmp_path) if reads_model else None).incidents[0]
    assert found.phase == "load_weights"
    assert found.causes[0].id == "weights_do_not_fit"
    assert "batch_too_large" not in {cause.id for cause in found.causes}
    assert not any(patch.applicable for patch in found.plan)


@pytest.mark.parametrize("reads_model", [False, True])
def test_adapter_slots_that_do_not_fit_are_not_blamed_on_weights(tmp_path, reads_model):
    """The slots of the embedding alone, 64 of rank 256, are 3.91 GiB; each takes as much again for the head."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    frames = [
        LOADING[0],
        LOADING[1].format(5068),
        'vllm/v1/worker/lora_model_runner_mixin.py", line 40, in load_lora_model',
        'vllm/lora/layers/vocab_parallel_embedding.py", line 30, in create_lora_weights',
    ]
    message = CUDA.replace("125.25 MiB", "3.91 GiB").format(
        total="1024.00", free="748.00", held="276.00"
    )
    text = log_of(str(tmp_path) if reads_model else "/gone/model", frames, "None", message)
    text = text.replace(
        "8192}", "8192, 'enable_lora': True, 'max_loras': 64, 'max_lora_rank': 256}"
    )
    model = str(tmp_path) if reads_model else None
    found = diagnose(text, model=model, policy=make_policy("reduces-capacity")).incidents[0]
    assert found.causes[0].id == "lora"
    slots = {patch.setting: patch.new for patch in found.plan if patch.applicable}.get("max_loras")
    assert slots == (4 if reads_model else None)
