"""A question to a Python of its own: engines are loaded there, so that nothing of theirs stays in the asking process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from oomguard.errors import InputError


def ask_child(
    module: str, question: Mapping[str, Any], *, limit_s: int, environment: Mapping[str, str],
    failed: str, hint: str, late: str, late_hint: str,
) -> dict[str, Any]:  # fmt: skip
    """The answer of ``python -m module``: one JSON object in, one on the last line out.

    Raises InputError with ``failed`` and the child's last words, or with ``late`` (``{}`` is the limit) after ``limit_s`` seconds.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-m", module], input=json.dumps(question), env={**os.environ, **environment},
            capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(late.format(limit_s), hint=late_hint) from None
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        said = [line for line in ran.stderr.splitlines() if line.strip()]
        last = said[-1].strip() if said else f"exit status {ran.returncode}"
        raise InputError(f"{failed}: {last}", hint=hint)
    found: dict[str, Any] = json.loads(lines[-1])
    return found
