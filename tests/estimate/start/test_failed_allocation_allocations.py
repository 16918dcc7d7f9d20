"""Which tensor a failed allocation was, by its bytes, and how sure that is."""

from __future__ import annotations

import itertools
import math
import random

from oomguard.core.facts import GIB, MIB
from oomguard.estimate.start.failed_allocation import (
    allocation_from_traceback,
    allocations,
    name_allocation,
)

# Llama 3.1 8B as a server runs it.
NUMBERS = {
    "dtype": 2,
    "vocabulary": 128256,
    "hidden": 4096,
    "queries": 4096,
    "keys": 1024,
    "fused_queries": 6144,
    "mlp": 14336,
    "double_mlp": 28672,
    "max_num_seqs": 256,
    "max_model_len": 32768,
    "max_num_batched_tokens": 8192,
    "ranks": 1,
}
ROUNDED = 0.005 * GIB


def named(tried: float, slack: float = 0.0, phase: str = "unknown", **more: int):
    return name_allocation(round(tried), slack, NUMBERS | more, phase)


def test_bytes_that_are_a_product_of_known_numbers_are_named(subtests):
    for tried, more, name, terms in [
        (8190 * 128256 * 2, {}, "prompt_logprobs", "8190 tokens x 128256 vocabulary x 2 bytes"),
        (4097 * 128256 * 4, {}, "prompt_logprobs", "4097 tokens x 128256 vocabulary x 4 bytes"),
        (
            1_000_000 * 32768 * 4,
            {"max_num_seqs": 1_000_000},
            "request_rows",
            "1000000 max_num_seqs x 32768 max_model_len x 4 bytes",
        ),
        (
            200 * 512 * 14336 * 2,
            {"enable_lora": 1, "max_loras": 200, "max_lora_rank": 512},
            "lora_slots",
            "200 max_loras x 512 max_lora_rank x 14336 mlp x 2 bytes",
        ),
        (
            14 * 577 * 16384 * 4,
            {
                "images": 14,
                "patches": 576,
                "patches_and_class": 577,
                "encoder_mlp": 16384,
                "encoder_width": 128,
            },
            "encoder_activations",
            "14 images x 577 patches_and_class x 16384 encoder_mlp x 4 bytes",
        ),
    ]:
        with subtests.test(tried=tried, more=more, name=name, terms=terms):
            found = named(tried, **more)
            assert found is not None
            assert (found.product.allocation.name, str(found.product)) == (name, terms)
            assert found.sure > 0.9


def test_partial_step_activations_are_named_while_working():
    found = named(7001 * 28672 * 2, phase="prefill")
    assert found is not None
    assert str(found.product) == "7001 tokens x 28672 double_mlp x 2 bytes"
    assert named(7001 * 28672 * 2, phase="profile_run") is None


def test_sampler_rows_of_fewer_requests_are_named_while_working():
    found = named(201 * 128256 * 8, phase="sampling_logits")
    assert found is not None
    assert found.product.allocation.name == "sampler_rows"
    assert str(found.product) == "201 tokens x 128256 vocabulary x 8 bytes"


def test_the_counts_that_penalties_need_are_the_sampler_s_rows():
    found = named(200 * 128257 * 8, phase="sampling_logits", vocabulary_and_itself=128257)
    assert found is not None
    assert found.product.allocation.name == "sampler_rows"
    assert "counts of tokens" in found.product.allocation.what


def test_no_prompt_has_more_tokens_than_the_longest_request():
    """4094 x 2 bytes or 2047 x 4: under a length of 2049 it was the second."""
    found = named(2047 * 128256 * 4, max_model_len=2049)
    assert str(found.product) == "2047 tokens x 128256 vocabulary x 4 bytes"


def test_a_vocabulary_is_also_tried_as_vllm_pads_it():
    found = named(101 * 50304 * 2, vocabulary=50257)
    assert found is not None
    assert found.product.numbers == {"tokens": 101, "vocabulary": 50304}


def test_a_rank_s_share_of_a_matrix_is_tried():
    found = named(8192 * 18944 // 4 * 2, phase="profile_run", ranks=4, mlp=18944)
    assert found is not None
    assert found.product.allocation.name == "step_activations"


def test_a_rounded_size_is_told_by_the_full_step_and_less_surely():
    found = named(round(8192 * 128256 * 4 / GIB, 2) * GIB, ROUNDED, phase="decode")
    assert found is not None
    assert found.product.allocation.name == "prompt_logprobs"
    exact = named(8192 * 128256 * 4, phase="decode")
    assert found.sure < exact.sure


def test_a_rounded_size_that_many_products_have_is_not_named():
    """20 MiB, with the allocator's granule of 2 MiB: something has that size."""
    assert named(20 * MIB, 0.005 * MIB) is None


def test_two_rows_of_equal_bytes_are_unsure_without_a_phase():
    tried = 256 * 128256 * 4  # as many rows of the sampler as prompt tokens
    assert named(tried).sure <= 0.5
    assert named(tried, phase="sampling_logits").product.allocation.name == "sampler_rows"
    assert named(tried, phase="sampling_logits").sure > 0.9
    assert named(tried, phase="prompt_logprobs").product.allocation.name == "prompt_logprobs"


def test_without_adapters_no_slots_are_named():
    assert named(200 * 512 * 14336 * 2, max_loras=200, max_lora_rank=512) is None


def test_a_round_size_is_named_where_the_engine_did_just_that():
    size, more = 512 * 262144 * 8, {"vocabulary": 262144, "max_num_seqs": 512}
    assert named(size, phase="sampling_logits", **more).product.allocation.name == "sampler_rows"
    assert named(size, **more) is None


def test_hardly_any_size_is_named_by_chance():
    chosen = random.Random(7)
    sizes = [round(2 ** chosen.uniform(27, 37)) for _ in range(2000)]
    assert sum(named(size) is not None for size in sizes) <= 2
    rounded = [(round(size / GIB, 2) * GIB, ROUNDED) for size in sizes if size > GIB]
    found = [one for size, slack in rounded if (one := named(size, slack)) is not None]
    assert len(found) <= 0.15 * len(rounded)


def test_every_row_has_levers_of_its_own_factors_and_a_source():
    for row in allocations():
        factors = {name for one in row.factors for name in one} | {
            *row.up_to,
            *itertools.chain(*row.follows.values()),
        }
        assert set(row.levers) <= factors, row.name
        assert "vllm/" in row.source
        assert row.phases
        assert all(lever["least"] >= 1 and lever["step"] >= 1 for lever in row.levers.values())


def test_the_bytes_of_a_product_are_the_product_of_its_terms():
    found = named(8190 * 128256 * 2)
    assert (
        math.prod(found.product.numbers.values()) * found.product.element_bytes == 8190 * 128256 * 2
    )


def test_set_blocks_are_told_by_a_layer_s_tensor_of_them():
    found = named(
        200_000 * 524288, phase="kv_cache_init", kv_blocks=200_000, kv_page=524288, kv_block=1048576
    )
    assert found is not None
    assert found.product.allocation.name == "kv_blocks"


def test_sampler_warm_up_shows_the_allocation_of_rounded_bytes():
    told = allocation_from_traceback(1.9 * GIB, NUMBERS, ("sampler_warmup_oom", "profile_run"))
    assert told is not None
    assert told.allocation.name == "sampler_rows"
    assert allocation_from_traceback(1.9 * GIB, NUMBERS, ("cuda_oom", "decode")) is None


def test_a_round_size_tells_nothing(subtests):
    """256 rows of 32768 tokens are 32 MiB, and so is much else: all their factors are powers of two."""
    for tried in [32 * MIB, 64 * MIB, 256 * MIB, GIB, 8192 * 28672 * 2]:
        with subtests.test(tried=tried):
            assert named(tried) is None
            assert named(tried, 0.005 * MIB) is None


def test_a_round_size_that_is_larger_than_tensors_are_is_told():
    found = named(65536 * 131072 * 4, max_num_seqs=65536, max_model_len=131072)
    assert found is not None
    assert found.product.allocation.name == "request_rows"


def test_what_is_only_on_the_host_is_not_named_for_a_device():
    rows = NUMBERS | {"max_num_seqs": 1_000_000}
    assert name_allocation(1_000_000 * 32768 * 4, 0.0, rows) is not None
    assert name_allocation(1_000_000 * 32768 * 4, 0.0, rows, on_host=False) is None
