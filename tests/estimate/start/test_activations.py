"""The activation peak against starts that vLLM printed: other versions, models and settings than the constants were fitted on."""

from __future__ import annotations

import json
from pathlib import Path

from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.activations import peak_activation

STARTS = json.loads(
    (Path(__file__).parents[3] / "benchmarks" / "data" / "published_starts.json").read_text()
)["starts"]
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
}


def peak(config, version, *, rows=256, tokens=2048):
    return peak_activation(read_shape(config), Version(version), rows=rows, step_tokens=tokens)


def test_published_starts_match_within_five_percent_on_average():
    errors = []
    for start in (start for start in STARTS if "used_for" not in start):
        asked = start["settings"]
        found = peak_activation(
            read_shape(start["config"]),
            Version(start["version"]),
            rows=asked["max_num_seqs"],
            step_tokens=asked["max_num_batched_tokens"],
            tensor_parallel_size=asked.get("tensor_parallel_size", 1),
        )
        errors.append(abs(found.bytes / GIB / start["printed_gib"]["peak_activation"] - 1))
    assert len(errors) == 14
    assert sum(errors) / len(errors) <= 0.05


def test_fewer_sequences_shrink_the_sampler_fewer_tokens_do_not():
    many, few = peak(LLAMA, "0.19", rows=1024), peak(LLAMA, "0.19", rows=128)
    assert many.bytes - many.step_bytes > 4 * max(1, few.bytes - few.step_bytes)
    assert peak(LLAMA, "0.19", rows=1024, tokens=1024).bytes == many.bytes


def test_experts_workspace_stays_next_to_the_sampler(subtests):
    for version, added in [("0.11", False), ("0.19", True)]:
        with subtests.test(version=version, added=added):
            found = peak(EXPERTS, version, rows=1024)
            assert found.workspace_bytes > 0
            assert (found.bytes == found.sampler_bytes + found.workspace_bytes) is added


def test_a_plain_profile_leaves_the_sampler_s_copy_unreserved():
    found = peak(LLAMA, "0.32", rows=1024, tokens=1024)
    assert found.sampling_bytes == found.sampler_bytes + 4 * 1024 * 128256
    assert found.sampling_bytes > found.bytes
    late = peak(LLAMA, "0.33", rows=1024, tokens=1024)
    assert late.sampling_bytes == late.sampler_bytes <= late.bytes


def test_the_experts_workspace_makes_no_room_for_sampling():
    found = peak(EXPERTS, "0.32", rows=1024, tokens=8192)
    assert found.sampling_bytes == found.sampler_bytes + 4 * 1024 * 128256 + found.workspace_bytes


def test_a_release_candidate_is_of_its_release():
    assert peak(LLAMA, "0.33.0rc1") == peak(LLAMA, "0.33")
    assert peak(LLAMA, "0.17.0rc1") == peak(LLAMA, "0.17")


def stepped(config, version, **changes):
    given = {"rows": 1, "step_tokens": 32768} | changes
    return peak_activation(read_shape(config), Version(version), **given).step_bytes


def test_eager_step_holds_its_input_and_all_reduce_another():
    one = 32768 * 4096 * 2
    assert stepped(LLAMA, "0.19", eager=True) - stepped(LLAMA, "0.19") == one
    ranks = {"tensor_parallel_size": 2}
    assert stepped(LLAMA, "0.19", eager=True, **ranks) - stepped(LLAMA, "0.19", **ranks) == 2 * one
    assert stepped(LLAMA, "0.7.3") == stepped(LLAMA, "0.7.3", eager=True)


def test_marlins_kernels_took_room_for_their_input():
    packed = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert stepped(packed, "0.7.3") - stepped(LLAMA, "0.7.3") == 32768 * 14336 * 2
    assert stepped(packed, "0.19") == stepped(LLAMA, "0.19")


def test_sparse_attention_makes_its_logits_while_profiled():
    sparse = {**LLAMA, "index_head_dim": 128, "index_topk": 2048}
    few = {"step_tokens": 64}
    assert (
        stepped(sparse, "0.19", **few)
        < stepped(sparse, "0.20", **few)
        == (512 << 20) + 2 * 64 * 4096 * 2
    )


def test_a_stage_keeps_what_it_is_handed_and_what_it_hands_on():
    def of_stage(*, first: bool, last: bool):
        shape = read_shape(LLAMA)
        ends = {"first_stage": first, "last_stage": last}
        return peak_activation(shape, Version("0.19"), rows=1024, step_tokens=8192, **ends)

    alone, first = of_stage(first=True, last=True), of_stage(first=True, last=False)
    middle, last = of_stage(first=False, last=False), of_stage(first=False, last=True)
    handed = 2 * 8192 * 4096 * 2

    steps = [stage.step_bytes - alone.step_bytes for stage in (first, middle, last)]
    assert steps == [handed, 2 * handed, handed]
    assert last.sampler_bytes - alone.sampler_bytes == handed
