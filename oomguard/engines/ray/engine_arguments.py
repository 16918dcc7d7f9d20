"""Apply patches to vLLM's arguments in Ray Data processors and Ray Serve deployments."""

from __future__ import annotations

import atexit
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Diagnosis, Incident
from oomguard.core.installation import __version__
from oomguard.core.settings import setting, surface
from oomguard.engines.vllm import plugin
from oomguard.remedy.planner import next_patches

# The arguments of Ray Serve's builders: build_openai_app takes a list, build_llm_deployment one.
_MANY: Final = "llm_configs"
_ONE: Final = "llm_config"
_APPLICATIONS: Final = "applications"
_HINT: Final = "ray_patched(file['applications'][0]['args']['llm_configs'][0], …) is one engine's"


def is_serve_file(config: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a whole Serve file, or the arguments of an application."""
    return any(name in config for name in (_APPLICATIONS, _MANY, _ONE))


def one_engine(file: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the container of the only engine's configuration, and its key or index there.

    Raises:
        SettingError: the file contains no engine, or several, so the failed one is unknown.
    """
    found = list(_engines(file))
    if not found:
        raise SettingError("the Serve file has no engine in llm_configs", hint=_HINT)
    if len(found) > 1:
        named = ", ".join(_name(holder[key]) for holder, key in found)
        raise SettingError(
            f"the Serve file has {len(found)} engines ({named}), but a patch changes only one",
            hint=_HINT,
        )
    return found[0]


def _engines(file: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    # The arguments of an application, alone or inside a whole file.
    holders: list[Any] = [file]
    applications = file.get(_APPLICATIONS)
    if isinstance(applications, list):
        for application in applications:
            if isinstance(application, Mapping):
                holders.append(application.get("args"))
    for holder in holders:
        if not isinstance(holder, Mapping):
            continue
        several = holder.get(_MANY)
        if isinstance(several, list):
            for index in range(len(several)):
                yield several, index
        if _ONE in holder:
            yield holder, _ONE


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
# Keys that a vLLMEngineProcessorConfig or an LLMConfig always has, and engine arguments never have.
_BESIDE: Final = ("model_source", "model_loading_config")


def ray_patched(
    config: C,
    patches: Diagnosis | Incident | Mapping[str, FactValue],
    *,
    engine_version: str | None = None,
) -> C:
    """Return a copy of a Ray configuration for vLLM with the patches in its engine arguments.

    The given configuration stays unchanged.

        config = oomguard.ray_patched(config, oomguard.diagnose(error))
        config = oomguard.ray_patched(config, {"max_model_len": 4096})

    Args:
        config: Ray Data's ``vLLMEngineProcessorConfig``, Ray Serve's ``LLMConfig``, a mapping of
            either (from a Serve file), a whole Serve file with one engine, or the engine arguments.
        patches: a diagnosis or an incident, whose first permitted patches are applied; or values by
            setting.
        engine_version: vLLM's version on the workers, which determines the arguments' names; None:
            the newest known.

    Raises:
        SettingError: a setting is unknown or has no argument in vLLM; the configuration or the
            patches have another type; or the Serve file has several engines.
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
    # Both of Ray's configurations are pydantic models.
    if hasattr(config, "model_copy"):
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
    """Return engine arguments with the changes; a configuration may have none yet."""
    if arguments is None or isinstance(arguments, Mapping):
        return {**(arguments or {}), **changed}
    what = type(config).__name__
    if arguments is _NONE:
        why = f"{what} has no {_FIELD}"
    else:
        why = f"{_FIELD} is not a mapping but a {type(arguments).__name__}"
    raise SettingError(
        f"ray_patched cannot patch this: {why}",
        hint=(
            "Give a vLLMEngineProcessorConfig, an LLMConfig, a mapping of either, or the "
            "engine_kwargs."
        ),
    )


def arguments_of(
    patches: Diagnosis | Incident | Mapping[str, FactValue], engine_version: str | None = None
) -> dict[str, FactValue]:
    """Return patches as vLLM's arguments in its units; empty if there is nothing to change.

    The parameters are those of ``ray_patched``.
    """
    found: dict[str, FactValue] = {}
    for name, value in _settings(patches, engine_version).items():
        own = surface(name, _ENGINE, engine_version)
        if own.kwarg is None:
            raise SettingError(
                f"vLLM has no argument for {name}",
                hint="oomguard diagnose shows how vLLM sets it",
            )
        found[own.kwarg] = own.to_engine(value)
    return found


def _settings(
    patches: Diagnosis | Incident | Mapping[str, FactValue], version: str | None
) -> dict[str, FactValue]:
    if not isinstance(patches, (Mapping, Diagnosis, Incident)):
        raise SettingError(
            "patches must be a diagnosis, an incident, or values by setting, not "
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
    changed: dict[str, FactValue] = {}
    for patch in chosen:
        if patch.new is not None:
            changed[patch.setting] = patch.new
    return changed


_PACKAGE: Final = Path(__file__).absolute().parents[2]
_ALLOWED: Final = "VLLM_PLUGINS"
_PLUGIN: Final = "oomguard"
# Variables of this process that workers need too.
_HANDED_ON: Final = ("OOMGUARD_DISABLE", "OOMGUARD_SNAPSHOT")
_IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.pyc")


def ray_runtime_env(
    patches: Diagnosis | Incident | Mapping[str, FactValue] | None = None,
    *,
    base: Mapping[str, Any] | None = None,
    ship: bool = True,
    engine_version: str | None = None,
) -> dict[str, Any]:
    """Return a ``runtime_env`` for ``ray.init``, a task or an actor with oomguard's vLLM plugin.

        ray.init(runtime_env=oomguard.ray_runtime_env({"max_model_len": 4096}))

    Args:
        patches: changes for vLLM's engines on the workers, as in ``ray_patched``; None: no changes.
        base: your own ``runtime_env``, which is kept; its variables override oomguard's.
        ship: whether to send the package as ``py_modules`` (only possible in ``ray.init``). This is
            enough for the plugin. The guard also needs its dependencies: install oomguard on the
            nodes, or use ``base={"pip": [WHEEL]}``. False, for a task or an actor: variables only.
        engine_version: vLLM's version on the workers; None: the newest known.

    Raises:
        SettingError: a setting is unknown or has no argument in vLLM.
    """
    made = dict(base or {})
    given = {str(name): str(value) for name, value in (made.get("env_vars") or {}).items()}
    variables = {}
    for name in _HANDED_ON:
        if os.environ.get(name):
            variables[name] = os.environ[name]
    if patches is not None and (changed := arguments_of(patches, engine_version)):
        variables[plugin.OVERRIDES] = json.dumps(changed)
    allowed = given.get(_ALLOWED, os.environ.get(_ALLOWED))
    # Join the user's allow-list, but never create one: it would turn other plugins off.
    if allowed is not None:
        given[_ALLOWED] = ",".join(dict.fromkeys([*filter(None, allowed.split(",")), _PLUGIN]))
    made["env_vars"] = {**variables, **given}
    if ship:
        made["py_modules"] = [*(made.get("py_modules") or ()), *_shipped()]
    return made


def _shipped() -> list[str]:
    """Return the folders that Ray packs: the package, and the metadata with its entry point."""
    folder = Path(tempfile.mkdtemp(prefix="oomguard-ray-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(_PACKAGE, folder / _PLUGIN, ignore=_IGNORED)
    info = folder / f"{_PLUGIN}-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: {__version__}\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        f"[{plugin.GROUP}]\n{_PLUGIN} = {plugin.__name__}:register\n", encoding="utf-8"
    )
    return [str(folder / _PLUGIN), str(info)]
