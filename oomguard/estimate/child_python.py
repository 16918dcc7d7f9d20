"""A question to a child's Python, which loads the engine so that nothing of it stays in the process
that asks.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from oomguard.core import safe_python
from oomguard.core.errors import InputError


def ask_child(
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
    """Ask a module's ``main``: one JSON object in, one on the last line out.

    The child takes no code from the working directory, nor from the model's folder: see
    ``clean_start``.

    Args:
        module: the module that answers.
        question: what it reads on standard input.
        limit_s: seconds that it may take.
        environment: variables on top of the inherited ones.
        failed: what to say before the child's last words where it fails, with ``hint``.
        hint: what to do then.
        late: what to say where it is late, with ``{}`` for the limit.
        late_hint: what to do then.

    Raises:
        InputError: the child failed, or was late.
    """
    try:
        ran = subprocess.run(
            safe_python.command(module),
            input=json.dumps(question),
            env={**safe_python.environment(), **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(late.format(limit_s), hint=late_hint) from None
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        said = [line for line in ran.stderr.splitlines() if line.strip()]
        if said:
            last = said[-1].strip()
        else:
            last = f"exit status {ran.returncode}"
        raise InputError(f"{failed}: {last}", hint=hint)
    found: dict[str, Any] = json.loads(lines[-1])
    return found
