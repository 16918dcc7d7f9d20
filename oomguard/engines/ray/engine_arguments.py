"""Patches in what starts vLLM on Ray: the ``engine_kwargs`` of Ray Data's processors and of Ray Serve's LLM deployments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

from oomguard.engines.ray.serve_file import is_serve_file, one_engine
from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import Diagnosis, Incident
from oomguard.remedy.planner import next_patches
from oomguard.settings import setting
from oomguard.surfaces import surface

C = TypeVar("C")
_ENGINE: Final = "vllm"
_FIELD: Final = "engine_kwargs"
_NONE: Final = object()
# What a vLLMEngineProcessorConfig and an LLMConfig have to have: a mapping with one of these is no engine's arguments.
_BESIDE: Final = ("model_source", "model_loading_config")


def ray_patched(
    config: C, patches: Diagnosis | Incident | Mapping[str, FactValue], *, engine_version: str | None = None
) -> C:
    """Return a copy of what starts vLLM on Ray, with the patches in its engine arguments; what was given stays as it was.

    Args:
        config: Ray Data's ``vLLMEngineProcessorConfig``, Ray Serve's ``LLMConfig``, a mapping of either (a Serve configuration
            file's), a whole Serve file with one engine, or the engine arguments themselves.
        patches: a diagnosis or an incident, whose plan's first permitted patches are taken, or settings and values by name.
        engine_version: vLLM's version on the workers, which spells its arguments; None: the newest known.

    Raises:
        SettingError: a setting that is unknown, or that vLLM has no argument for; a configuration or patches that are none of these;
            a Serve file with several engines.
    """
    return _patched(config, arguments_of(patches, engine_version))


def _patched(config: C, changed: Mapping[str, FactValue]) -> C:
    if isinstance(config, Mapping):
        if is_serve_file(config):
            return _file_patched(config, changed)
        holds = _FIELD in config or any(name in config for name in _BESIDE)
        values = {**config, _FIELD: _joined(config, config.get(_FIELD), changed)} if holds else {**config, **changed}
        return cast("C", values if type(config) is dict else type(config)(values))  # type: ignore[call-arg]
    arguments = _joined(config, getattr(config, _FIELD, _NONE), changed)
    if hasattr(config, "model_copy"):  # pydantic's, which both are
        return config.model_copy(update={_FIELD: arguments})  # type: ignore[no-any-return]
    made = copy.copy(config)
    setattr(made, _FIELD, arguments)
    return made


def _file_patched(file: C, changed: Mapping[str, FactValue]) -> C:
    made = copy.deepcopy(file)
    if changed:
        holder, key = one_engine(cast("Mapping[str, Any]", made))
        holder[key] = _patched(holder[key], changed)
    return made


def _joined(config: object, arguments: object, changed: Mapping[str, FactValue]) -> dict[str, Any]:
    """Return engine arguments with the changed ones; a configuration may have none yet."""
    if arguments is None or isinstance(arguments, Mapping):
        return {**(arguments or {}), **changed}
    what = type(config).__name__
    why = f"{what} has no {_FIELD}" if arguments is _NONE else f"{_FIELD} is no mapping: {type(arguments).__name__}"
    raise SettingError(
        f"ray_patched cannot patch this: {why}",
        hint="give a vLLMEngineProcessorConfig, an LLMConfig, a mapping of either, or the engine_kwargs",
    )


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
    if not isinstance(patches, (Mapping, Diagnosis, Incident)):
        raise SettingError(
            f"patches are a diagnosis, an incident, or values by setting, not {type(patches).__name__}",
            hint='oomguard.ray_patched(config, oomguard.diagnose(error)), or {"max_model_len": 4096}',
        )
    if isinstance(patches, Mapping):
        return {setting(name).name: value for name, value in patches.items()}
    incident = patches.first_cause if isinstance(patches, Diagnosis) else patches
    if incident is None:
        return {}
    chosen = next_patches(incident, lambda name: surface(name, _ENGINE, version).kwarg is not None)
    return {patch.setting: patch.new for patch in chosen if patch.new is not None}
