"""Four questions that users asked, answered by `oomguard plan`: what fits, and where the figures that went round do not hold.

    python examples/plan_seeds.py

No model is loaded; the configurations are those that the models' publishers give.
"""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.facts import GIB, format_gib
from oomguard.memory.fitting import fit
from oomguard.memory.model_files import ModelFiles
from oomguard.memory.plan import plan_vllm
from oomguard.memory.plan_generate import plan_generate
from oomguard.memory.prepared import Prepared, prepare
from oomguard.memory.trace import GenerateCall
from oomguard.memory_plan import MemoryPlan, VllmSettings

W4A16 = {
    "quant_method": "compressed-tensors", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True, "type": "int"}}},
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
QWEN3_32B = {
    "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_VL_4B_FP8 = {
    "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "ignore": ["model.visual"]},
    "text_config": {
        "model_type": "qwen3_vl_text", "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144, "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
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


def ready(name: str, config: dict, draft: dict | None = None) -> Prepared:
    """The model as `oomguard plan` reads it; ``draft`` is the configuration of a draft model."""
    import json
    import tempfile
    from pathlib import Path

    if draft is None:
        return prepare(ModelFiles(name, "config.json", config, None))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(draft))
        text = json.dumps({"model": folder, "num_speculative_tokens": 5})
        return prepare(ModelFiles(name, "config.json", config, None), speculative_config=text)


def row(label: str, plan: MemoryPlan) -> str:
    """One line of a table: where the bytes of a GPU go, and what is left."""
    held = plan.weights_bytes + plan.draft_weights_bytes
    verdict = "fits" if plan.fits else "does not fit"
    return (
        f"  {label:34} weights {format_gib(held):>9}  activations {format_gib(plan.peak_activation_bytes):>9}  "
        f"KV pool {format_gib(plan.kv_cache_pool_bytes):>9}  {plan.kv_cache_tokens:>9,} tokens  {verdict}"
    )


def perplexity_on_two_gpus() -> None:
    print("1. An 8B and a 70B in 4 bit, TP 2, two GPUs of 95 GiB, windows of 2048 tokens (vLLM 0.11, utilization 0.9)")
    settings = VllmSettings(
        version=Version("0.11"), gpu_total_bytes=95 * GIB, gpu_memory_utilization=0.9, tensor_parallel_size=2, max_model_len=2048,
        prompt_logprobs=True,
    )  # fmt: skip
    for name, config in (("8B W4A16", LLAMA_8B), ("70B W4A16", LLAMA_70B)):
        plan = plan_vllm(ready(name, {**config, "quantization_config": W4A16}), settings)
        print(row(name, plan))
    print(
        f"  Log-probabilities of a prompt take {format_gib(plan.prompt_logprobs_bytes)} more at the default step, which no start reserves."
    )
    print(
        "  '10 to 15 GiB, not 94': the pool is what the utilization leaves, whatever the windows need. Prefix caching only"
    )
    print("  decides which of its blocks hold what: turning it off frees nothing of the device.\n")


def token_table() -> None:
    print("2. A 32B with transformers on 79.25 GiB, a prompt of 8,000 tokens: max_new_tokens and memory")
    model = ready("32B", QWEN3_32B)
    for tokens in (512, 1024, 2048, 4096, 8192):
        plan = plan_generate(model, GenerateCall(model.shape.config, 1, 8000, tokens), round(79.25 * GIB))
        kv = format_gib(tokens * plan.kv_bytes_per_token)
        print(
            f"  {tokens:>5} new tokens: {kv:>9} of cache for them, peak {format_gib(plan.peak_bytes)}, reserved "
            f"{format_gib(plan.reserved_bytes)}: {'fits' if plan.fits else 'does not fit'}"
        )
    token, weights = f"{plan.kv_bytes_per_token / 2**20:.2f} MiB", format_gib(plan.weights_bytes)
    print(
        f"  '6.4 GB for 4096 tokens' is off by six: one token is {token}. The weights are {weights}, not 72.22: the rest"
    )
    print(
        "  was the call's own. A shorter answer frees little; a shorter prompt, sdpa for eager, or fewer rows free much.\n"
    )


def eight_gibibytes() -> None:
    print("3. A 4B vision model in 8 bit on 8 GiB (vLLM 0.11, max_model_len 4096)")
    model = ready("VL 4B FP8", QWEN3_VL_4B_FP8)
    settings = VllmSettings(
        version=Version("0.11"), gpu_total_bytes=8 * GIB, gpu_memory_utilization=0.8, max_model_len=4096
    )
    plans = {ratio: plan_vllm(model, replace(settings, gpu_memory_utilization=ratio)) for ratio in (0.8, 0.7, 0.9)}
    for ratio, plan in plans.items():
        print(row(f"utilization {ratio}", plan))
    found = fit(model, settings)
    without = "; without images it does" if found.without_images else ""
    changes = ", ".join(f"{name} {before} -> {after}" for name, before, after in found.changed) or "nothing to change"
    print(f"  At 0.8: {changes if found.plan else 'nothing fits with the largest images' + without}.")
    beyond = format_gib(plans[0.8].kv_cache_pool_bytes + 3.79 * GIB)
    print(
        f"  '0.80 -> 0.70' takes 0.8 GiB from the pool; it never adds any. The log printed -3.79 GiB, {beyond} less than this:"
    )
    print(
        "  a video's profile, or attention without flash kernels, is not in the plan. An image's is, with 16,384 tokens.\n"
    )


def with_and_without_a_draft() -> None:
    print("4. A 7B on 24 GiB, with and without a draft model of 1B (vLLM 0.11, utilization 0.9)")
    plain, drafted = ready("7B", SEVEN_B), ready("7B + 1B", SEVEN_B, DRAFT_1B)
    for length in (8192, 32768):
        settings = VllmSettings(
            version=Version("0.11"), gpu_total_bytes=24 * GIB, gpu_memory_utilization=0.9, max_model_len=length
        )
        print(row(f"max_model_len {length}", plan_vllm(plain, settings)))
        print(row(f"max_model_len {length}, draft", plan_vllm(drafted, settings)))
    print(
        "  The pool does not depend on max_model_len: a shorter one only lowers what a single request may need. A token of this 7B"
    )
    print(
        "  takes 0.50 MiB, so 32,768 of them take 16 GiB, not 5. Lowering the utilization for speculation takes from the pool too."
    )


def main() -> None:
    perplexity_on_two_gpus()
    token_table()
    eight_gibibytes()
    with_and_without_a_draft()


if __name__ == "__main__":
    main()
