"""Four questions that users asked, answered by `oomguard plan`: what fits, and where the figures
that went round do not hold.

    python examples/plan_seeds.py

No model is loaded; the configurations are those that the models' publishers give.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path

import oomguard

GIB = 2**30

W4A16 = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True, "type": "int"}}
    },
}
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA_70B = {
    **LLAMA_8B,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
QWEN3_32B = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3_VL_4B_FP8 = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": True,
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "ignore": ["model.visual"],
    },
    "text_config": {
        "model_type": "qwen3_vl_text",
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
SEVEN_B = {
    **LLAMA_8B,
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
DRAFT_1B = {
    **SEVEN_B,
    "num_hidden_layers": 22,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}


@contextmanager
def saved(config: dict):
    """A folder with a model's configuration, as `oomguard.plan` takes it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def row(label: str, budget: oomguard.StartBudget) -> str:
    """One line of a table: where the bytes of a GPU go, and what is left."""
    held = budget.weights_bytes + budget.draft_weights_bytes
    if budget.fits:
        verdict = "fits"
    else:
        verdict = "does not fit"
    return (
        f"  {label:34} weights {gib(held):>9}  activations {gib(budget.peak_activation_bytes):>9}  "
        f"KV pool {gib(budget.kv_cache_pool_bytes):>9}  {budget.kv_cache_tokens:>9,} tokens  "
        f"{verdict}"
    )


def perplexity_on_two_gpus() -> None:
    print(
        "1. An 8B and a 70B in 4 bit, TP 2, two GPUs of 95 GiB, windows of 2048 tokens (vLLM 0.11, "
        "utilization 0.9)"
    )
    for name, config in (("8B W4A16", LLAMA_8B), ("70B W4A16", LLAMA_70B)):
        with saved({**config, "quantization_config": W4A16}) as model:
            budget = oomguard.plan(
                model,
                gpu_memory="95GiB",
                engine_version="0.11",
                gpu_memory_utilization=0.9,
                tensor_parallel_size=2,
                max_model_len=2048,
                prompt_logprobs=True,
            ).budget
        print(row(name, budget))
    print(
        f"  Log-probabilities of a prompt take {gib(budget.prompt_logprobs_bytes)} more at the "
        "default step, which no start reserves."
    )
    print(
        "  '10 to 15 GiB, not 94': the pool is what the utilization leaves, whatever the windows "
        "need. Prefix caching only"
    )
    print("  decides which of its blocks hold what: turning it off frees nothing of the device.\n")


def token_table() -> None:
    print(
        "2. A 32B with transformers on 79.25 GiB, a prompt of 8,000 tokens: max_new_tokens and "
        "memory"
    )
    with saved(QWEN3_32B) as model:
        calls = [
            oomguard.plan(
                model,
                engine="transformers",
                gpu_memory="79.25GiB",
                prompt_tokens=8000,
                max_new_tokens=tokens,
            )
            for tokens in (512, 1024, 2048, 4096, 8192)
        ]
    for call in calls:
        kv = gib(call.max_new_tokens * call.kv_bytes_per_token)
        print(
            f"  {call.max_new_tokens:>5} new tokens: {kv:>9} of cache for them, peak "
            f"{gib(call.peak_bytes)}, reserved "
            f"{gib(call.reserved_bytes)}: {'fits' if call.fits else 'does not fit'}"
        )
    token = f"{call.kv_bytes_per_token / 2**20:.2f} MiB"
    weights = gib(call.weights_bytes)
    print(
        f"  '6.4 GB for 4096 tokens' is off by six: one token is {token}. The weights are "
        f"{weights}, not 72.22: the rest"
    )
    print(
        "  was the call's own. A shorter answer frees little; a shorter prompt, sdpa for eager, or "
        "fewer rows free much.\n"
    )


def eight_gibibytes() -> None:
    print("3. A 4B vision model in 8 bit on 8 GiB (vLLM 0.11, max_model_len 4096)")
    with saved(QWEN3_VL_4B_FP8) as model:
        plans = {
            ratio: oomguard.plan(
                model,
                gpu_memory="8GiB",
                engine_version="0.11",
                gpu_memory_utilization=ratio,
                max_model_len=4096,
            )
            for ratio in (0.8, 0.7, 0.9)
        }
    for ratio, plan in plans.items():
        print(row(f"utilization {ratio}", plan.budget))
    asked = plans[0.8]
    if asked.needed and asked.needed.without_images:
        without = "; without images it does"
    else:
        without = ""
    changes = (
        ", ".join(f"{p.setting} {p.old} -> {p.new}" for p in asked.changes) or "nothing to change"
    )
    print(
        "  At 0.8: "
        f"{'nothing fits with the largest images' + without if asked.needed else changes}."
    )
    beyond = gib(asked.budget.kv_cache_pool_bytes + 3.79 * GIB)
    print(
        "  '0.80 -> 0.70' takes 0.8 GiB from the pool; it never adds any. The log printed -3.79 "
        f"GiB, {beyond} less than this:"
    )
    print(
        "  a video's profile, or attention without flash kernels, is not in the plan. An image's "
        "is, with 16,384 tokens.\n"
    )


def with_and_without_a_draft() -> None:
    print("4. A 7B on 24 GiB, with and without a draft model of 1B (vLLM 0.11, utilization 0.9)")
    with saved(SEVEN_B) as model, saved(DRAFT_1B) as draft:
        speculation = {"model": draft, "num_speculative_tokens": 5}
        for length in (8192, 32768):
            for label, config in (
                (f"max_model_len {length}", None),
                (f"max_model_len {length}, draft", speculation),
            ):
                budget = oomguard.plan(
                    model,
                    gpu_memory="24GiB",
                    engine_version="0.11",
                    gpu_memory_utilization=0.9,
                    max_model_len=length,
                    speculative_config=config,
                ).budget
                print(row(label, budget))
    print(
        "  The pool does not depend on max_model_len: a shorter one only lowers what a single "
        "request may need. A token of this 7B"
    )
    print(
        "  takes 0.50 MiB, so 32,768 of them take 16 GiB, not 5. Lowering the utilization for "
        "speculation takes from the pool too."
    )


def main() -> None:
    perplexity_on_two_gpus()
    token_table()
    eight_gibibytes()
    with_and_without_a_draft()


if __name__ == "__main__":
    main()
