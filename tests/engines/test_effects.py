"""Which commands are an engine's own servers: started again, they repeat no request."""

from __future__ import annotations

import pytest

from oomguard.engines.command import Launch
from oomguard.engines.effects import engine_effects, is_server


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve org/model",
        "/opt/venv/bin/vllm serve org/model --port 1",
        "python /opt/venv/bin/vllm serve org/model",
        "python3 -m vllm.entrypoints.openai.api_server --model org/model",
        "python -m vllm.entrypoints.cli.main serve org/model",
    ],
)
def test_an_engine_s_own_server_is_known(command):
    assert is_server(Launch(tuple(command.split())))


@pytest.mark.parametrize(
    "command",
    [
        "python serve.py",
        "python script.py serve",
        "python -m vllm.entrypoints.openai.run_batch -i in.jsonl -o out.jsonl",
        "vllm run-batch -i in.jsonl -o out.jsonl",
        "vllm bench serve",
        "bash serve.sh",
        "vllm",
    ],
)
def test_what_only_looks_like_one_is_a_script(command):
    assert not is_server(Launch(tuple(command.split())))


def test_an_anchor_is_long_enough_to_be_rare_and_stands_in_its_pattern():
    for line in engine_effects().requests:
        assert len(line.anchor) >= 10
        assert line.anchor.replace(b".", b"\\.") in line.pattern.pattern or line.anchor in line.pattern.pattern
