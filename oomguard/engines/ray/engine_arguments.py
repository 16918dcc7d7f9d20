"""Patches in what starts vLLM on Ray: the ``engine_kwargs`` of Ray Data's processors and of Ray Serve's LLM deployments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Final, TypeVar, cast

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import Diagnosis, Incident
from oomguard.remedy.planner import next_patches
from oomguard.settings import setting
from oomguard.surfaces import surface

C = TypeVar("C")
_ENGINE: Final = "vllm"
_FIELD: Final = "engine_kwargs"


def ray_patched(
    config: C, patches: Diagnosis | Incident | Mapping[str, FactValue], *, engine_version: str | None = None
) -> C:
    """Return a copy of what starts vLLM on Ray, with the patches in its engine arguments; what was given stays as it was.

    Args:
        config: Ray Data's ``vLLMEngineProcessorConfig``, Ray Serve's ``LLMConfig``, a mapping of either (a Serve configuration
            file's), or the engine arguments themselves.
        patches: a diagnosis or an incident, whose plan's first permitted patches are taken, or settings and values by name.
        engine_version: vLLM's version on the workers, which spells its arguments; None: the newest known.

    Raises:
        SettingError: a setting that is unknown, or that vLLM has no argument for.
    """
    changed = arguments_of(patches, engine_version)
    if isinstance(config, Mapping):
        values = {**config, _FIELD: {**config[_FIELD], **changed}} if _FIELD in config else {**config, **changed}
        return cast("C", values if type(config) is dict else type(config)(values))  # type: ignore[call-arg]
    arguments = {**getattr(config, _FIELD), **changed}
    if hasattr(config, "model_copy"):  # pydantic's, which both are
        return config.model_copy(update={_FIELD: arguments})  # type: ignore[no-any-return]
    made = copy.copy(config)
    setattr(made, _FIELD, arguments)
    return made


def arguments_of(
    patches: Diagnosis | Incident | Mapping[str, FactValue], engine_version: str | None = None
) -> dict[str, FactValue]:
    """Return patches as arguments of vLLM, in its units; none where nothing can be done. The arguments are those of ``ray_patched``."""
    found: dict[str, FactValue] = {}
    for name, value in _settings(patches, engine_version).items():
        own = surface(name, _ENGINE, engine_version)
        if own.kwarg is None:
            raise SettingError(
                f"vLLM has no argument for {name}", hint="oomguard diagnose names the surface that it has"
            )
        found[own.kwarg] = own.own(value)
    return found


def _settings(patches: Diagnosis | Incident | Mapping[str, FactValue], version: str | None) -> dict[str, FactValue]:
    if isinstance(patches, Mapping):
        return {setting(name).name: value for name, value in patches.items()}
    incident = patches.first_cause if isinstance(patches, Diagnosis) else patches
    if incident is None:
        return {}
    chosen = next_patches(incident, lambda name: surface(name, _ENGINE, version).kwarg is not None)
    return {patch.setting: patch.new for patch in chosen if patch.new is not None}
