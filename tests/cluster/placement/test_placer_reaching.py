"""Whether variables reach the program."""

from __future__ import annotations

from oomguard.cluster.placement.placer import why_not_reached
from support.each import each


@each(
    ("command", "told"),
    [
        ("ssh host vllm serve m", "ssh HOST oomguard run"),
        ("kubectl exec p -- vllm serve m", "the devices of the pod"),
    ],
)
def test_docker_s_words_are_docker_s_alone(command, told):
    reason = why_not_reached(command.split())
    assert reason is not None
    assert told in reason
    assert "docker" not in reason
    assert "docker run --gpus" in (why_not_reached(["docker", "run", "image"]) or "")
