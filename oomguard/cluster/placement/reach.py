"""Whether variables that are set around a command reach the program that it runs in the end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from oomguard.cluster.placement.devices import VISIBLE
from oomguard.cluster.placement.refusal import Invocation
from oomguard.core.errors import UsageError
from oomguard.engines.unwrap_command import inner_commands

# What starts the program elsewhere, with variables of its own.
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("docker", "podman", "nerdctl"),
        "name the devices to it (docker run --gpus '\"device=UUID\"'), or run oomguard inside",
    ),
    "ssh": "its devices are another machine's: run oomguard there "
    "(ssh HOST oomguard run --gpus auto -- …)",
    "kubectl": "its devices are those of the pod: run oomguard inside",
}


def refuse_own_variable(argv: Sequence[str], own: Invocation) -> None:
    """Raise UsageError where the command sets CUDA_VISIBLE_DEVICES by itself, over whatever is set
    around it.
    """
    for inner in inner_commands(argv):
        value = inner.variables.get(VISIBLE)
        if value is not None:
            raise UsageError(
                f"the command sets {VISIBLE}={value} itself, over any device that it is given",
                hint=(
                    "leave it out there; as a limit it stands in front: "
                    f"{VISIBLE}={shlex.quote(value)} {own.line(command='…')}"
                ),
            )


def why_not_reached(argv: Sequence[str]) -> str | None:
    """Return why the variables do not reach the program, None where they do as far as
    can be told.
    """
    name = PurePath(argv[0]).name
    if name in _ELSEWHERE:
        return f"{name} hands no variable on: {_ELSEWHERE[name]}"
    if any(inner.has_no_others for inner in inner_commands(argv)):
        return "a wrapper in the command takes the inherited variables away"
    return None
