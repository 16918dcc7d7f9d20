"""Whether vLLM will find and load the plugin that carries settings into an unchanged script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Final

from oomguard.engines.vllm.plugin import GROUP
from oomguard.installation import reinstall_hint
from oomguard.observe.check import Check

_ALLOWED: Final = "VLLM_PLUGINS"


def plugin_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """Check that the plugin is registered, that it loads, and that the environment's list of plugins names it."""
    yield _registered_check()
    allowed = environ.get(_ALLOWED)
    if allowed is None:
        yield Check("vllm_plugin", "ok", f"{_ALLOWED} is not set: vLLM loads every plugin")
    elif "oomguard" in allowed.split(","):
        yield Check("vllm_plugin", "ok", f"{_ALLOWED}={allowed}")
    else:
        text = f"{_ALLOWED}={allowed} leaves oomguard out: only oomguard run and a guarded start add it"
        added = f'"${_ALLOWED},oomguard"' if allowed else "oomguard"
        yield Check("vllm_plugin", "problem", text, f"export {_ALLOWED}={added}")


def _registered_check() -> Check:
    found = next((entry for entry in metadata.entry_points(group=GROUP) if entry.name == "oomguard"), None)
    if found is None:
        text = f"the vLLM plugin is not registered in {GROUP} of this environment"
        return Check("vllm_plugin", "problem", text, reinstall_hint())
    try:
        found.load()
    except Exception as error:  # noqa: BLE001 - whatever loading raises is the answer
        text = f"the vLLM plugin does not load: {type(error).__name__}: {error}"
        return Check("vllm_plugin", "problem", text, reinstall_hint())
    return Check("vllm_plugin", "ok", f"the vLLM plugin is registered in {GROUP}")
