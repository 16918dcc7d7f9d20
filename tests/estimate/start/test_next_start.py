"""What a plan says of the next start where two are possible: with the compile cache or without, with the weights in the page cache or not."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.model.files import ModelFiles, Parameter
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.parameters import count_parameters
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.start import VllmSettings
from oomguard.estimate.start.start_budget import budget_start

# A large table beside few requests: the peak of a start that compiles is the table.
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
MODEL = read_model(ModelFiles("model", "config.json", CONFIG, count_parameters(read_shape(CONFIG))))
SETTINGS = VllmSettings(Version("0.27"), 80 * GIB, 0.9, max_num_seqs=8, max_num_batched_tokens=2048)


def said(**changes):
    found = budget_start(MODEL, replace(SETTINGS, **changes))
    return found, "\n".join(found.assumptions)


def test_plan_gives_both_starts_if_the_compile_cache_is_hidden():
    found, lines = said()
    assert found.compile_bytes > 0
    assert "a second one leaves" in lines
    assert "the next" not in lines


def test_empty_compile_cache_means_a_first_start():
    found, lines = said(version=Version("0.26"), compile_cache_entry=False)
    assert "the next start is a first one" in lines
    hidden, _ = said(version=Version("0.26"))
    assert found.uncertainty_above_bytes < hidden.uncertainty_above_bytes


def test_an_entry_may_make_the_next_start_a_second_one():
    assert "the next start may be such a second one" in said(compile_cache_entry=True)[1]


def test_unified_memory_counts_page_cache_until_the_host_answers(subtests):
    for version, counted_there in [("0.11.0", True), ("0.11.2", False)]:
        with subtests.test(version=version, counted_there=counted_there):
            found, lines = said(version=Version(version), unified_memory=True)
            assert (found.page_cache_bytes == found.weights_bytes) is counted_there
            assert ("page cache" in lines) is counted_there
            assert found.uncertainty_bytes >= found.page_cache_bytes


def test_a_gpu_of_its_own_has_no_page_cache():
    assert said(version=Version("0.11.0"))[0].page_cache_bytes == 0


VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 14,
    "image_size": 336,
}


def test_an_encoder_that_no_prompt_may_use_is_not_loaded(subtests):
    for version, limit, loaded in [
        ("0.20", '{"image": 0, "video": 0}', False),
        ("0.20", None, True),
        ("0.14", '{"image": 0}', True),
    ]:
        with subtests.test(version=version, limit=limit, loaded=loaded):
            config = {"model_type": "llava", "text_config": CONFIG, "vision_config": VISION}
            tower = Parameter("vision_tower.layers.0.mlp.fc1.weight", (128, 64), 16384)
            text = tuple(count_parameters(read_shape(config)))
            both = read_model(ModelFiles("model", "config.json", config, (*text, tower)))
            asked = replace(SETTINGS, version=Version(version), limit_mm_per_prompt=limit)
            alone = replace(both, parameters=text)

            assert (
                budget_start(both, asked).weights_bytes > budget_start(alone, asked).weights_bytes
            ) is loaded
