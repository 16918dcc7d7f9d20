"""What a model's name tells of its size, and what it does not."""

from __future__ import annotations

from oomguard.estimate.printed_budget import bits_from_name, bits_of_dtype, parameters_from_name


def test_a_size_in_a_name_is_told(subtests):
    for name, billions in [
        ("Qwen/Qwen3-32B", 32),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.5),
        ("meta-llama/Llama-2-7b-hf", 7),
        ("Qwen/Qwen2.5-VL-72B-Instruct-AWQ", 72),
        ("internlm/internlm2_5-7b-chat", 7),
        ("01-ai/Yi-1.5-34B", 34),
        ("bigscience/bloom-7b1", 7),
        ("Qwen/Qwen3-30B-A3B", 30),
        ("Qwen3-235B-A22B-FP8", 235),
        ("allenai/OLMoE-1B-7B-0924", 7),
        ("/models/llama-70b", 70),
        ("./m_13b.Q4_K_M.gguf", 13),
    ]:
        with subtests.test(name=name, billions=billions):
            assert parameters_from_name(name) == billions * 1e9


def test_experts_share_a_part_of_their_parameters(subtests):
    for name, least, most in [("Mixtral-8x7B-v0.1", 44, 48), ("Mixtral-8x22B-v0.1", 137, 146)]:
        with subtests.test(name=name, least=least, most=most):
            assert least * 1e9 <= parameters_from_name(name) <= most * 1e9


def test_a_name_without_a_size_tells_none(subtests):
    for name in [
        "gpt2",
        "facebook/opt-125m",
        "microsoft/Phi-3-mini-4k-instruct",
        "deepseek-ai/DeepSeek-V3",
        "unsloth/mistral-bnb-4bit",
        "moonshotai/Kimi-VL-A3B-Thinking",
        "google/gemma-3n-E4B-it",
        "x/v2.5beta",
        "",
        "/",
    ]:
        with subtests.test(name=name):
            assert parameters_from_name(name) is None


def test_of_a_path_the_last_part_that_tells_a_size_counts():
    assert parameters_from_name("/data/70b-experiments/llama-7b") == 7e9
    assert parameters_from_name("/data/llama-70b/checkpoint-200") == 70e9


def test_the_revision_in_a_cache_folder_is_no_size():
    revision = "95b0e" + "1" * 35

    assert (
        parameters_from_name(f"/root/.cache/models--Qwen--Qwen3-32B/snapshots/{revision}") == 32e9
    )


def test_a_quantisation_in_a_name_is_told(subtests):
    for name, bits in [
        ("TheBloke/Llama-2-70B-GPTQ", 4.5),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", 4.5),
        ("x/awq-8B", 4.5),
        ("unsloth/llama-3-8b-bnb-4bit", 4.5),
        ("nvidia/DeepSeek-R1-FP4", 4.5),
        ("x/8B-W4A16", 4.5),
        ("x/8B-Q4_K_M.gguf", 4.5),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", 8.5),
        ("x/Qwen3-30B-A3B-AWQ-8bit", 8.5),
        ("Qwen/Qwen3-32B-FP8", 8.5),
        ("x/8B-W8A8", 8.5),
        ("x/8B-Q8_0.gguf", 8.5),
        ("x/8B-Q6_K.gguf", 6.6),
        ("x/8B-Q5_K_M.gguf", 5.6),
        ("x/8B-Q2_K.gguf", 3.2),
        ("x/8B-IQ3_XXS.gguf", 3.2),
    ]:
        with subtests.test(name=name, bits=bits):
            assert bits_from_name(name) == bits


def test_a_name_without_a_quantisation_tells_none(subtests):
    for name in ["Qwen/Qwen3-32B", "x/7B-bf16", "x/16bit-7B", "gpt2", ""]:
        with subtests.test(name=name):
            assert bits_from_name(name) is None


def test_a_data_type_has_its_bits(subtests):
    for dtype, bits in [
        ("torch.float32", 32),
        ("float32", 32),
        ("torch.bfloat16", 16),
        ("half", 16),
        ("auto", 16),
        (None, 16),
    ]:
        with subtests.test(dtype=dtype, bits=bits):
            assert bits_of_dtype(dtype) == bits


def test_a_name_with_hundreds_of_digits_is_no_size():
    assert parameters_from_name("meta-llama/Llama-2" + "9" * 400 + "b") is None
