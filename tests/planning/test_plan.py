"""``oomguard.plan``: a model and a GPU in, the budget and the nearest settings that fit out; a mistake says what was expected."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import oomguard
from oomguard.core.facts import GIB

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


@pytest.fixture(autouse=True)
def no_calibrations(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    # transformers hidden: the count is exact for this family, and nothing has to be imported
    monkeypatch.setattr("oomguard.estimate.model.parameters.is_transformers_here", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_start_is_planned_with_plain_types(model):
    found = oomguard.plan(model, gpu_memory="24GiB", engine_version="0.30", max_model_len=8192)

    assert isinstance(found, oomguard.StartPlan)
    assert found.fits
    assert found.changes == ()
    assert found.command == shlex.join(["vllm", "serve", str(model), "--max-model-len", "8192"])
    assert found.budget.settings.gpu_total_bytes == 24 * GIB
    assert found.budget.kv_cache_pool_bytes > GIB


def test_bytes_and_a_size_are_the_same_gpu(model):
    of_size = oomguard.plan(str(model), gpu_memory="24GiB", engine_version="0.30")
    assert of_size == oomguard.plan(str(model), gpu_memory=24 * GIB, engine_version="0.30")


def test_a_size_needs_a_unit(model, subtests):
    for size in ("24", 24, "24.0", " 24 "):
        for engine in ("vllm", "transformers"):
            with (
                subtests.test(size=size, engine=engine),
                pytest.raises(oomguard.SettingError, match="without a unit"),
            ):
                oomguard.plan(str(model), engine=engine, gpu_memory=size)


def test_what_does_not_fit_comes_with_the_patches_that_do(model):
    found = oomguard.plan(model, gpu_memory="24GiB", engine_version="0.30")

    assert not found.fits
    assert found.budget.reasons
    assert {patch.setting: patch.new for patch in found.changes}["max_model_len"] < 131072
    again = oomguard.plan(
        model,
        gpu_memory="24GiB",
        engine_version="0.30",
        **{patch.setting: patch.new for patch in found.changes},
    )
    assert again.fits


def test_where_no_setting_helps_it_says_what_would(model):
    found = oomguard.plan(model, gpu_memory="12GiB", engine_version="0.30")

    assert (found.command, found.changes) == (None, ())
    assert found.needed is not None
    assert found.needed.gpu_total_bytes > 16 * GIB


def test_a_call_of_generate_is_planned_too(model):
    found = oomguard.plan(
        model, engine="transformers", gpu_memory="24GiB", batch_size=8, prompt_tokens=2048
    )

    assert isinstance(found, oomguard.CallBudget)
    assert (found.batch_size, found.prompt_tokens, found.max_new_tokens) == (8, 2048, 256)
    assert found.fits


def test_sizes_and_json_are_taken_as_python_has_them(model):
    found = oomguard.plan(
        model,
        gpu_memory="24GiB",
        engine_version="0.30",
        max_model_len=4096,
        kv_cache_memory_bytes="1GiB",
        cpu_offload_bytes=GIB,
        limit_mm_per_prompt={"image": 0},
    )
    assert found.budget.kv_cache_pool_bytes == GIB
    assert found.budget.settings.limit_mm_per_prompt == '{"image": 0}'


def test_none_leaves_a_setting_to_the_engine(model):
    asked = {"gpu_memory": "24GiB", "engine_version": "0.30", "max_model_len": 4096}
    given = oomguard.plan(model, **asked, max_num_seqs=None, dtype=None)
    assert given == oomguard.plan(model, **asked)


def test_unknown_setting_is_refused_with_the_nearest_name(subtests, model):
    for settings, message, hint in [
        (
            {"max_model_length": 1},
            "unknown setting: max_model_length",
            "did you mean max_model_len?",
        ),
        ({"gpu_memroy": "1GiB"}, "unknown setting: gpu_memroy", "did you mean gpu_memory?"),
        ({"zzz": 1}, "unknown setting: zzz", "known settings: "),
        ({"max_model_len": "red"}, "max_model_len is 'red', not a whole number", None),
        ({"max_model_len": True}, "max_model_len is True, not a whole number", None),
        ({"max_model_len": 0}, "max_model_len is 0, less than 1", None),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5", None),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan", None),
        ({"enforce_eager": 1}, "enforce_eager is 1, neither True nor False", None),
        ({"dtype": 16}, "dtype is 16, not a text", None),
        ({"speculative_config": {"model": {1, 2}}}, "speculative_config is not valid JSON", None),
        ({"engine": "sglang"}, "engine is 'sglang'", "one of vllm, transformers"),
        ({"device": "tpu"}, "device is 'tpu'", "use cuda or cpu"),
        (
            {"memory_kind": "odd"},
            "memory_kind 'odd' is not known",
            "one of discrete, wsl2, unified",
        ),
        ({"engine": "transformers", "max_model_len": 1}, "unknown setting: max_model_len", None),
        ({"trace": True}, "unknown setting: trace", None),
    ]:
        with subtests.test(settings=settings, message=message, hint=hint):
            with pytest.raises(oomguard.SettingError) as error:
                oomguard.plan(model, **{"gpu_memory": "24GiB", **settings})
            assert str(error.value).startswith(message)
            assert hint is None or str(error.value.hint).startswith(hint)


def test_a_gpu_without_memory_is_refused(subtests, model):
    for memory in [0, -1, True, 1.5, "0"]:
        with subtests.test(memory=memory):
            with pytest.raises(oomguard.SettingError, match="gpu_memory must be ") as error:
                oomguard.plan(model, gpu_memory=memory)
            assert "24GiB" in error.value.hint


def test_gpu_name_next_to_a_size_sets_only_defaults(model):
    given = oomguard.plan(
        model, gpu_memory="80GiB", gpu_name="A100", engine_version="0.30.0"
    ).budget.settings
    unnamed = oomguard.plan(model, gpu_memory="80GiB", engine_version="0.30.0").budget.settings

    assert given.gpu_total_bytes == unnamed.gpu_total_bytes == 80 * 2**30
    assert (given.max_num_seqs, unnamed.max_num_seqs) == (256, 1024)


def test_a_gpu_of_this_machine_has_its_own_size_and_name(model):
    with pytest.raises(oomguard.UsageError, match="sets its size and name"):
        oomguard.plan(model, gpu=0, gpu_name="H100")


def test_without_a_gpu_here_it_says_how_to_name_one(model, monkeypatch):
    monkeypatch.setattr("oomguard.probe.nvml.devices", lambda: None)
    with pytest.raises(oomguard.UsageError, match="no GPU is visible on this machine") as error:
        oomguard.plan(model)
    assert "gpu_memory='24GiB'" in error.value.hint


def test_a_model_that_is_nowhere_says_what_was_expected():
    with pytest.raises(oomguard.InputError, match="nowhere: no such folder or file") as error:
        oomguard.plan("nowhere", gpu_memory="24GiB")
    assert "config.json" in error.value.hint
    assert error.value.hint in error.value.__notes__  # a traceback shows it


def test_what_is_no_name_of_a_model_is_refused(subtests):
    for model in [5, None, b"folder", {}]:
        with (
            subtests.test(model=model),
            pytest.raises(oomguard.UsageError, match="plan expects a model by its path or name"),
        ):
            oomguard.plan(model, gpu_memory="24GiB")
