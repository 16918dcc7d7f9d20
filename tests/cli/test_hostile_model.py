"""A model's folder is a stranger's: whatever its files hold, ``oomguard plan`` ends with a plan or with one message of ours."""

from __future__ import annotations

import copy
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.cli import main
from support.each import each

HERE = {"PYTHONPATH": str(Path(__file__).parents[2])}
PLAIN = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
MODELS: tuple[dict[str, Any], ...] = (
    {**PLAIN, "model_type": "llama"},
    {
        **PLAIN,
        "model_type": "llama",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head", "re:.*gate$", "model.*.mlp"],
            "config_groups": {
                "g": {
                    "weights": {"num_bits": 4, "group_size": 128, "symmetric": False, "type": "int"}
                }
            },
            "kv_cache_scheme": {"num_bits": 8},
        },
    },
    {
        **PLAIN,
        "model_type": "unknown_mixture",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 512,
    },
    {
        **PLAIN,
        "model_type": "deepseek_v32",
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": 32,
        "index_topk": 16,
        "index_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    {
        "model_type": "some_vision",
        "text_config": {**PLAIN, "model_type": "llama"},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "patch_size": 14,
            "image_size": [224, 224],
            "num_hidden_layers": 2,
            "spatial_merge_size": 2,
            "mlp_ratio": 4.0,
        },
        "downsample_ratio": 0.5,
        "max_dynamic_patch": 12,
        "image_grid_pinpoints": [[336, 672], [672, 336]],
    },
    {
        **PLAIN,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_limit": [0.0, float("inf")],
    },
    {
        **PLAIN,
        "model_type": "some_linear",
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    {
        **PLAIN,
        "model_type": "some_searched",
        "block_configs": [{"attention": {"n_heads_in_group": 2, "no_op": False}} for _ in range(4)],
        "per_layer_config": {"0": {"num_key_value_heads": 1, "head_dim": 32}},
    },
    {
        **PLAIN,
        "model_type": "mimo_v2",
        "head_dim": 16,
        "swa_head_dim": 16,
        "swa_num_key_value_heads": 1,
        "hybrid_layer_pattern": [0, 1, 0, 1],
    },
    {
        **PLAIN,
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
)
CALL = (
    "--engine",
    "transformers",
    "--batch-size",
    "2",
    "--prompt-tokens",
    "16",
    "--max-new-tokens",
    "4",
)
HOSTILE = (
    st.sampled_from(
        (
            None,
            True,
            False,
            0,
            -1,
            1,
            2,
            3,
            7,
            10**6,
            10**9,
            10**12,
            10**400,
            -(10**30),
            0.0,
            0.5,
            -1.5,
            1e308,
            float("nan"),
            float("inf"),
            "",
            "8",
            "banana",
            "\x1b[31m",
            "\ud800",
            "x" * 5000,
            [],
            [0],
            [[]],
            ["8"],
            [10**9] * 50,
            {},
            {"a": {"b": [1]}},
            {"dtype": "float16"},
            {"0": -1},
        )
    )
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value in an object, at every depth."""
    rows = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, inner in rows for place in ((*at, key), *places(inner, (*at, key)))]


@st.composite
def spoiled(draw: st.DrawFn) -> dict[str, Any]:
    """A valid configuration with some of its values replaced or gone."""
    config = copy.deepcopy(draw(st.sampled_from(MODELS)))
    for _ in range(draw(st.integers(1, 3))):
        *outer, last = draw(st.sampled_from(places(config) or [("model_type",)]))
        part = config
        for key in outer:
            part = part[key]
        if isinstance(part, dict) and draw(st.integers(0, 5)) == 0:
            del part[last]
        else:
            part[last] = copy.deepcopy(draw(HOSTILE))
    return config


def status(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, words), "--gpu-memory", "24GiB", "--engine-version", "0.32.0"])
    return int(ended.value.code or 0)


@given(config=spoiled(), call=st.booleans(), form=st.sampled_from(["terminal", "json"]))
@settings(max_examples=20)
def test_a_spoiled_configuration_gives_a_plan_or_one_message(config, call, form, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(config))
    began = time.process_time()
    # 125 is what an exception that is none of ours ends with
    assert status(path, "--format", form, *(CALL if call else ())) in {0, 2}, config
    assert time.process_time() - began < 20, config


def safetensors(path: Path, header: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)


ENTRY = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
ENTRIES = (
    st.fixed_dictionaries({"dtype": HOSTILE, "shape": st.just([2])})
    | st.fixed_dictionaries(
        {"dtype": st.just("BF16"), "shape": HOSTILE | st.lists(HOSTILE, max_size=4)}
    )
    | HOSTILE
)


@settings(max_examples=10)
@given(tensors=st.dictionaries(st.text(max_size=30), ENTRIES, max_size=3))
def test_a_spoiled_header_gives_a_plan_or_one_message(tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS[0]))
    safetensors(folder / "model.safetensors", json.dumps({"a": ENTRY, **tensors}).encode())
    assert status(folder) in {0, 2}


@settings(max_examples=10)
@given(size=HOSTILE, pixels=HOSTILE)
def test_a_spoiled_image_processor_gives_a_plan_or_one_message(size, pixels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    vision = {"hidden_size": 64, "intermediate_size": 128, "patch_size": 14, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**MODELS[4], "vision_config": vision}))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"longest_edge": size}, "max_pixels": pixels})
    )
    assert status(folder) in {0, 2}


@settings(max_examples=10)
@given(names=HOSTILE | st.dictionaries(st.text(max_size=5), HOSTILE, max_size=3))
def test_a_spoiled_index_gives_a_plan_or_one_message(names, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS[0]))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert status(folder) in {0, 2}


FILES = (
    "config.json",
    "preprocessor_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "is a FIFO": os.mkfifo,
    "is a folder": Path.mkdir,
    "is a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "is a FIFO") for name in FILES),
        ("config.json", "is a folder"),
        ("config.json", "is a device"),
    ],
)
def test_non_file_in_a_files_place_is_reported_at_once(name, kind, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[0]))
    (tmp_path / name).unlink(missing_ok=True)
    IN_ITS_PLACE[kind](tmp_path / name)

    assert status(tmp_path) == 2
    assert f"oomguard: {tmp_path / name}: {kind}, not a file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["is a FIFO", "is a device"])
def test_a_model_that_is_neither_folder_nor_file_is_told(kind, tmp_path, capsys):
    IN_ITS_PLACE[kind](tmp_path / "model")

    assert status(tmp_path / "model") == 2
    assert f"{kind}, not a file" in capsys.readouterr().err


@each(
    ("text", "said"),
    [
        (
            '{"vocab_size": 8, "vocab_size": 9}',
            "the key 'vocab_size' occurs twice in one object, with two values",
        ),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 levels deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested more than 64 levels deep"),
        ('{"a": ' + "9" * 5000 + "}", "has a number with thousands of digits"),
        ('{"a": "' + "x" * 16_000_000 + '"}', "is larger than 16000000 bytes"),
        ("[1]", "holds a list, not an object"),
        ("{'a': 1}", "not JSON"),
    ],
)
def test_configuration_that_is_no_object_is_named_with_its_file(text, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)

    assert status(tmp_path) == 2
    assert f"oomguard: {tmp_path}/config.json: {said}" in capsys.readouterr().err


@each(
    ("key", "value", "said"),
    [
        ("num_key_value_heads", 0, "num_key_value_heads is 0, not a count above zero"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0, not a count above zero"),
        ("num_hidden_layers", 1001, "but oomguard reads at most 1000"),
        ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000, not a count"),
        ("hidden_size", -64, "hidden_size is -64, not a count"),
        ("hidden_size", "64", "hidden_size is '64', not a count"),
        ("vocab_size", float("nan"), "vocab_size is nan, not a count"),
        ("vocab_size", [1000], "vocab_size is [1000], not a count"),
        (
            "torch_dtype",
            {"dtype": "float16"},
            "torch_dtype is {'dtype': 'float16'}, not the name of a data type",
        ),
        ("torch_dtype", 16, "torch_dtype is 16, not the name of a data type"),
        ("head_dim", 0, "head_dim is 0, not a count above zero"),
        ("model_type", ["llama"], "model_type is ['llama'], not text"),
    ],
)
def test_a_value_that_no_model_has_is_told_with_file_and_key(key, value, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS[0], key: value}))

    assert status(tmp_path) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"oomguard: {tmp_path}/config.json: {key} is ")
    assert said in told


def test_heads_without_a_width_are_told(tmp_path, capsys):
    config = next(config for config in MODELS if config["model_type"] == "mimo_v2")
    (tmp_path / "config.json").write_text(json.dumps({**config, "swa_head_dim": 0}))

    assert status(tmp_path) == 2
    assert "config.json: the head size of layer 1 is 0" in capsys.readouterr().err


@each("field", ["num_local_experts", "num_experts", "vision_config"])
def test_counts_that_would_never_end_are_not_built(field, tmp_path):
    absurd = {"depth": 10**9, "num_hidden_layers": 10**9} if field == "vision_config" else 10**9
    (tmp_path / "config.json").write_text(
        json.dumps({**MODELS[0], "model_type": "mixtral", field: absurd})
    )
    began = time.process_time()

    assert status(tmp_path) in {0, 2}
    assert time.process_time() - began < 20


def test_an_index_names_only_files_of_its_own_folder(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[0]))
    for name in ("../other.safetensors", "/dev/zero", 3, ["a"]):
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": name}})
        )

        assert status(tmp_path) == 2
        assert (
            f"weight_map names {name!r}, which is not a file of this folder"
            in capsys.readouterr().err
        )


LOG = """\
(APIServer pid=1) INFO 11-21 07:14:27 [api_utils.py:286] non-default args: {{'model': '{model}', 'max_model_len': 32768}}
(EngineCore pid=2) INFO 11-21 07:14:30 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='{model}', dtype=torch.bfloat16
(EngineCore pid=2) ERROR 11-21 07:14:52 [core.py:1510] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. \
GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


def test_a_run_goes_on_without_a_model_that_cannot_be_read(tmp_path):
    """The log names a local folder, and what lies there is a stranger's."""
    kind = "is a FIFO"
    (tmp_path / "model").mkdir()
    IN_ITS_PLACE[kind](tmp_path / "model" / "config.json")
    (tmp_path / "engine.log").write_text(LOG.format(model=tmp_path / "model"))
    words = [
        "run",
        "--dry-run",
        "--journal",
        str(tmp_path / "j"),
        "--",
        "sh",
        "-c",
        "cat engine.log; exit 3",
    ]
    command = [sys.executable, "-P", "-m", "oomguard", *words]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **HERE},
    )

    assert ran.returncode == 3, ran.stderr
    assert "CUDA out of memory: 2.00 GiB requested" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_data_type_that_nobody_knows_is_an_assumption(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS[0], "torch_dtype": "float7"}))

    assert status(tmp_path) == 0
    assert "unknown dtype 'float7' in the configuration: assumed half precision" in " ".join(
        capsys.readouterr().out.split()
    )
