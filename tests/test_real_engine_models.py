"""The models that a real vLLM serves on the CPU: in bfloat16 its attention dies on machines that show AMX and do not enable it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REFUSED_IN_FLOAT16 = {
    "gemma2",
    "gemma3_text",
    "glm4",
}  # vllm/config/model.py _FLOAT16_NOT_SUPPORTED_MODELS, 0.32.0


def test_each_kv_benchmark_model_is_float16_if_vllm_takes_it():
    models = json.loads((ROOT / "benchmarks" / "data" / "kv_models.json").read_text())
    dtypes = {name: model["torch_dtype"] for name, model in models.items()}
    expected = {
        name: "float32" if model["model_type"] in REFUSED_IN_FLOAT16 else "float16"
        for name, model in models.items()
    }
    assert dtypes == expected


@pytest.mark.torch
def test_the_examples_tiny_model_is_float16(tmp_path):
    pytest.importorskip("transformers")
    runpy.run_path(str(ROOT / "examples" / "make_tiny_model.py"))["make"](str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
