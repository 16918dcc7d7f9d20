"""The host's memory of a planned start, against published measurements of vLLM and torch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from packaging.version import Version

import oomguard
from oomguard.cli.plan import command
from oomguard.core.errors import SettingError
from oomguard.planning.start import plan_host, read_start_request, rounded_up

GIB = 1 << 30
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def test_published_sizes_of_an_offloaded_kv_cache(model):
    """vllm#48436 (resident memory of both workers) and vllm#53042 (shared memory, then the cgroup)."""
    start = read_start_request(str(model), gpu_memory="80GiB", max_model_len=4096)
    for version, ranks, groups, asked, parts, published in (
        ("0.25.0", 2, 1, 64, ("offloaded KV cache",), 64),
        ("0.25.0", 2, 1, 80, ("offloaded KV cache",), 128),
        ("0.26.0", 2, 1, 80, ("offloaded KV cache",), 80),
        ("0.26.0", 4, 4, 400, ("offloaded KV cache",), 769),
        ("0.26.0", 4, 4, 200, ("offloaded KV cache",), 385),
        ("0.26.0", 4, 4, 200, ("offloaded KV cache", "processes"), 443.5),
    ):
        settings = replace(start.settings, version=Version(version), tensor_parallel_size=ranks)
        host = plan_host(
            start.model, settings, kv_offloading_bytes=asked * GIB, layer_groups=groups
        )
        found = sum(part.bytes for part in host.parts if part.name in parts) / GIB
        assert abs(found / published - 1) < 0.15, (version, asked, found)


def test_a_pinned_block_takes_a_power_of_two():
    """vllm#50094 and sglang#39021, in GiB."""
    for asked, published in ((6, 8), (10, 16), (12, 16), (2.25, 4.008), (1.125, 2), (1.2, 2.002)):
        assert abs(rounded_up(round(asked * GIB)) / GIB / published - 1) < 0.01


def test_offloaded_weights_take_more_than_asked_for(model):
    start = read_start_request(str(model), gpu_memory="80GiB", cpu_offload_bytes=GIB)
    (_, weights) = plan_host(start.model, start.settings).parts
    assert GIB < weights.bytes < 3 * GIB


def test_a_host_that_cannot_hold_it_does_not_fit(model):
    words = [
        str(model), "--gpu-memory", "80GiB", "--max-model-len", "4096", "--format", "json",
        "--kv-offloading-size", "80", "--exit-code",
    ]  # fmt: skip
    for limit, status in (("64GiB", 1), ("256GiB", 0)):
        ran = CliRunner().invoke(command, [*words, "--host-memory", limit])
        record = json.loads(ran.stdout)
        assert (record["fits"], record["host"]["fits"]) == (not status, not status)
        assert record["host"]["need_bytes"] > 80 * GIB
        assert "--kv-offloading-size 80" in record["command"]


def test_python_asks_about_the_host_like_the_command(model):
    asked = {"gpu_memory": "80GiB", "max_model_len": 4096, "kv_offloading_size": 80}
    for limit, fits in (("64GiB", False), (256 * GIB, True), (None, True)):
        planned = oomguard.plan(str(model), host_memory=limit, **asked)
        assert planned.fits == fits
        assert planned.host.need_bytes > 80 * GIB
    assert oomguard.plan(str(model), gpu_memory="80GiB").host is None
    with pytest.raises(SettingError, match="kv_offloading_size must be a finite number"):
        oomguard.plan(str(model), gpu_memory="80GiB", kv_offloading_size=float("nan"))
