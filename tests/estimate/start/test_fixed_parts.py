"""CUDA graphs of a start: counted by the version's rules, weighed by the pool, ranks, stages, experts and the driver."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.fixed_parts import (
    NO_GRAPHS,
    captured_graphs,
    captured_sizes_of,
    cuda_graphs,
    graph_counts,
    old_driver_note,
)
from oomguard.estimate.start.start import VllmSettings

SHAPE = read_shape(
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
)
SETTINGS = VllmSettings(
    Version("0.26"), 80 << 30, 0.9, max_num_seqs=256, max_num_batched_tokens=8192
)


def test_a_start_captures_as_many_graphs_as_its_version_says(subtests):
    for version, rows, graphs in [  # as the logs of those versions and vllm/config say
        ("0.7.2", 128, 19),
        ("0.7.2", 256, 35),
        ("0.7.2", 1024, 131),
        ("0.9.2", 128, 67),
        ("0.9.2", 1024, 67),
        ("0.10.2", 128, 35),
        ("0.10.2", 256, 67),
        ("0.11.0", 256, 102),
        ("0.11.0", 1024, 134),
        ("0.12.0", 128, 54),
        ("0.19.0", 256, 86),
        ("0.33.0", 1024, 102),
        ("0.18.1", 32, 18),
        ("0.19.0", 100, 45),
    ]:
        with subtests.test(version=version, rows=rows, graphs=graphs):
            assert (
                captured_graphs(replace(SETTINGS, version=Version(version), max_num_seqs=rows))
                == graphs
            )


def test_no_size_is_captured_beyond_a_step():
    assert captured_graphs(replace(SETTINGS, max_num_batched_tokens=64)) < captured_graphs(SETTINGS)


def test_without_graphs_there_are_none(subtests):
    for changes in [{"enforce_eager": True}, {"device": "cpu"}]:
        with subtests.test(changes=changes):
            assert cuda_graphs(replace(SETTINGS, **changes), SHAPE) == NO_GRAPHS


def test_pipeline_stage_has_all_graphs_with_fewer_all_reduces():
    whole = cuda_graphs(replace(SETTINGS, tensor_parallel_size=2), SHAPE)
    half = cuda_graphs(replace(SETTINGS, tensor_parallel_size=2, pipeline_parallel_size=2), SHAPE)

    assert whole.count == half.count == 86
    assert whole.bytes / 2 < half.bytes < whole.bytes
    assert whole.uncertainty_bytes > 0


def test_a_wider_model_takes_more_for_a_graph():
    assert (
        cuda_graphs(SETTINGS, replace(SHAPE, hidden=8192)).bytes
        > cuda_graphs(SETTINGS, SHAPE).bytes
    )


def test_engines_graph_reserve_is_its_estimate():
    graphs = cuda_graphs(SETTINGS, SHAPE)
    assert graphs.estimated_bytes > graphs.bytes


def test_all_reduces_without_links_take_more_for_a_graph(subtests):
    for (
        changes,
        captured,
    ) in [  # NCCL's all-reduces are captured without links only, and not where vLLM has its own
        ({"gpu_name": "H200"}, False),
        ({"gpu_name": "H200", "disable_custom_all_reduce": True}, False),
        ({"gpu_name": "L40S", "tensor_parallel_size": 2}, False),
        ({"gpu_name": "L40S"}, True),
        ({"gpu_name": "L40S", "tensor_parallel_size": 2, "disable_custom_all_reduce": True}, True),
        ({"gpu_name": "RTX 4090", "tensor_parallel_size": 2}, True),
    ]:
        with subtests.test(changes=changes, captured=captured):
            start = replace(SETTINGS, **{"tensor_parallel_size": 8, **changes})
            alone = cuda_graphs(replace(start, tensor_parallel_size=1), SHAPE)
            assert (cuda_graphs(start, SHAPE).bytes > alone.bytes) is captured


def test_indexer_has_logits_of_the_longest_request_in_both_pools():
    """Graphs of GLM-5.2 took 4.13 GiB on four B200, 3.13 of them logits: 512 tokens of 819,200 keys, four bytes each, twice."""
    sparse = replace(SHAPE, config=SHAPE.config | {"index_head_dim": 128, "index_topk": 2048})
    start = replace(SETTINGS, max_num_seqs=1024, max_model_len=819_200)
    assert (
        cuda_graphs(start, sparse).bytes - cuda_graphs(start, SHAPE).bytes == 2 * 512 * 819_200 * 4
    )


def test_bitsandbytes_weights_are_unpacked_in_both_pools():
    """0.58 GiB that graphs of Llama-3.1-8B took on a T4 with 0.7.2; 0.44 of them are its widest projection, twice."""
    first = replace(SETTINGS, version=Version("0.7.2"))
    unpacked = (
        cuda_graphs(replace(first, quantization="bitsandbytes"), SHAPE).bytes
        - cuda_graphs(first, SHAPE).bytes
    )
    assert unpacked == 2 * 2 * 14336 * 4096 * 2


def test_fp4_experts_have_many_scales_on_unlinked_blackwell():
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 704}
    fp4 = (
        SHAPE.config
        | experts
        | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    )
    counts = {
        gpu: graph_counts(replace(SETTINGS, gpu_name=gpu), replace(SHAPE, config=fp4, hidden=2816))
        for gpu in ("RTX 5090", "B200", "L40S")
    }
    assert counts["RTX 5090"]["copies_of_fp4_scales"] == 163_840 * 8 * (44 + 11) * 4
    assert counts["B200"]["copies_of_fp4_scales"] == counts["L40S"]["copies_of_fp4_scales"] == 0


def test_graphs_of_blackwell_take_less():
    less, more = (
        cuda_graphs(replace(SETTINGS, gpu_name=gpu), SHAPE).bytes
        for gpu in ("RTX PRO 6000", "L40S")
    )
    assert less < more
    shared = replace(SETTINGS, gpu_name="GB10", unified_memory=True)
    assert cuda_graphs(shared, SHAPE).bytes == more


def test_sizes_that_are_given_are_those_that_are_captured(subtests):
    for changes, graphs in [  # each size, and those up to max_num_seqs a second time
        ({"cudagraph_capture_sizes": "1 2 4 8"}, 8),
        ({"cudagraph_capture_sizes": "[1, 2, 4, 512]"}, 7),
        ({"cudagraph_capture_sizes": "8 8 9000"}, 2),
        ({"cudagraph_capture_sizes": "null"}, 86),
        ({"max_cudagraph_capture_size": 8}, 8),
        ({"max_cudagraph_capture_size": 1024}, 34 + 49 + 35),
        ({"max_cudagraph_capture_size": 8, "enforce_eager": False, "version": Version("0.9.2")}, 4),
    ]:
        with subtests.test(changes=changes, graphs=graphs):
            assert captured_graphs(replace(SETTINGS, **changes)) == graphs


def test_sizes_that_are_no_counts_are_refused(subtests):
    for text in ["", "[]", "1 two", "0", "-1", "1.5"]:
        with (
            subtests.test(text=text),
            pytest.raises(SettingError, match="cudagraph_capture_sizes must be"),
        ):
            captured_graphs(replace(SETTINGS, cudagraph_capture_sizes=text))


def test_adapters_have_graphs_of_their_own_since_0_12():
    assert captured_graphs(replace(SETTINGS, enable_lora=True)) == 2 * captured_graphs(SETTINGS)
    older = replace(SETTINGS, version=Version("0.11.0"))
    assert captured_graphs(replace(older, enable_lora=True)) == captured_graphs(older)


def test_drafts_are_captured_with_the_tokens_of_whole_requests(subtests):
    for (
        version,
        rows,
        drafted,
        graphs,
    ) in [  # multiples of a request's tokens, up to twice those of all requests; those of whole decode steps a second time
        ("0.27.0", 8, 1, 6 + 4),
        ("0.27.0", 1, 2, 1 + 1),
        ("0.11.0", 256, 2, 67 + 67 - 2),
    ]:
        with subtests.test(version=version, rows=rows, drafted=drafted, graphs=graphs):
            drafts = f'{{"method": "mtp", "num_speculative_tokens": {drafted}}}'
            start = replace(
                SETTINGS, version=Version(version), max_num_seqs=rows, speculative_config=drafts
            )
            assert captured_graphs(start) == graphs


@given(st.integers(1, 512), st.integers(0, 7))
def test_every_captured_draft_size_is_whole_requests(rows, drafted):
    config = f'{{"method": "mtp", "num_speculative_tokens": {drafted}}}' if drafted else None
    start = replace(SETTINGS, max_num_seqs=rows, speculative_config=config)
    sizes = captured_sizes_of(start)
    assert sizes
    assert all(size % (1 + drafted) == 0 for size in sizes)


def test_driver_before_cuda_12_4_needs_several_times_as_much(subtests):
    for driver in ["535.129.03", "545"]:
        with subtests.test(driver=driver):
            plain, old = (
                cuda_graphs(replace(SETTINGS, driver_version=d), SHAPE) for d in ("550.54", driver)
            )
            assert plain == cuda_graphs(SETTINGS, SHAPE)
            assert 3.3 < old.bytes / plain.bytes < 3.4


def test_a_driver_that_is_no_version_is_refused():
    with pytest.raises(SettingError, match="driver_version must be a version, got 'new'"):
        cuda_graphs(replace(SETTINGS, driver_version="new"), SHAPE)


def test_plan_mentions_an_old_driver_if_one_is_possible(subtests):
    for driver, version, said in [
        ("535", "0.19.0", "driver 535 needs 3.35 times"),
        (None, "0.19.0", "an older one needs 3.35 times"),
        ("580", "0.19.0", None),
        (None, "0.26.0", None),
    ]:
        with subtests.test(driver=driver, version=version, said=said):
            found = old_driver_note(
                replace(SETTINGS, driver_version=driver, version=Version(version)), 1
            )
            assert found is None if said is None else found is not None and said in found


def test_quantized_experts_need_most_at_the_first_small_batch():
    small = replace(SETTINGS, cudagraph_capture_sizes="1 2")
    config = {**SHAPE.config, "model_type": "qwen3_moe", "num_experts": 128}
    experts = read_shape(config)
    quantized = read_shape({**config, "quantization_config": {"quant_method": "fp8"}})
    dense, plain, most = (cuda_graphs(small, shape).bytes for shape in (SHAPE, experts, quantized))
    assert plain - dense > 50 << 20
    assert plain < most
