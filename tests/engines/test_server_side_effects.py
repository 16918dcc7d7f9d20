"""Which commands are an engine's own servers: started again, they repeat no request."""

from __future__ import annotations

from oomguard.engines.command import Launch
from oomguard.engines.server import engine_effects, is_server
from oomguard.engines.vllm import launch


def is_server_of(command: str) -> bool:
    # A chat template is one word; its spaces are written as underscores here.
    return is_server(
        Launch(tuple(word.replace("_", " ") if "{" in word else word for word in command.split()))
    )


def test_an_engine_s_own_server_is_known():
    servers = [
        "vllm serve org/model",
        "/opt/venv/bin/vllm serve org/model --port 1",
        "python /opt/venv/bin/vllm serve org/model",
        "python3 -m vllm.entrypoints.openai.api_server --model org/model",
        "vllm serve org/model --chat-template {%_for_m_in_messages_%}<|im_start|>;",
        "python -m vllm.entrypoints.cli.main serve org/model",
    ]
    assert [command for command in servers if not is_server_of(command)] == []


def test_what_only_looks_like_one_is_a_script():
    scripts = [
        "python serve.py",
        "python script.py serve",
        "python -m vllm.entrypoints.openai.run_batch -i in.jsonl -o out.jsonl",
        "vllm run-batch -i in.jsonl -o out.jsonl",
        "vllm bench serve --model org/model",
        "vllm run-batch -i in.jsonl -o serve",
        "bash serve.sh",
        "vllm",
    ]
    assert [command for command in scripts if is_server_of(command)] == []


def test_a_shell_s_text_that_does_more_is_a_script(monkeypatch):
    """Whether or not the engine knows its own command behind a shell."""
    monkeypatch.setattr(launch, "is_own_command", lambda _argv: True)
    texts = [
        "python prepare.py >> x; vllm serve org/model",
        "vllm serve org/model && vllm serve org/other",
        "vllm serve m > out.jsonl",
    ]
    assert [text for text in texts if is_server(Launch(("bash", "-c", text)))] == []


def test_an_engine_s_own_command_behind_a_wrapper_is_its_server(monkeypatch):
    monkeypatch.setattr(launch, "is_own_command", lambda _argv: True)
    assert is_server(Launch(("timeout", "1h", "/opt/bin/vllm", "serve", "org/model")))
    assert is_server(Launch(("bash", "-c", "exec vllm serve org/model")))
    assert is_server(
        Launch(
            ("bash", "-c", "ulimit -v 8000000; cd /srv && export A=1; exec vllm serve org/model")
        )
    )
    assert not is_server(Launch(("bash", "-c", "export A=$(date); vllm serve org/model")))
    assert not is_server(Launch(("timeout", "1h", "vllm", "bench", "serve")))


def test_anchor_is_rare_enough_and_part_of_its_pattern():
    for line in engine_effects().requests:
        assert len(line.anchor) >= 10
        assert (
            line.anchor.replace(b".", b"\\.") in line.pattern.pattern
            or line.anchor in line.pattern.pattern
        )
