"""What a plan keeps back of a pool, and where it keeps nothing back."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.constants import measured_groups, pool_range
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.start import Correction, VllmSettings
from oomguard.estimate.start.start_budget import budget_start, reserve_bytes

L4 = VllmSettings(
    version=Version("0.16.0"),
    gpu_total_bytes=22 * GIB,
    gpu_memory_utilization=0.9,
    gpu_name="NVIDIA L4",
    max_model_len=4096,
)
MODEL = read_model(
    ModelFiles(
        "model",
        "config.json",
        {
            "model_type": "llama",
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "torch_dtype": "bfloat16",
        },
        (),
    )
)


def test_unmeasured_version_or_gpu_keeps_back_a_share():
    assert ("0.16", "L4") not in measured_groups()
    assert reserve_bytes(L4, GIB) == round(pool_range("one_gpu")["reserve_ratio"] * GIB) > 0


def test_nothing_is_kept_back_if_a_like_start_was_measured(subtests):
    for told in [
        {"device": "cpu"},
        {"kv_cache_memory_bytes": GIB},
        {"correction": Correction("a start")},
        {"version": Version("0.19.1"), "gpu_name": "NVIDIA H100 80GB HBM3"},
    ]:
        with subtests.test(told=told):
            assert reserve_bytes(replace(L4, **told), GIB) == 0


def test_the_pool_is_smaller_by_it_and_the_plan_says_so():
    found = budget_start(MODEL, L4)
    parts = found.weights_bytes + found.peak_activation_bytes + found.non_torch_bytes
    assert found.requested_bytes - parts - found.kv_cache_pool_bytes == found.kept_back_bytes > 0
    (said,) = [line for line in found.assumptions if line.startswith("reserve: ")]
    assert "70% of such starts of other versions and GPUs" in said
