"""By how much a planned pool may be off: wider for what is known less well."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.start import VllmSettings
from oomguard.estimate.start.start_budget import kind_of_start, widened_bytes

DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
SETTINGS = VllmSettings(Version("0.26"), 24 << 30, 0.9)


def test_a_dense_model_of_text_on_a_gpu_of_its_own_is_known_best(subtests):
    for config, changes, kind in [
        (DENSE, {}, "plain"),
        (DENSE, {"tensor_parallel_size": 2}, "several"),
        (DENSE, {"pipeline_parallel_size": 2}, "several"),
        (DENSE, {"unified_memory": True}, "other"),
        ({**DENSE, "model_type": "mixtral", "num_local_experts": 8}, {}, "other"),
        ({**DENSE, "model_type": "mamba2"}, {}, "other"),
        ({"model_type": "llava", "text_config": DENSE}, {}, "other"),
    ]:
        with subtests.test(config=config, changes=changes, kind=kind):
            assert kind_of_start(read_shape(config), replace(SETTINGS, **changes)) == kind


def test_range_is_wider_for_larger_devices_and_unsure_parts():
    shape = read_shape(DENSE)
    plain = widened_bytes(shape, SETTINGS, [1 << 28])

    assert (
        widened_bytes(shape, replace(SETTINGS, gpu_total_bytes=80 << 30), [1 << 28])
        > plain
        > 1 << 28
    )
    assert widened_bytes(shape, SETTINGS, [1 << 28, 1 << 30]) > plain
