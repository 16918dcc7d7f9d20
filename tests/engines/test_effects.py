"""Which commands are an engine's own servers: started again, they repeat no request."""

from __future__ import annotations

from oomguard.engines.command import Launch
from oomguard.engines.effects import engine_effects, is_server
from oomguard.engines.vllm import launch


def test_an_engine_s_own_server_is_known(subtests):
    for command in [
        "vllm serve org/model",
        "/opt/venv/bin/vllm serve org/model --port 1",
        "python /opt/venv/bin/vllm serve org/model",
        "python3 -m vllm.entrypoints.openai.api_server --model org/model",
        "vllm serve org/model --chat-template {%_for_m_in_messages_%}<|im_start|>;",
        "python -m vllm.entrypoints.cli.main serve org/model",
    ]:
        with subtests.test(command=command):
            assert is_server(Launch(tuple(word.replace("_", " ") if "{" in word else word for word in command.split())))


def test_what_only_looks_like_one_is_a_script(subtests):
    for command in [
        "python serve.py",
        "python script.py serve",
        "python -m vllm.entrypoints.openai.run_batch -i in.jsonl -o out.jsonl",
        "vllm run-batch -i in.jsonl -o out.jsonl",
        "vllm bench serve --model org/model",
        "vllm run-batch -i in.jsonl -o serve",
        "bash serve.sh",
        "vllm",
    ]:
        with subtests.test(command=command):
            assert not is_server(Launch(tuple(command.split())))


def test_a_shell_s_text_that_does_more_is_a_script(subtests, monkeypatch):
    """Whether or not the engine knows its own command behind a shell."""

    def check(text):
        monkeypatch.setattr(launch, "is_own_command", lambda _argv: True)
        assert not is_server(Launch(("bash", "-c", text)))

    for text in [
        "python prepare.py >> x; vllm serve org/model",
        "vllm serve org/model && vllm serve org/other",
        "vllm serve m > out.jsonl",
    ]:
        with subtests.test(text=text):
            check(text)


def test_an_engine_s_own_command_behind_a_wrapper_is_its_server(monkeypatch):
    monkeypatch.setattr(launch, "is_own_command", lambda _argv: True)
    assert is_server(Launch(("timeout", "1h", "/opt/bin/vllm", "serve", "org/model")))
    assert is_server(Launch(("bash", "-c", "exec vllm serve org/model")))
    assert not is_server(Launch(("timeout", "1h", "vllm", "bench", "serve")))


def test_an_anchor_is_long_enough_to_be_rare_and_stands_in_its_pattern():
    for line in engine_effects().requests:
        assert len(line.anchor) >= 10
        assert line.anchor.replace(b".", b"\\.") in line.pattern.pattern or line.anchor in line.pattern.pattern
