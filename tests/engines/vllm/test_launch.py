"""vLLM's own command line, told from others; its flags are settings, a script's are evidence."""

from __future__ import annotations

import pytest

from oomguard.engines.command import Launch
from oomguard.engines.vllm.launch import gives_config_file, is_own_command, settings_in_force


@pytest.mark.parametrize(
    "argv",
    [
        ("vllm", "serve", "./m"),
        ("/opt/env/bin/vllm", "serve", "./m"),
        ("python", "/opt/env/bin/vllm", "serve", "./m"),
        ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"),
    ],
)
def test_vllms_own_command_line_is_known(argv):
    assert is_own_command(argv)


@pytest.mark.parametrize("argv", [("python", "script.py"), ("vllm",), ("vllm", "chat"), ("echo", "vllm", "serve"), ()])
def test_other_commands_are_not_vllms(argv):
    assert not is_own_command(argv)


def test_a_settings_file_is_noticed():
    assert gives_config_file(("vllm", "serve", "--config", "a.yaml"))
    assert gives_config_file(("vllm", "serve", "--config=a.yaml"))
    assert not gives_config_file(("vllm", "serve"))


def test_the_flags_of_vllms_own_command_are_its_settings():
    found = settings_in_force(Launch(("vllm", "serve", "m", "--gpu-memory-utilization", "0.5")))
    assert (found["gpu_memory_utilization"].value, found["gpu_memory_utilization"].source) == (0.5, "command")


def test_the_flags_of_a_script_are_evidence_that_it_may_ignore():
    found = settings_in_force(Launch(("python", "train.py", "--gpu-memory-utilization=0.028")))
    assert (found["gpu_memory_utilization"].value, found["gpu_memory_utilization"].source) == (0.028, "script")


def test_a_configuration_file_makes_the_flags_given_and_not_complete():
    found = settings_in_force(Launch(("vllm", "serve", "m", "--config", "c.yaml", "--max-model-len", "8")))
    assert found["max_model_len"].source == "given"
