"""The least peak of a start that compiles: an embedding table of one rank, where there is one among what is compiled."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.start import VllmSettings
from oomguard.estimate.start.start_budget import budget_start, compile_floor_bytes, pinned_bytes

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
SHAPE = read_shape(CONFIG)
SETTINGS = VllmSettings(
    Version("0.26"), 24 << 30, 0.9, max_num_seqs=256, max_num_batched_tokens=2048
)
TABLE_BYTES = 152064 * 3584 * 2


def test_the_floor_is_the_table_of_a_rank():
    alone, shared = (
        compile_floor_bytes(replace(SETTINGS, tensor_parallel_size=ranks), SHAPE)
        for ranks in (1, 2)
    )

    assert TABLE_BYTES < alone < TABLE_BYTES + (64 << 20)
    assert alone - shared == TABLE_BYTES // 2


def test_what_compiles_no_lookup_has_no_floor(subtests):
    for name, settings, config in [
        ("eager", replace(SETTINGS, enforce_eager=True), CONFIG),
        ("cpu", replace(SETTINGS, device="cpu"), CONFIG),
        ("before", replace(SETTINGS, version=Version("0.16")), CONFIG),
        ("rocm", replace(SETTINGS, gpu_name="MI300X"), CONFIG),
        ("images", SETTINGS, {"model_type": "llava", "text_config": CONFIG}),
    ]:
        with subtests.test(name):
            assert compile_floor_bytes(settings, read_shape(config)) == 0


def test_first_start_has_less_cache_than_a_second_and_says_so():
    model = read_model(ModelFiles("a 7B", "config.json", CONFIG, None))
    cold = budget_start(model, SETTINGS)

    assert cold.peak_activation_bytes == compile_floor_bytes(SETTINGS, SHAPE)
    assert 0 < cold.compile_bytes < cold.peak_activation_bytes
    assert any(
        line.startswith("activations: of a first start, which compiles")
        for line in cold.assumptions
    )


def test_a_peak_above_the_table_is_the_same_at_every_start():
    model = read_model(ModelFiles("a 7B", "config.json", CONFIG, None))

    assert (
        budget_start(
            model, replace(SETTINGS, max_num_seqs=1024, version=Version("0.19"))
        ).compile_bytes
        == 0
    )


def test_splitting_versions_may_count_the_freed_table_again(subtests):
    for name, version, tables in [
        ("0.26", "0.26", 0),
        ("0.27", "0.27", 1),
        ("0.30", "0.30.1", 1),
        ("0.31", "0.31", 0),
    ]:
        with subtests.test(name):
            settings = replace(SETTINGS, version=Version(version))

            assert pinned_bytes(settings, SHAPE) == tables * TABLE_BYTES
            assert pinned_bytes(replace(settings, enforce_eager=True), SHAPE) == 0


def test_table_that_may_count_twice_is_in_the_plan():
    model = read_model(ModelFiles("a 7B", "config.json", CONFIG, None))
    pinned, released = (
        budget_start(model, replace(SETTINGS, version=Version(v))) for v in ("0.30", "0.31")
    )

    assert pinned.peak_activation_bytes == released.peak_activation_bytes + TABLE_BYTES
    assert pinned.non_torch_bytes == released.non_torch_bytes
    assert pinned.compile_bytes == released.compile_bytes
    assert any(
        "some starts of vLLM 0.30 leave 1.02 GiB more" in line for line in pinned.assumptions
    )
    assert not any("some starts of" in line for line in released.assumptions)


def test_compile_memory_widens_the_range_upwards_only():
    model = read_model(ModelFiles("a 7B", "config.json", CONFIG, None))
    unknown, cold = (
        budget_start(model, replace(SETTINGS, compile_cache_entry=entry)) for entry in (None, False)
    )
    pinned = budget_start(model, replace(SETTINGS, version=Version("0.30")))

    assert unknown.uncertainty_bytes == cold.uncertainty_bytes
    assert unknown.uncertainty_above_bytes == cold.uncertainty_above_bytes + unknown.compile_bytes
    assert pinned.more_bytes == pinned.compile_bytes + TABLE_BYTES
