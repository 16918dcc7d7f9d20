"""The KV cache of a failed start to the byte, and the printed figures as its check."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident, SettingInForce
from oomguard.diagnosis import assess, default_rules
from oomguard.estimate.start import kv_cache
from oomguard.estimate.start.failed_start import with_exact_need
from oomguard.remedy.policy import Policy, make_policy

PLAIN = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "float16",
    "max_position_embeddings": 32768,
}
# Two layers, keys and values, two heads of 16, two bytes each.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2
WINDOWED = PLAIN | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 128,
}
CPU_BLOCK_TOKENS = 128


@pytest.fixture
def too_small(tmp_path: Path):
    def make(config=PLAIN, user=(), **facts) -> Incident:
        (tmp_path / "config.json").write_text(json.dumps(config))
        values = {
            "model": str(tmp_path),
            "max_model_len_tokens": 32768,
            "max_num_seqs": 64,
            "on_cpu": True,
            **facts,
        }
        user = dict(user)
        return Incident(
            "kv_cache_too_small_for_max_len",
            "boom",
            framework="vllm",
            framework_version="0.32.0",
            facts={
                name: fact if isinstance(fact, Fact) else Fact(name, fact)
                for name, fact in {
                    **values,
                    **{name: value for name, value in user.items() if name != "max_model_len"},
                    **{
                        f"{name}_set": name in user
                        for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override")
                    },
                }.items()
            },
            settings={
                name: SettingInForce(name, value, True, "printed") for name, value in user.items()
            },
            settings_complete=True,
        )

    return make


def planned(incident: Incident, allow: str | None = None) -> Incident:
    return assess(
        incident, default_rules(), make_policy(allow) if allow else Policy(), local_models=True
    )


def values(incident: Incident) -> dict[str, object]:
    return {patch.setting: patch.new for patch in incident.plan if patch.applicable}


def test_byte_count_is_rounded_up_to_whole_blocks(too_small):
    """Printed as 0.01 GiB, which may be 16 MB: 33 % to 300 % more than what starts."""
    found = planned(
        too_small(
            user={"kv_cache_memory_bytes": 1_000_000},
            kv_cache_needed_bytes=Fact(
                "kv_cache_needed_bytes", round(0.01 * GIB), slack=0.005 * GIB
            ),
            estimated_max_model_len_tokens=3840 - CPU_BLOCK_TOKENS,
        )
    )
    (raised,) = [other for other in found.alternatives if other.setting == "kv_cache_memory_bytes"]
    assert raised.new == (32768 + CPU_BLOCK_TOKENS) * TOKEN_BYTES
    assert "257 blocks" in raised.why_not or raised.why_not == "a byte count you set"


def test_printed_need_beyond_the_layout_counts_and_is_reported(too_small):
    found = with_exact_need(
        too_small(
            kv_cache_needed_bytes=Fact("kv_cache_needed_bytes", GIB, slack=0.005 * GIB),
            max_num_batched_tokens=64,
        )
    )
    assert found.number("kv_cache_needed_bytes") == GIB
    assert "kv_cache_needed_blocks" not in found.facts
    assert "1.00 GiB as printed; the printed number counts" in found.unknown[0]


def test_printed_length_beyond_the_layout_counts_and_is_reported(too_small):
    found = with_exact_need(
        too_small(user={"kv_cache_memory_bytes": 1_000_000}, estimated_max_model_len_tokens=9999)
    )
    assert "kv_cache_needed_blocks" not in found.facts
    assert "9999 as printed; the printed number counts" in found.unknown[0]


def test_layout_gives_the_longest_request_without_an_estimate(too_small):
    """0.8.5 never prints it."""
    found = planned(too_small(user={"kv_cache_memory_bytes": 1_000_000}), "reduces-capacity")
    blocks = 1_000_000 // (CPU_BLOCK_TOKENS * TOKEN_BYTES)
    assert values(found)["max_model_len"] == (blocks - 1) * CPU_BLOCK_TOKENS


def test_too_many_blocks_are_reduced_before_the_length(too_small):
    """Two requests' worth of memory, but one block of it is the engine's own."""
    incident = too_small(
        user={
            "kv_cache_memory_bytes": 2 * 8192 * TOKEN_BYTES,
            "block_size": 8192,
            "max_model_len": 8192,
        },
        max_model_len_tokens=8192,
    )
    fits = planned(incident)
    assert "fitting_block_tokens" not in fits.facts
    found = planned(
        replace(
            incident,
            facts={
                **incident.facts,
                "kv_cache_memory_bytes": Fact("kv_cache_memory_bytes", 2 * 8192 * TOKEN_BYTES - 1),
            },
        )
    )
    assert found.causes[0].rule == "OG221"
    assert values(found)["block_size"] == 4096
    assert found.plan[0].setting == "block_size"


def test_blocks_shrink_to_nearly_the_longest_length(subtests, too_small):
    """As a log tells it: the length as it was asked for, or the model's own."""
    for asked in [
        {"max_model_len_tokens": -1},
        {"user": {"max_model_len": -1}},
        {"user": {"max_model_len": "auto"}},
        {"user": {"max_model_len": None}},  # what a printed -1 is read as
    ]:
        with subtests.test(asked=asked):
            pool = 20 * 1024 * TOKEN_BYTES
            user = {"kv_cache_memory_bytes": pool, "block_size": 16384, **asked.get("user", {})}
            incident = too_small(
                user=user, **{name: value for name, value in asked.items() if name != "user"}
            )
            found = planned(replace(incident, kind="kv_cache_none_left"))
            # 20,480 tokens less one block: 128 lose 0.6 %, 256 would lose 1.3 %.
            assert values(found)["block_size"] == 128
            assert found.causes[0].rule == "OG221"


def test_blocks_of_the_engine_s_own_size_are_left_alone(too_small):
    incident = too_small(user={"kv_cache_memory_bytes": 1_000_000})
    assert "fitting_block_tokens" not in planned(incident).facts


def test_windows_shrink_with_the_step_before_the_length_is_cut(too_small):
    """Four blocks hold a window of 128 and 256 tokens in flight; the step was 2048."""
    pool = 4 * CPU_BLOCK_TOKENS * TOKEN_BYTES
    incident = too_small(WINDOWED, {"kv_cache_memory_bytes": pool}, max_num_batched_tokens=2048)
    found = planned(incident)
    step = values(found)["max_num_batched_tokens"]
    # 127 + step tokens in blocks of 128, one more for where a window begins, and the engine's own.
    assert step == 128
    assert found.plan[0].setting == "max_num_batched_tokens"
    roomier = planned(
        too_small(
            WINDOWED,
            {"kv_cache_memory_bytes": 7 * CPU_BLOCK_TOKENS * TOKEN_BYTES},
            max_num_batched_tokens=2048,
        )
    )
    assert values(roomier)["max_num_batched_tokens"] == 512


def test_step_is_not_below_the_rows_or_unchunked_prompts(too_small):
    pool = 7 * CPU_BLOCK_TOKENS * TOKEN_BYTES
    rows = too_small(
        WINDOWED, {"kv_cache_memory_bytes": pool}, max_num_batched_tokens=2048, max_num_seqs=1024
    )
    assert "max_num_batched_tokens" not in values(planned(rows))
    whole = too_small(
        WINDOWED,
        {"kv_cache_memory_bytes": pool, "enable_chunked_prefill": False},
        max_num_batched_tokens=2048,
    )
    assert "max_num_batched_tokens" not in values(planned(whole))


def test_length_that_the_engine_fits_is_the_models_own(too_small):
    incident = too_small(user={"kv_cache_memory_bytes": 1000}, max_model_len_tokens=-1)
    found = with_exact_need(replace(incident, kind="kv_cache_none_left"))
    assert found.number("max_model_len_tokens") == 32768


def test_a_step_has_room_for_the_rows_that_vllm_fills_in(too_small):
    """256 for LLM on the CPU backend, 128 for a server; a log does not say which it was."""
    pool = 7 * CPU_BLOCK_TOKENS * TOKEN_BYTES
    facts = {"max_num_batched_tokens": 4096, "max_num_seqs": 0}
    assert (
        values(planned(too_small(WINDOWED, {"kv_cache_memory_bytes": pool}, **facts)))[
            "max_num_batched_tokens"
        ]
        == 512
    )
    four_blocks = {"kv_cache_memory_bytes": 4 * CPU_BLOCK_TOKENS * TOKEN_BYTES}
    assert "max_num_batched_tokens" not in values(
        planned(too_small(WINDOWED, four_blocks, **facts))
    )


def test_smaller_step_does_not_help_if_layers_keep_all_tokens(too_small):
    found = planned(
        too_small(user={"kv_cache_memory_bytes": 1_000_000}, max_num_batched_tokens=2048)
    )
    assert "max_num_batched_tokens" not in {patch.setting for patch in found.plan}


def test_a_number_of_blocks_is_raised_to_what_one_request_takes(too_small):
    found = planned(
        too_small(
            user={"num_gpu_blocks_override": 8},
            kv_cache_fitting_blocks=100_000,
            estimated_max_model_len_tokens=7 * CPU_BLOCK_TOKENS,
        )
    )
    assert found.causes[0].id == "kv_blocks_override"
    assert values(found) == {"num_gpu_blocks_override": 257}


def test_block_count_and_length_are_solved_together(
    too_small,
):
    incident = too_small(
        user={"num_gpu_blocks_override": 8},
        kv_cache_fitting_blocks=100,
        estimated_max_model_len_tokens=7 * CPU_BLOCK_TOKENS,
    )
    found = planned(incident, "reduces-capacity")
    group = {patch.setting: patch.new for patch in found.plan if patch.group is not None}
    assert group == {"num_gpu_blocks_override": 100, "max_model_len": 99 * CPU_BLOCK_TOKENS}


def test_model_in_the_hub_cache_is_read_without_the_hub(too_small, tmp_path, monkeypatch):
    incident = too_small(user={"kv_cache_memory_bytes": 1_000_000})
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(PLAIN))
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False
    )
    facts = {**incident.facts, "model": Fact("model", "org/name")}
    cached = with_exact_need(
        Incident("kv_cache_too_small_for_max_len", "boom", framework="vllm", facts=facts)
    )
    assert cached.number("kv_cache_needed_blocks") is not None


MIXED = PLAIN | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "sliding_window": 128,
    "sliding_window_pattern": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
}


def test_smaller_step_and_length_keep_more_than_length_alone(too_small):
    """Five layers of windows hold all tokens of a step of 8192: with 64 almost all of the pool is the full layer's."""
    incident = too_small(MIXED, {"kv_cache_memory_bytes": 4_000_000}, max_num_batched_tokens=8192)
    alone = with_exact_need(incident).number("estimated_max_model_len_tokens")
    found = planned(incident, "reduces-capacity")
    group = {patch.setting: patch.new for patch in found.plan if patch.group is not None}
    assert group.keys() == {"max_num_batched_tokens", "max_model_len"}
    assert group["max_model_len"] > 2 * alone
    assert 64 <= group["max_num_batched_tokens"] < 8192
    again = {**incident.facts, **{f"{name}{end}": Fact(name, group[name]) for name, end in TOLD}}
    smaller = with_exact_need(replace(incident, facts=again, settings={}))
    assert (
        smaller.number("kv_cache_needed_blocks") * smaller.number("kv_cache_block_bytes")
        <= 4_000_000
    )


def test_step_stays_if_a_smaller_one_adds_little_length(too_small):
    incident = too_small(MIXED, {"kv_cache_memory_bytes": 4_000_000}, max_num_batched_tokens=512)
    found = planned(incident, "reduces-capacity")
    assert [patch.setting for patch in found.plan if patch.applicable] == ["max_model_len"]


def test_larger_capacity_is_shown_first_even_with_permission(too_small):
    user = {"kv_cache_memory_bytes": 4_000_000, "max_model_len": 32768}
    incident = too_small(MIXED, user, max_num_batched_tokens=8192)
    found = planned(
        replace(
            incident, settings={n: SettingInForce(n, v, True, "printed") for n, v in user.items()}
        )
    )
    group = {patch.setting: patch.new for patch in found.plan if patch.group is not None}
    assert group.keys() == {"max_num_batched_tokens", "max_model_len"}
    assert not any(patch.applicable for patch in found.plan)


def test_a_floor_on_the_step_leaves_the_length_alone_the_remedy(too_small):
    incident = too_small(MIXED, {"kv_cache_memory_bytes": 4_000_000}, max_num_batched_tokens=8192)
    policy = make_policy("reduces-capacity", ["max_num_batched_tokens"])
    found = assess(incident, default_rules(), policy, local_models=True)
    assert {patch.setting for patch in found.plan if patch.applicable} == {"max_model_len"}


TOLD = (("max_num_batched_tokens", ""), ("max_model_len", "_tokens"))


WHISPER = {
    "model_type": "whisper",
    "d_model": 128,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "vocab_size": 1024,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "is_encoder_decoder": True,
    "torch_dtype": "float16",
}


def test_cross_attention_decoder_keeps_one_audio_per_step(too_small):
    """vLLM keeps a step's tokens of audio for each request; 59 blocks of 128 are left beside the decoder's own 4 and the engine's."""
    block = 2 * CPU_BLOCK_TOKENS * 2 * 128 * 2
    asked = {"max_num_batched_tokens": 32768, "max_num_seqs": 8, "max_model_len_tokens": 448}
    found = planned(
        too_small(
            WHISPER, {"kv_cache_memory_bytes": 64 * block, "enable_chunked_prefill": False}, **asked
        )
    )
    assert values(found)["max_num_batched_tokens"] == 59 * CPU_BLOCK_TOKENS
    tiny = planned(too_small(WHISPER, {"kv_cache_memory_bytes": 10 * block}, **asked))
    assert "max_num_batched_tokens" not in values(tiny)


def test_cross_attention_length_uses_vllms_default_step(subtests, too_small):
    for blocks, printed, longest in [
        (
            16,
            {"estimated_max_model_len_tokens": 128},
            384,
        ),  # 3 beside 12 of a step of 4 x 384 tokens: one audio is 1500
        (13, {}, None),  # 2 beside 8 of a step of 4 x 256 tokens, which holds no audio
    ]:
        with subtests.test(blocks=blocks, printed=printed, longest=longest):
            user = {"num_gpu_blocks_override": blocks}
            found = planned(
                too_small(WHISPER, user, max_num_seqs=4, max_model_len_tokens=448, **printed)
            )
            lengths = [
                other.new for other in found.alternatives if other.setting == "max_model_len"
            ]
            assert lengths == ([] if longest is None else [longest])


def test_foreign_layout_solves_nothing(too_small):
    """VLLM_PP_LAYER_PARTITION=1,5: the second stage has five of six layers, and the engine's own estimate is 9600 tokens."""
    config = PLAIN | {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    printed = {
        "kv_cache_needed_bytes": Fact("kv_cache_needed_bytes", 0.1 * GIB, slack=0.05 * GIB),
        "estimated_max_model_len_tokens": 9600,
        "max_model_len_tokens": 40960,
        "pipeline_parallel_size": 2,
        "device_total_bytes": 24 * GIB,
        "kv_cache_available_bytes": Fact("kv_cache_available_bytes", 0.02 * GIB, slack=0.005 * GIB),
        "kv_cache_is_fixed": True,
    }
    incident = too_small(
        {**config, "max_position_embeddings": 40960},
        {"kv_cache_memory_bytes": 24 << 20, "max_model_len": 40960},
        **printed,
    )
    found = planned(incident, "reduces-capacity")
    assert values(found) == {"max_model_len": 9600}


MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 512,
    "state_size": 128,
    "num_hidden_layers": 8,
    "num_heads": 16,
    "head_dim": 64,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "vocab_size": 2048,
    "architectures": ["Mamba2ForCausalLM"],
    "torch_dtype": "float16",
}


def test_recurrent_model_shows_its_states_not_its_length(subtests, too_small, monkeypatch):
    def check(states, cause, changes):
        monkeypatch.setattr(kv_cache, "multiplies_in_bfloat16", lambda: False)
        state = 8 * 2 * (16 * 64 * 128 + 3 * (16 * 64 + 2 * 128))
        user = {
            "kv_cache_memory_bytes": int(states * state),
            "max_model_len": 32768,
            "enable_prefix_caching": True,
        }
        found = planned(too_small(MAMBA2, user, prefix_caching=True, kv_cache_is_fixed=True))

        assert found.causes[0].id == cause
        assert values(found) == changes

    for states, cause, changes in [
        (
            3,
            "prefix_caching",
            {"enable_prefix_caching": False},
        ),  # beside the engine's own one is needed, with prefixes three
        (
            1.5,
            "kv_cache_budget",
            {},
        ),  # not one beside the engine's own, and a byte count of yours is never raised
    ]:
        with subtests.test(states=states, cause=cause, changes=changes):
            check(states, cause, changes)
