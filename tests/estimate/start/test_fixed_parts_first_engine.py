"""Which of vLLM's two engines makes a start, where a version has both."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from oomguard.estimate.start.fixed_parts import captured_graphs, is_first_engine
from oomguard.estimate.start.start import VllmSettings

SETTINGS = VllmSettings(
    Version("0.8.2"), 80 << 30, 0.9, max_num_seqs=256, max_num_batched_tokens=8192
)


def test_settings_and_the_gpu_decide_where_a_version_has_both(subtests):
    for version, changes, first in [
        ("0.7.3", {}, True),
        ("0.8.2", {}, False),
        ("0.8.2", {"enable_lora": True}, True),
        ("0.8.2", {"pipeline_parallel_size": 2}, True),
        ("0.8.5", {"enable_lora": True}, False),
        ("0.8.5", {"gpu_name": "V100"}, True),
        ("0.9.2", {"gpu_name": "T4"}, True),
        ("0.9.2", {"gpu_name": "A100"}, False),
        ("0.10.2", {"gpu_name": "T4"}, False),
    ]:
        with subtests.test(version=version, changes=changes, first=first):
            assert is_first_engine(replace(SETTINGS, version=Version(version), **changes)) is first


def test_the_first_engine_captures_its_own_sizes():
    assert captured_graphs(replace(SETTINGS, enable_lora=True)) == 35
    assert captured_graphs(SETTINGS) == 67
