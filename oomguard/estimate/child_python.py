"""Run a question in a child Python process, so that this process does not load the engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from oomguard.core.errors import InputError
from oomguard.core.process import python_command, python_environment


def call_child(
    module: str,
    question: Mapping[str, Any],
    *,
    limit_s: int,
    environment: Mapping[str, str],
    failed: str,
    hint: str,
    late: str,
    late_hint: str,
) -> dict[str, Any]:
    """Call a module's ``main`` with one JSON object; return the object on its last output line.

    The child loads no code from the working directory or the model's folder (core/process.py).

    Args:
        module: the module to run.
        question: the object for its standard input.
        limit_s: the time limit in seconds.
        environment: variables in addition to the inherited ones.
        failed: the message before the child's last output if it fails, with ``hint``.
        hint: the next step after a failure.
        late: the message after a timeout, with ``{}`` for the limit.
        late_hint: the next step after a timeout.

    Raises:
        InputError: the child failed or exceeded the time limit.
    """
    try:
        ran = subprocess.run(
            python_command(module),
            input=json.dumps(question),
            env={**python_environment(), **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(late.format(limit_s), hint=late_hint) from None
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        output = ran.stderr.strip()
        if output:
            last = output.splitlines()[-1].strip()
        else:
            last = f"exit status {ran.returncode}"
        raise InputError(f"{failed}: {last}", hint=hint)
    found: dict[str, Any] = json.loads(lines[-1])
    return found
