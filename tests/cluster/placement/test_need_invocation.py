"""The call of ``oomguard run`` as a line to paste."""

from __future__ import annotations

import shlex

from oomguard.cluster.placement.need import Invocation
from support.each import each


@each(
    ("options", "line"),
    [
        (("--gpus", "auto", "-q"), "oomguard run --gpus 2 -q -- true"),
        (
            ("-q", "--gpus=auto", "--restart", "on-failure"),
            "oomguard run -q --gpus 2 --restart on-failure -- true",
        ),
        (
            ("--gpus", "1", "--gpus", "auto", "--wait", "5m"),
            "oomguard run --gpus 2 --wait 5m -- true",
        ),
        (("--journal", "a b"), "oomguard run --gpus 2 --journal 'a b' -- true"),
    ],
)
def test_other_devices_replace_the_requested_ones(options, line):
    assert Invocation("auto", "true", options).line(gpus="2") == line


def test_a_wait_is_added_or_takes_the_place_of_another_one():
    assert (
        Invocation("1", "true", ("-q", "--gpus", "1", "-v")).line(wait="30m")
        == "oomguard run -q --gpus 1 --wait 30m -v -- true"
    )
    assert (
        Invocation("1", "true", ("--wait", "0")).line(wait="30m")
        == "oomguard run --gpus 1 --wait 30m -- true"
    )


def test_a_shell_reads_it_back_with_a_changed_command():
    own = Invocation("auto", "x", ("--report", "it's.md"))
    words = shlex.split(own.line(command=shlex.join(["vllm", "serve", "a b"])))
    assert words == [
        "oomguard",
        "run",
        "--gpus",
        "auto",
        "--report",
        "it's.md",
        "--",
        "vllm",
        "serve",
        "a b",
    ]
