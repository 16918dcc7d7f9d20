"""Patches in what starts vLLM on Ray: the ``engine_kwargs`` of Ray Data's processors and of Ray
Serve's LLM deployments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar, cast

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Diagnosis, Incident
from oomguard.core.setting_spellings import surface
from oomguard.core.settings import setting
from oomguard.remedy.planner import next_patches

# The one engine of a Ray Serve configuration file: an entry of ``llm_configs`` in the ``args`` of
# an application.

# ray.serve.llm's builders: build_openai_app takes a list, build_llm_deployment one.
_MANY: Final = "llm_configs"
_ONE: Final = "llm_config"
_APPLICATIONS: Final = "applications"
_HINT: Final = "ray_patched(file['applications'][0]['args']['llm_configs'][0], …) is one engine's"


def is_serve_file(config: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a whole file, or the arguments of an application."""
    return any(name in config for name in (_APPLICATIONS, _MANY, _ONE))


def one_engine(file: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what holds the configuration of the file's engine, and its key or index there.

    Raises:
        SettingError: the file has none that stands in it, or several: which one failed is not
            known.
    """
    found = list(_engines(file))
    if not found:
        raise SettingError("the Serve file has no llm_configs with an engine in it", hint=_HINT)
    if len(found) > 1:
        named = ", ".join(_name(holder[key]) for holder, key in found)
        raise SettingError(
            f"the Serve file has {len(found)} engines: {named}; a patch is of one", hint=_HINT
        )
    return found[0]


def _engines(file: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    applications = file.get(_APPLICATIONS)
    if isinstance(applications, list):
        of_each = applications
    else:
        of_each = []
    for args in (file, *(app.get("args") for app in of_each if isinstance(app, Mapping))):
        if not isinstance(args, Mapping):
            continue
        if isinstance(args.get(_MANY), list):
            yield from ((args[_MANY], index) for index in range(len(args[_MANY])))
        if _ONE in args:
            yield args, _ONE


def _name(config: Any) -> str:
    if isinstance(config, Mapping):
        loads = config.get("model_loading_config")
    else:
        loads = None
    if isinstance(loads, Mapping):
        named = loads.get("model_id")
    else:
        named = None
    return str(named or "one without a model_id")


C = TypeVar("C")
_ENGINE: Final = "vllm"
_FIELD: Final = "engine_kwargs"
_NONE: Final = object()
# What a vLLMEngineProcessorConfig and an LLMConfig have to have: a mapping with one of these is no
# engine's arguments.
_BESIDE: Final = ("model_source", "model_loading_config")


def ray_patched(
    config: C,
    patches: Diagnosis | Incident | Mapping[str, FactValue],
    *,
    engine_version: str | None = None,
) -> C:
    """Return a copy of what starts vLLM on Ray, with the patches in its engine arguments; what was
    given stays as it was.

    Args:
        config: Ray Data's ``vLLMEngineProcessorConfig``, Ray Serve's ``LLMConfig``, a mapping of
            either (a Serve configuration file's), a whole Serve file with one engine, or the engine
            arguments themselves.
        patches: a diagnosis or an incident, whose plan's first permitted patches are taken, or
            settings and values by name.
        engine_version: vLLM's version on the workers, which spells its arguments; None: the newest
            known.

    Raises:
        SettingError: a setting that is unknown, or that vLLM has no argument for; a configuration
            or patches that are none of these; a Serve file with several engines.
    """
    return _patched(config, arguments_of(patches, engine_version))


def _patched(config: C, changed: Mapping[str, FactValue]) -> C:
    if isinstance(config, Mapping):
        if is_serve_file(config):
            return _file_patched(config, changed)
        holds = _FIELD in config or any(name in config for name in _BESIDE)
        if holds:
            values = {**config, _FIELD: _joined(config, config.get(_FIELD), changed)}
        else:
            values = {**config, **changed}
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
    if arguments is _NONE:
        why = f"{what} has no {_FIELD}"
    else:
        why = f"{_FIELD} is no mapping: {type(arguments).__name__}"
    raise SettingError(
        f"ray_patched cannot patch this: {why}",
        hint=(
            "give a vLLMEngineProcessorConfig, an LLMConfig, a mapping of either, or the "
            "engine_kwargs"
        ),
    )


def arguments_of(
    patches: Diagnosis | Incident | Mapping[str, FactValue], engine_version: str | None = None
) -> dict[str, FactValue]:
    """Return patches as arguments of vLLM, in its units; none where nothing can be done. The
    arguments are those of ``ray_patched``.
    """
    found: dict[str, FactValue] = {}
    for name, value in _settings(patches, engine_version).items():
        own = surface(name, _ENGINE, engine_version)
        if own.kwarg is None:
            raise SettingError(
                f"vLLM has no argument for {name}",
                hint="oomguard diagnose names the surface that it has",
            )
        found[own.kwarg] = own.to_engine(value)
    return found


def _settings(
    patches: Diagnosis | Incident | Mapping[str, FactValue], version: str | None
) -> dict[str, FactValue]:
    if not isinstance(patches, (Mapping, Diagnosis, Incident)):
        raise SettingError(
            "patches are a diagnosis, an incident, or values by setting, not "
            f"{type(patches).__name__}",
            hint=(
                'oomguard.ray_patched(config, oomguard.diagnose(error)), or {"max_model_len": 4096}'
            ),
        )
    if isinstance(patches, Mapping):
        return {setting(name).name: value for name, value in patches.items()}
    if isinstance(patches, Diagnosis):
        incident = patches.first_cause
    else:
        incident = patches
    if incident is None:
        return {}
    chosen = next_patches(incident, lambda name: surface(name, _ENGINE, version).kwarg is not None)
    return {patch.setting: patch.new for patch in chosen if patch.new is not None}
