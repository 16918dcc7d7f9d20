"""What a failed start of vLLM needs, by the configuration of the model that it names."""

from __future__ import annotations

import json

from oomguard.core.facts import Fact
from oomguard.core.incident import Incident
from oomguard.diagnosis import assess, default_rules
from oomguard.estimate.start.failed_start import with_exact_need
from oomguard.remedy.policy import Policy

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}


def of_vllm(**facts) -> Incident:
    return Incident(
        "kv_cache_none_left",
        "boom",
        framework="vllm",
        facts={name: Fact(name, value) for name, value in facts.items()},
    )


def test_the_need_is_computed_from_the_folder_that_a_log_names(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    facts = {"model": str(tmp_path), "max_model_len_tokens": 1024}
    saved = assess(of_vllm(**facts), default_rules(), Policy())
    running = assess(of_vllm(**facts), default_rules(), Policy(), local_models=True)

    # 64 blocks of 16 tokens and the one that vLLM keeps: two layers, keys and values, two heads of 16, two bytes each.
    for failed in [saved, running]:
        assert failed.number("kv_cache_needed_bytes") == 65 * 16 * (2 * 2 * 2 * 16 * 2)


def test_the_ranks_share_the_need_of_a_token(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    facts = {"model": str(tmp_path), "max_model_len_tokens": 1024, "tensor_parallel_size": 2}

    assert with_exact_need(of_vllm(**facts)).number("kv_cache_needed_bytes") == 65 * 16 * (
        2 * 2 * 1 * 16 * 2
    )


def test_a_model_that_is_named_is_read_in_place_of_the_log_s(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    found = with_exact_need(of_vllm(model="org/name", max_model_len_tokens=1024), str(tmp_path))

    assert found.number("kv_cache_needed_bytes") == 65 * 16 * (2 * 2 * 2 * 16 * 2)


def test_without_a_local_model_the_need_stays_unknown(subtests):
    for facts in [
        {"model": "org/name", "max_model_len_tokens": 8},
        {"model": "x"},
        {"max_model_len_tokens": 8},
    ]:
        with subtests.test(facts=facts):
            assert with_exact_need(of_vllm(**facts)).number("kv_cache_needed_bytes") is None


def test_a_printed_need_is_not_computed_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    facts = {"model": str(tmp_path), "max_model_len_tokens": 1024, "kv_cache_needed_bytes": 5}

    assert with_exact_need(of_vllm(**facts)).number("kv_cache_needed_bytes") == 5
