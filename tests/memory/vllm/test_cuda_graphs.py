"""CUDA graphs of a start: counted by the version's rules, weighed by hidden size, ranks and stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from oomguard.errors import SettingError
from oomguard.memory.model.shape import read_shape
from oomguard.memory.vllm.cuda_graphs import NO_GRAPHS, captured_graphs, cuda_graphs
from oomguard.memory.vllm.start import VllmSettings

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
SETTINGS = VllmSettings(Version("0.26"), 80 << 30, 0.9, max_num_seqs=256, max_num_batched_tokens=8192)


@pytest.mark.parametrize(
    ("version", "rows", "graphs"),
    [  # as the logs of those versions and vllm/config say
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
    ],
)
def test_a_start_captures_as_many_graphs_as_its_version_says(version, rows, graphs):
    assert captured_graphs(replace(SETTINGS, version=Version(version), max_num_seqs=rows)) == graphs


def test_no_size_is_captured_beyond_a_step():
    assert captured_graphs(replace(SETTINGS, max_num_batched_tokens=64)) < captured_graphs(SETTINGS)


@pytest.mark.parametrize("changes", [{"enforce_eager": True}, {"device": "cpu"}])
def test_without_graphs_there_are_none(changes):
    assert cuda_graphs(replace(SETTINGS, **changes), SHAPE) == NO_GRAPHS


def test_a_stage_of_a_pipeline_has_as_many_graphs_that_take_less_each():
    whole = cuda_graphs(SETTINGS, SHAPE)
    half = cuda_graphs(replace(SETTINGS, pipeline_parallel_size=2), SHAPE)

    assert whole.count == half.count == 86
    assert whole.bytes / 2 < half.bytes < whole.bytes
    assert whole.uncertainty_bytes > 0


def test_a_wider_model_takes_more_for_a_graph():
    assert cuda_graphs(SETTINGS, replace(SHAPE, hidden=8192)).bytes > cuda_graphs(SETTINGS, SHAPE).bytes


def test_what_the_engine_reserves_is_its_own_estimate_and_not_what_the_graphs_take():
    graphs = cuda_graphs(SETTINGS, SHAPE)
    assert graphs.estimated_bytes > graphs.bytes


def test_many_ranks_take_more_for_a_graph():
    assert cuda_graphs(replace(SETTINGS, tensor_parallel_size=8), SHAPE).bytes > cuda_graphs(SETTINGS, SHAPE).bytes


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [  # each size, and those up to max_num_seqs a second time
        ({"cudagraph_capture_sizes": "1 2 4 8"}, 8),
        ({"cudagraph_capture_sizes": "[1, 2, 4, 512]"}, 7),
        ({"cudagraph_capture_sizes": "8 8 9000"}, 2),
        ({"cudagraph_capture_sizes": "null"}, 86),
        ({"max_cudagraph_capture_size": 8}, 8),
        ({"max_cudagraph_capture_size": 1024}, 34 + 49 + 35),
        ({"max_cudagraph_capture_size": 8, "enforce_eager": False, "version": Version("0.9.2")}, 4),
    ],
)
def test_sizes_that_are_given_are_those_that_are_captured(changes, graphs):
    assert captured_graphs(replace(SETTINGS, **changes)) == graphs


@pytest.mark.parametrize("text", ["", "[]", "1 two", "0", "-1", "1.5"])
def test_sizes_that_are_no_counts_are_refused(text):
    with pytest.raises(SettingError, match="cudagraph_capture_sizes is"):
        captured_graphs(replace(SETTINGS, cudagraph_capture_sizes=text))
