"""Starts of vLLM on the CPU that ask the host for too much at once, in the engine's own lines: named and solved by what is free."""

from __future__ import annotations

import io
import json

import pytest

from oomguard.core.facts import GIB
from oomguard.core.incident import Incident
from oomguard.diagnosis import assess_all, default_rules, diagnose_lines
from oomguard.remedy.policy import make_policy
from oomguard.scan.source import read_lines

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
    "dtype": "float16",
    "tie_word_embeddings": False,
}
# 2 x 2 patches and the one of their class; its MLP is so wide that nothing else of it counts.
BLIP2 = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    "num_query_tokens": 4,
    "dtype": "float16",
    "vision_config": {
        "model_type": "blip_2_vision_model",
        "hidden_size": 64,
        "intermediate_size": 196608,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 28,
        "patch_size": 14,
        "hidden_act": "gelu",
    },
    "qformer_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "encoder_hidden_size": 64,
        "vocab_size": 512,
    },
    "text_config": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 64,
    },
}
REFUSED = "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"
FREE = 20 * GIB


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that plans for a start whose worker was refused memory while 20 GiB were free."""
    monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: FREE)
    monkeypatch.setattr("oomguard.probe.host.read_total_bytes", lambda: 24 * GIB)

    def plan_for(
        config: dict,
        args: dict,
        frames: list[str],
        message: str,
        *before: str,
        drafts: str = "None",
    ) -> Incident:
        (tmp_path / "config.json").write_text(json.dumps(config))
        error = "(Worker pid=19414) ERROR 11-22 17:58:03 [multiproc_executor.py:953] "
        lines = [
            f"(APIServer pid=19000) INFO 11-22 17:57:30 [utils.py:297] non-default args: {args | {'model': str(tmp_path)}}",
            (
                "(EngineCore pid=19300) INFO 11-22 17:57:41 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
                f"model='{tmp_path}', speculative_config={drafts}, tokenizer='{tmp_path}', dtype=torch.float16, "
                f"max_seq_len={args['max_model_len']}, tensor_parallel_size=1, quantization=None, device_config=cpu"
            ),
            *before,
            error + "WorkerProc failed to start.",
            error + "Traceback (most recent call last):",
            *(error + f'  File "/usr/lib/python3.11/site-packages/{frame}' for frame in frames),
            error + message,
        ]
        log = io.BytesIO("\n".join(lines).encode())
        found = assess_all(
            diagnose_lines(read_lines(log)),
            default_rules(),
            make_policy("reduces-capacity"),
            local_models=True,
        )
        return found.incidents[0]

    return plan_for


def solved(incident: Incident) -> dict[str, object]:
    return {patch.setting: patch.new for patch in incident.plan if patch.applicable}


def test_slots_for_embedding_and_head_join_those_of_layers(start):
    args = {
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "enable_lora": True,
        "max_loras": 256,
        "max_lora_rank": 512,
        "kv_cache_memory_bytes": 512 * 2**20,
    }
    frames = [
        'vllm/v1/worker/gpu_model_runner.py", line 5068, in load_model',
        'vllm/lora/layers/vocab_parallel_embedding.py", line 30, in create_lora_weights',
    ]
    found = start(LLAMA, args, frames, REFUSED.format(256 * 131072 * 512 * 2))
    assert found.causes[0].id == "lora"
    slot = 2 * 512 * (131072 + 128) * 2  # of the embedding and of the head, most of it
    assert 0.7 * FREE / slot * 0.8 < solved(found)["max_loras"] <= 0.8 * FREE / slot
    assert "80% of what the host has besides the engine's own" in found.plan[0].reason


def test_n_gram_drafter_table_is_named_and_solved_by_length(start):
    """The message rounds 40 GiB to three digits; its shape is exact."""
    args = {"max_model_len": 10485760, "max_num_seqs": 4, "kv_cache_memory_bytes": 2 * GIB}
    frames = [
        'vllm/v1/worker/gpu_model_runner.py", line 610, in __init__',
        'vllm/v1/spec_decode/ngram_proposer.py", line 61, in __init__',
    ]
    message = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 40.0 GiB for an array with shape (1024, 10485760) and data type int32"
    long = LLAMA | {"max_position_embeddings": 10485760, "vocab_size": 512}
    found = start(long, args, frames, message)
    assert (found.framework, found.causes[0].id, found.causes[0].rule) == (
        "vllm",
        "speculative_decoding",
        "OG351",
    )
    assert "1024 x 10485760 max_model_len x 4 bytes" in found.causes[0].explanation
    length = solved(found)["max_model_len"]
    assert length % 16 == 0
    assert 0.7 * (FREE - 4 * GIB) < 1024 * 4 * length <= 0.8 * (FREE - 4 * GIB)


def test_equal_bytes_are_the_drafters_only_if_it_drafts_so(subtests, start):
    for drafts in ["None", "SpeculativeConfig(method='ngram', model=None, num_spec_tokens=5)"]:
        with subtests.test(drafts=drafts):
            args = {"max_model_len": 10485760, "max_num_seqs": 4, "kv_cache_memory_bytes": 2 * GIB}
            message = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 40.0 GiB for an array with shape (1024, 10485760) and data type int32"
            found = start(LLAMA, args, [], message, drafts=drafts)
            assert (found.causes[0].id == "speculative_decoding") == (drafts != "None")


MANY = {"max_num_seqs": 16384, "max_num_batched_tokens": 65536}


def test_images_profiled_together_are_cut_by_step_and_requests(subtests, start):
    """A step needs a token for every request: with 16384 of them it cannot be as short as the memory asks for."""
    for user, limit, images, changed in [
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 65536},
            None,
            16384,
            {"max_num_batched_tokens"},
        ),
        (MANY, None, 16384, {"max_num_batched_tokens", "max_num_seqs"}),
        (MANY, 1, 16384, {"max_num_batched_tokens", "max_num_seqs"}),
        (
            {"max_num_seqs": 8192, "max_num_batched_tokens": 65536},
            1,
            8192,
            {"max_num_batched_tokens"},
        ),
    ]:
        with subtests.test(user=user, limit=limit, images=images, changed=changed):
            args = {"max_model_len": 2048, "kv_cache_memory_bytes": 128 * 2**20, **user}
            if limit:
                args["limit_mm_per_prompt"] = {"image": limit}
            frames = [
                'vllm/v1/worker/gpu_model_runner.py", line 6100, in profile_run',
                'vllm/model_executor/models/blip.py", line 200, in forward',
            ]
            tried = images * 5 * 196608 * 2
            loaded = "(Worker pid=19414) INFO 11-22 17:57:58 [gpu_model_runner.py:5145] Model loading took 0.14 GiB memory and 0.1 seconds"
            found = start(BLIP2, args, frames, REFUSED.format(tried), loaded)
            assert found.causes[0].id == "multimodal_profile"
            new = solved(found)
            together = {patch.setting for patch in found.plan if patch.applicable and patch.group}
            assert changed == (
                together or {next(patch.setting for patch in found.plan if patch.applicable)}
            )
            step = new["max_num_batched_tokens"]
            assert step >= new.get("max_num_seqs", 0)
            assert 2048 <= step // 4 < images
            assert 2 * tried / images * (step // 4) < 0.8 * FREE  # two such tensors live at once


def test_cache_above_the_process_limit_is_shrunk_to_fit(start, monkeypatch):
    monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: 4 * GIB)
    args = {"max_model_len": 4096, "max_num_seqs": 8, "kv_cache_memory_bytes": 6_000_000_000}
    frames = [
        'vllm/v1/worker/gpu_model_runner.py", line 7000, in initialize_kv_cache',
        'vllm/v1/worker/utils.py", line 300, in allocate_kv_cache',
    ]
    block = (
        128 * 2 * 2 * 1 * 64 * 2
    )  # tokens, keys and values, layers, key-value heads, head size, bytes
    found = start(LLAMA, args, frames, REFUSED.format(6_000_000_000 // block * block))
    assert found.causes[0].id == "kv_cache_budget"
    assert 0.6 * 2 * GIB <= solved(found)["kv_cache_memory_bytes"] <= 0.8 * 2 * GIB


def test_step_with_whole_prompts_is_at_least_the_longest(start, monkeypatch):
    monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: 2 * GIB + 2**27)
    args = {"max_model_len": 512, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 2**20}
    frames = [
        'vllm/v1/worker/gpu_model_runner.py", line 6193, in profile_run',
        'vllm/v1/worker/gpu_model_runner.py", line 5843, in _dummy_run',
    ]
    config = LLAMA | {"intermediate_size": 65536}
    line = "(EngineCore pid=19300) INFO 11-22 17:57:42 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: enable_chunked_prefill=False"
    refused = REFUSED.format(2048 * 65536 * 2 * 2)
    with_chunks, whole = (
        start(config, args, frames, refused),
        start(config, args, frames, refused, line),
    )
    assert solved(with_chunks)["max_num_batched_tokens"] < 512
    assert solved(whole).get("max_num_batched_tokens", 512) >= 512
