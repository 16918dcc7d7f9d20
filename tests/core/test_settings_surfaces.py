"""The surfaces of settings: each engine's spelling, units and defaults, from its own data file."""

from __future__ import annotations

import pytest

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB
from oomguard.core.settings import (
    SETTINGS,
    as_env,
    as_flag,
    as_kwarg,
    default_value,
    device_size,
    engines,
    surface,
    surfaces,
)
from oomguard.engines.command import flags_in
from support.each import each


@each(
    ("name", "value", "flag", "kwarg", "env"),
    [
        ("max_model_len", 8192, "--max-model-len 8192", "max_model_len=8192", None),
        (
            "gpu_memory_utilization",
            0.85,
            "--gpu-memory-utilization 0.85",
            "gpu_memory_utilization=0.85",
            None,
        ),
        ("enforce_eager", True, "--enforce-eager", "enforce_eager=True", None),
        (
            "enable_prefix_caching",
            False,
            "--no-enable-prefix-caching",
            "enable_prefix_caching=False",
            None,
        ),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype fp8", "kv_cache_dtype='fp8'", None),
        ("batch_size", 4, None, "batch_size=4", None),
        ("num_speculative_tokens", 2, None, None, None),
        ("device", "1", None, None, "CUDA_VISIBLE_DEVICES=1"),
        (
            "allocator_options",
            "expandable_segments:True",
            None,
            None,
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        ("max_model_len", None, None, None, None),
    ],
)
def test_value_is_written_for_each_surface_of_the_setting(name, value, flag, kwarg, env):
    assert (as_flag(name, value, "any"), as_kwarg(name, value, "any"), as_env(name, value)) == (
        flag,
        kwarg,
        env,
    )


def test_a_flag_can_be_pasted_into_a_shell():
    import shlex

    assert shlex.split(as_flag("limit_mm_per_prompt", '{"image": 1}', "vllm")) == [
        "--limit-mm-per-prompt",
        '{"image": 1}',
    ]


@each(
    ("name", "value", "engine", "flag"),
    [
        ("max_num_seqs", 8, "vllm", "--max-num-seqs 8"),
        ("max_num_seqs", 8, "sglang", "--max-running-requests 8"),
        ("quantization", "fp8", "sglang", "--quantization fp8"),
        ("max_model_len", 8192, "tgi", "--max-model-len 8192"),
        ("max_model_len", 8192, "transformers", None),
        ("cpu_offload_bytes", 4 * 2**30, "vllm", "--cpu-offload-gb 4"),
    ],
)
def test_each_engine_spells_and_unknown_ones_use_the_first(name, value, engine, flag):
    assert as_flag(name, value, engine) == flag


def test_a_size_is_read_in_the_engine_s_unit_and_kept_in_bytes():
    own = surface("cpu_offload_bytes", "vllm")

    assert own.from_engine("cpu_offload_bytes", "1.5") == 1.5 * 2**30
    assert own.to_engine(own.from_engine("cpu_offload_bytes", "1.5")) == 1.5


@each("engine", engines())
def test_engine_spells_registered_settings_with_unique_flags(engine):
    flags = [flag for own in surfaces(engine).values() for flag in own.flags]

    assert set(surfaces(engine)) <= set(SETTINGS)
    assert len(flags) == len(set(flags))


@pytest.fixture
def renamed(monkeypatch):
    """An engine that renamed two flags in version 2."""
    rows = {
        "max_num_seqs": {
            "flags": ["--max-sequences", "-s"],
            "kwarg": "max_sequences",
            "spelled": [{"versions": "<2", "flags": ["--max-batch"], "kwarg": "max_batch"}],
        },
        "enforce_eager": {
            "flags": ["--eager"],
            "spelled": [{"versions": "<2", "flags": ["--no-graphs"]}],
        },
        "cpu_offload_bytes": {
            "flags": ["--offload-gib"],
            "unit_bytes": 2**30,
            "spelled": [{"versions": "<2", "flags": ["--offload-mib"], "unit_bytes": 2**20}],
        },
    }
    table = {"engine": "renamed", "settings": rows}
    monkeypatch.setattr("oomguard.core.settings._tables", lambda: {"renamed": table})
    surfaces.cache_clear()
    yield rows
    surfaces.cache_clear()


@each(
    ("version", "flag", "kwarg", "off", "offload"),
    [
        ("1.9.3", "--max-batch 8", "max_batch=8", "--no-no-graphs", "--offload-mib 2048"),
        ("2.0", "--max-sequences 8", "max_sequences=8", "--no-eager", "--offload-gib 2"),
        (None, "--max-sequences 8", "max_sequences=8", "--no-eager", "--offload-gib 2"),
    ],
)
def test_renamed_flag_has_the_spelling_of_the_engines_version(
    version, flag, kwarg, off, offload, renamed
):
    assert as_flag("max_num_seqs", 8, "renamed", version) == flag
    assert as_kwarg("max_num_seqs", 8, "renamed", version) == kwarg
    assert as_flag("enforce_eager", False, "renamed", version) == off
    assert as_flag("cpu_offload_bytes", 2**31, "renamed", version) == offload


def test_a_renamed_flag_is_found_in_a_command_under_both_names(renamed):
    argv = ("serve", "--max-batch=8", "-s", "9", "--no-graphs", "--eager")

    assert [(flag.name, flag.text, flag.on) for flag in flags_in(argv, "renamed")] == [
        ("max_num_seqs", "8", None),
        ("max_num_seqs", "9", None),
        ("enforce_eager", None, True),
        ("enforce_eager", None, True),
    ]


def test_a_key_that_nothing_reads_is_refused_in_a_data_file(renamed):
    renamed["max_num_seqs"]["version"] = "<2"

    with pytest.raises(SettingError, match="engines/renamed: max_num_seqs: unknown key version"):
        surfaces("renamed")


def test_flags_are_found_in_every_form():
    argv = (
        "vllm",
        "serve",
        "m",
        "-tp",
        "2",
        "--max_model_len=5",
        "--no-enforce-eager",
        "--enable-lora",
        "--block-size",
    )

    assert [(flag.name, flag.text, flag.on) for flag in flags_in(argv, "vllm")] == [
        ("tensor_parallel_size", "2", None),
        ("max_model_len", "5", None),
        ("enforce_eager", None, False),
        ("enable_lora", None, True),
        ("block_size", None, None),
    ]


@each(
    ("total_bytes", "name", "size"),
    [
        (24 * GIB, None, "small"),
        (80 * GIB, "H100", "large"),
        (80 * GIB, "NVIDIA A100-SXM4-80GB", "small"),
        (180 * GIB, None, "huge"),
    ],
)
def test_a_device_is_classed_as_vllm_classes_it(total_bytes, name, size):
    assert device_size("vllm", total_bytes, name) == size


def test_before_0_9_an_a100_was_a_large_device():
    assert device_size("vllm", 80 * GIB, "NVIDIA A100-SXM4-80GB", "0.8.5") == "large"
    assert device_size("vllm", 80 * GIB, "NVIDIA A100-SXM4-80GB", "0.9.2") == "small"


@each(
    ("name", "version", "size", "value"),
    [
        ("max_num_seqs", "0.8.5", "cpu", 256),
        ("max_num_seqs", "0.9.2", "cpu", 32),
        ("max_num_seqs", "0.10.0", "cpu", 128),
        ("max_num_batched_tokens", "0.27.1", "huge", 8192),
        ("max_num_batched_tokens", "0.28.0", "huge", 16384),
        (
            "max_num_batched_tokens",
            None,
            "huge",
            16384,
        ),  # the newest where the version is not known
    ],
)
def test_a_default_is_that_of_the_version(name, version, size, value):
    assert default_value(name, "vllm", version, device_size=size) == value


@each(
    ("name", "version", "flags"),
    [
        ("kv_cache_memory_bytes", "0.10.1.1", ()),
        ("kv_cache_memory_bytes", "0.10.2", ("--kv-cache-memory-bytes",)),
        ("kv_cache_memory_bytes", None, ("--kv-cache-memory-bytes",)),
        ("mamba_ssm_cache_dtype", "0.10.0", ()),
        ("cudagraph_capture_sizes", "0.11.0", ()),
        ("num_speculative_tokens", "0.8.5", ()),
        ("num_speculative_tokens", "0.8.2", ("--num-speculative-tokens",)),
    ],
)
def test_a_version_without_a_setting_has_no_flag_for_it(name, version, flags):
    assert surface(name, "vllm", version).flags == flags
    assert (as_kwarg(name, 1, "vllm", version) is None) is (
        not flags or name == "cudagraph_capture_sizes"
    )


def test_a_default_by_size_of_device_needs_the_size():
    assert default_value("max_num_seqs", "vllm", "0.32.0") is None
    assert default_value("max_num_seqs", "vllm", "0.32.0", device_size="large") == 1024


@each(
    ("version", "value"),
    [
        ("0.19.1", 0.90),
        ("0.8.5.post1", 0.90),
        ("0.19.2.dev3+gabc", 0.90),
        ("0.20.0", 0.92),
        ("0.32.0+cpu", 0.92),
        ("1.0", 0.92),
        ("unknown", None),
        ("", None),
        (None, None),
    ],
)
def test_the_default_utilization_follows_from_the_version(version, value):
    assert default_value("gpu_memory_utilization", "vllm", version) == value


def test_default_depending_on_more_than_the_version_is_unknown():
    assert default_value("max_model_len", "vllm", "0.32.0") is None
