"""What a failed allocation was for is read from all that the log tells: the shape of an array, the drafts of a step, blocks."""

from __future__ import annotations

import json

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident, SettingInForce
from oomguard.estimate.start.failed_allocation import array_bytes, failed_allocation

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
}


@pytest.fixture
def incident(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def make(tried, kind="cuda_oom", phase="load_weights", user=(), **facts) -> Incident:
        user = {
            "max_num_seqs": 250,
            "max_num_batched_tokens": 8190,
            "max_model_len": 32750,
            **dict(user),
        }
        values = {
            "model": str(tmp_path),
            "on_cpu": kind == "host_oom",
            "tried_bytes": tried,
            **facts,
        }
        return Incident(
            kind,
            "boom",
            framework="vllm",
            framework_version="0.32.0",
            phase=phase,
            facts={name: Fact(name, value) for name, value in values.items()},
            settings={
                name: SettingInForce(name, value, True, "printed") for name, value in user.items()
            },
        )

    return make


def test_an_array_s_bytes_are_its_counts_and_its_type(subtests, incident):
    for shape, name, size in [
        ("1024, 10485760", "int32", 40 * GIB),
        ("1000000000,", "float64", 8_000_000_000),
        ("3230, 400, 300, 3", "uint8", 3230 * 400 * 300 * 3),
        ("16, 4", "bool", 64),
        ("16, 4", "<U12", None),
        ("", "int32", None),
    ]:
        with subtests.test(shape=shape, name=name, size=size):
            assert array_bytes(incident(1, array_shape=shape, array_type=name)) == size


def test_without_a_shape_the_printed_figure_stands(incident):
    assert array_bytes(incident(40 * GIB)) is None


def test_the_drafts_of_a_step_are_those_that_the_engine_printed(incident):
    tried = 250 * 6 * 128256 * 4
    found = failed_allocation(incident(tried, phase="profile_run", drafted_tokens=5))
    assert found.named.product.allocation.name == "draft_rows"
    without = failed_allocation(incident(tried, phase="profile_run"))
    assert without.named.product.allocation.name != "draft_rows"


def test_matrix_of_unclear_shape_is_known_by_parameters(subtests, tmp_path, incident):
    """The latent attention's up-projection: heads x (124 + 128) rows of a latent of 500, in no width of the configuration."""
    for kind in ["cuda_oom", "host_oom"]:
        with subtests.test(kind=kind):
            latent = {
                "model_type": "deepseek_v2",
                "architectures": ["DeepseekV2ForCausalLM"],
                "kv_lora_rank": 500,
                "qk_nope_head_dim": 124,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "q_lora_rank": None,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "n_shared_experts": 1,
                "num_key_value_heads": 8,
                "first_k_dense_replace": 2,
            }
            found = incident(8 * (124 + 128) * 500 * 2, kind)
            (tmp_path / "config.json").write_text(json.dumps(CONFIG | latent))
            assert failed_allocation(found).named.product.allocation.name == "weights"
            elsewhere = incident(8 * (124 + 128) * 500 * 2, kind, phase="decode")
            assert failed_allocation(elsewhere) is None


def test_row_of_block_numbers_covers_the_longest_request(subtests, incident):
    for kind, user, blocks in [
        ("cuda_oom", {}, 2048),  # of 16 tokens, padded to 128
        ("cuda_oom", {"block_size": 32}, 1024),
        ("host_oom", {}, 256),  # of 128 on the CPU
    ]:
        with subtests.test(kind=kind, user=user, blocks=blocks):
            many = {"max_num_seqs": 65_519, **user}
            found = failed_allocation(incident(65_519 * blocks * 4, kind, user=many))
            assert found.named.product.allocation.name == "request_blocks"
            assert found.named.product.numbers["max_num_seqs"] == 65_519


def test_a_drafter_s_copy_of_the_token_ids_is_on_the_device(subtests, incident):
    for kind, name in [("cuda_oom", "ngram_device_rows"), ("host_oom", "request_rows")]:
        with subtests.test(kind=kind, name=name):
            found = failed_allocation(incident(250 * 32750 * 4, kind, ngram_frames=True))
            assert found.named.product.allocation.name == name


def test_a_matrix_of_the_draft_model_is_told_from_the_target_s(incident, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(
        json.dumps(CONFIG | {"hidden_size": 16384, "intermediate_size": 458752})
    )
    tried = 2 * 458752 * 16384 * 2  # gate and up in one
    found = failed_allocation(incident(tried, kind="host_oom", draft_model=str(draft)))
    assert found.named.product.allocation.what == "one matrix of the draft model"
    assert failed_allocation(incident(tried, kind="host_oom")) is None


def test_whole_vocabulary_requests_do_not_depend_on_the_step(incident):
    """Every prompt token but the first, each with the whole vocabulary and its own: kept on the host until the request ends."""
    found = failed_allocation(
        incident(25_999 * 128_257 * 4, kind="host_oom", phase="prompt_logprobs")
    )
    assert found.named.product.allocation.name == "prompt_logprobs_result"
    assert found.named.product.numbers["tokens"] == 25_999
    assert not found.named.product.allocation.levers


def test_mlp_step_without_a_gate_is_not_of_twice_the_width(subtests, tmp_path, incident):
    for activation, name, together in [("gelu", "plain_mlp", 8), ("gelu_new", "mlp", 16)]:
        with subtests.test(activation=activation, name=name, together=together):
            bert = {
                "model_type": "bert",
                "architectures": ["BertModel"],
                "hidden_size": 256,
                "intermediate_size": 131072,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "vocab_size": 30522,
                "max_position_embeddings": 512,
                "torch_dtype": "float32",
                "hidden_act": activation,
            }
            (tmp_path / activation).mkdir()
            (tmp_path / activation / "config.json").write_text(json.dumps(bert))
            model = str(tmp_path / activation)
            tried, user = 3990 * 131072 * 4, {"max_num_batched_tokens": 4096, "max_model_len": 512}
            found = failed_allocation(
                incident(tried, "host_oom", phase="prefill", user=user, model=model)
            )
            assert str(found.named.product) == f"3990 tokens x 131072 {name} x 4 bytes"
            assert found.named.product.allocation.together == together
