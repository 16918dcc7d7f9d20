from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import oomguard
from oomguard.engines.ray.engine_arguments import arguments_of, ray_runtime_env

LOG = Path(__file__).parents[3] / "examples" / "logs" / "vllm_serve_kv_cache.log"


@dataclass
class Config:
    engine_kwargs: dict[str, Any] = field(
        default_factory=lambda: {"max_model_len": 32768, "dtype": "half"}
    )


def test_diagnosis_becomes_the_first_arguments_of_its_plan():
    assert (
        arguments_of(oomguard.diagnose(LOG)) == {}
    )  # the user set it: the policy does not permit it
    permitted = oomguard.Policy(allow=oomguard.Effect.REDUCES_CAPACITY)
    assert arguments_of(oomguard.diagnose(LOG, policy=permitted)) == {"max_model_len": 1792}


def test_a_diagnosis_without_an_incident_changes_nothing():
    assert arguments_of(oomguard.diagnose("all is well\n")) == {}


def test_a_config_is_copied_and_keeps_its_other_arguments():
    config = Config()
    patched = oomguard.ray_patched(config, {"max_model_len": 4096})
    assert patched.engine_kwargs == {"max_model_len": 4096, "dtype": "half"}
    assert config.engine_kwargs["max_model_len"] == 32768


def test_mapping_in_a_configuration_file_is_patched_in_place():
    file = {"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"max_num_seqs": 256}}
    assert oomguard.ray_patched(file, {"max_num_seqs": 8})["engine_kwargs"] == {"max_num_seqs": 8}
    assert oomguard.ray_patched({"max_num_seqs": 256}, {"max_num_seqs": 8}) == {"max_num_seqs": 8}
    assert file["engine_kwargs"] == {"max_num_seqs": 256}


def serve_file(*engines: Any) -> dict[str, Any]:
    return {
        "http_options": {"port": 8000},
        "applications": [{"name": "a", "args": {"llm_configs": list(engines)}}],
    }


M1 = {
    "model_loading_config": {"model_id": "m1"},
    "engine_kwargs": {"max_model_len": 32768, "seed": 1},
}
M2 = {"model_loading_config": {"model_id": "m2"}}


def test_whole_serve_file_is_patched_at_its_one_engine():
    file = serve_file(M1)
    patched = oomguard.ray_patched(file, {"max_model_len": 1792})
    assert patched == serve_file({**M1, "engine_kwargs": {"max_model_len": 1792, "seed": 1}})
    assert file == serve_file(M1)
    args = file["applications"][0]["args"]
    assert oomguard.ray_patched(args, {"max_model_len": 1792}) == patched["applications"][0]["args"]


def test_serve_file_of_several_engines_is_refused_with_names():
    with pytest.raises(
        oomguard.SettingError, match=r"2 engines \(m1, m2\), but a patch changes only one"
    ) as caught:
        oomguard.ray_patched(serve_file(M1, M2), {"max_model_len": 1792})
    assert "['llm_configs'][0]" in str(caught.value.hint)
    assert oomguard.ray_patched(serve_file(M1, M2), {}) == serve_file(M1, M2)


def test_a_serve_file_without_an_engine_is_refused(subtests):
    for file in [
        {"applications": []},
        {"applications": None},
        {"applications": [{"args": None}, 1]},
        {"llm_configs": []},
    ]:
        with (
            subtests.test(file=file),
            pytest.raises(oomguard.SettingError, match="no engine in llm_configs"),
        ):
            oomguard.ray_patched(file, {"max_model_len": 1792})


def test_a_configuration_without_engine_arguments_gets_them(subtests):
    for config in [{"model_source": "m"}, M2, {"model_source": "m", "engine_kwargs": None}]:
        with subtests.test(config=config):
            patched = oomguard.ray_patched(config, {"max_model_len": 1792})
            assert patched == {**config, "engine_kwargs": {"max_model_len": 1792}}


def test_what_is_no_configuration_is_a_clear_error(subtests):
    for name, config in [
        ("number", 42),
        ("none", None),
        ("text", "m"),
        ("list", [M1]),
        ("arguments", {"engine_kwargs": [1]}),
        ("path", serve_file("./one.yaml")),
    ]:
        with subtests.test(name), pytest.raises(oomguard.SettingError, match="cannot patch this"):
            oomguard.ray_patched(config, {"max_model_len": 1792})


def test_what_are_no_patches_is_a_clear_error(subtests):
    for name, patches in [
        ("text", "x"),
        ("number", 42),
        ("none", None),
        ("pairs", [("max_model_len", 8)]),
    ]:
        with (
            subtests.test(name),
            pytest.raises(oomguard.SettingError, match="patches must be a diagnosis"),
        ):
            oomguard.ray_patched(Config(), patches)


def test_values_are_in_the_engines_own_units():
    assert arguments_of({"kv_cache_memory_bytes": 2 << 30}) == {"kv_cache_memory_bytes": 2 << 30}
    assert arguments_of({"cpu_offload_bytes": 2 << 30}) == {"cpu_offload_gb": 2}


def test_an_unknown_setting_and_one_without_an_argument_are_told():
    with pytest.raises(oomguard.SettingError):
        arguments_of({"no_such_setting": 1})
    with pytest.raises(oomguard.SettingError, match="has no argument"):
        arguments_of({"batch_size": 1})


def test_ray_datas_own_configuration_takes_the_patch():
    pytest.importorskip("ray")
    code = """
import json, oomguard
from ray.data.llm import vLLMEngineProcessorConfig
config = vLLMEngineProcessorConfig(model_source="m", engine_kwargs={"max_model_len": 32768, "dtype": "half"}, batch_size=7)
patched = oomguard.ray_patched(config, {"max_model_len": 4096})
print(json.dumps([type(patched).__name__, patched.engine_kwargs, patched.batch_size, config.engine_kwargs["max_model_len"]]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, arguments, batch_size, before = json.loads(ran.stdout.splitlines()[-1])
    assert (name, batch_size, before) == ("vLLMEngineProcessorConfig", 7, 32768)
    assert (arguments["max_model_len"], arguments["dtype"]) == (4096, "half")


def test_environment_keeps_the_users_values_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    base = {"pip": ["x"], "env_vars": {"A": "b", "OOMGUARD_DISABLE": "0"}}
    made = ray_runtime_env({"max_model_len": 8}, base=base, ship=False)
    assert made["pip"] == ["x"]
    assert made["env_vars"]["A"] == "b"
    assert made["env_vars"]["OOMGUARD_DISABLE"] == "0"
    assert json.loads(made["env_vars"]["OOMGUARD_VLLM_OVERRIDES"]) == {"max_model_len": 8}
    assert "py_modules" not in made
    assert "OOMGUARD_VLLM_OVERRIDES" not in base["env_vars"]


def test_a_list_of_allowed_plugins_is_joined_and_none_is_made(subtests):
    for allowed, then in [
        ("lora,other", "lora,other,oomguard"),
        ("oomguard", "oomguard"),
        ("", "oomguard"),
    ]:
        with subtests.test(allowed=allowed, then=then):
            assert (
                ray_runtime_env(base={"env_vars": {"VLLM_PLUGINS": allowed}}, ship=False)[
                    "env_vars"
                ]["VLLM_PLUGINS"]
                == then
            )
            assert "VLLM_PLUGINS" not in ray_runtime_env(ship=False)["env_vars"]


def test_package_ships_the_entry_point_that_vllm_looks_for():
    package, info = map(Path, ray_runtime_env()["py_modules"])
    assert (package / "engines" / "vllm" / "plugin.py").is_file()
    assert not list(package.rglob("__pycache__"))
    assert "oomguard.engines.vllm.plugin:register" in (info / "entry_points.txt").read_text()
