"""A vLLM's sources are read for its flags, its arguments and the plugin's hook; a part that is gone is told."""

from __future__ import annotations

import sys

import pytest

from oomguard.engines.vllm.package import read_sources


def test_flags_arguments_and_hook_are_read_without_imports(vllm_tree):
    before = set(sys.modules)

    found = read_sources(vllm_tree())

    assert {"--max-model-len", "--gpu-memory-utilization", "--device-memory-utilization"} <= set(
        found.flags
    )
    assert (found.flags["--enforce-eager"], found.flags["--enable-prefix-caching"]) == (False, True)
    assert set(found.arguments) >= {"model", "max_model_len", "enforce_eager"}
    assert (found.hook_problem, found.parameters) == (None, ("usage_context", "headless"))
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] == "vllm"}


def test_a_hook_that_is_gone_or_of_another_kind_is_told(subtests, vllm_tree):
    for old, new, problem in [
        (
            "def create_engine_config",
            "def make_engine_config",
            "its EngineArgs has no create_engine_config",
        ),
        (
            "    def create_engine_config(self, ",
            "    @classmethod\n    def create_engine_config(cls, ",
            "is not a plain method",
        ),
        (
            "    def create_engine_config",
            "    async def create_engine_config",
            "is not a plain method",
        ),
        ("class EngineArgs", "class ServerArgs", "it has no EngineArgs"),
        ("@dataclass\nclass EngineArgs", "class EngineArgs", "is not a dataclass"),
        ("        load_general_plugins()", "        pass", "do not call load_general_plugins"),
        (
            '"vllm.general_plugins"',
            '"vllm.plugins"',
            "not load the entry points vllm.general_plugins",
        ),
    ]:
        with subtests.test(old=old, new=new, problem=problem):
            assert problem in (read_sources(vllm_tree(old, new)).hook_problem or "")


def test_a_package_without_the_module_cannot_be_read(tmp_path):
    with pytest.raises(OSError, match="arg_utils"):
        read_sources(tmp_path / "vllm")
