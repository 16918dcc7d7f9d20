"""Checks of oomguard's own environment variables: which are set, and whether anything reads them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Final

from oomguard.engines.vllm import plugin
from oomguard.observe.check import Check
from oomguard.switch import disabled

_DISABLE: Final = "OOMGUARD_DISABLE"
# Variables that oomguard reads and that are no option of any command.
OWN_VARIABLES: Final = frozenset(
    {_DISABLE, plugin.OVERRIDES, plugin.MODELS, plugin.ACKNOWLEDGE, "OOMGUARD_VLLM_CACHE", "OOMGUARD_OUTER_RUN"}
)


def variable_checks(environ: Mapping[str, str], known: frozenset[str]) -> Iterator[Check]:
    """Check each ``OOMGUARD_`` variable that is set; ``known`` are those that an option of a command reads."""
    read = known | OWN_VARIABLES
    names = sorted(name for name in environ if name.startswith("OOMGUARD_"))
    for name in names:
        text = f"{name}={environ[name]}"
        if name not in read:
            near = difflib.get_close_matches(name, sorted(read), n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            yield Check("variables", "problem", f"{text}: nothing reads it{hint}", f"unset {name}")
        elif name == _DISABLE and disabled():
            yield Check("variables", "problem", f"{text}: oomguard is turned off", f"unset {name}")
        elif name == plugin.OVERRIDES:
            yield _overrides_check(name, environ[name])
        else:
            yield Check("variables", "ok", text)
    if not names:
        yield Check("variables", "ok", "OOMGUARD_ variables: none set")


def _overrides_check(name: str, value: str) -> Check:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return Check("variables", "problem", f"{name}={value}: not JSON", f"unset {name}")
    if not isinstance(found, dict):
        return Check("variables", "problem", f"{name}={value}: not a JSON object", f"unset {name}")
    return Check("variables", "ok", f"{name}={value}: changes every vLLM start of this shell")
