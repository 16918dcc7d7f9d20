"""The one engine of a Ray Serve configuration file: an entry of ``llm_configs`` in the ``args`` of an application."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomguard.errors import SettingError

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
        SettingError: the file has none that stands in it, or several: which one failed is not known.
    """
    found = list(_engines(file))
    if not found:
        raise SettingError("the Serve file has no llm_configs with an engine in it", hint=_HINT)
    if len(found) > 1:
        named = ", ".join(_name(holder[key]) for holder, key in found)
        raise SettingError(f"the Serve file has {len(found)} engines: {named}; a patch is of one", hint=_HINT)
    return found[0]


def _engines(file: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    applications = file.get(_APPLICATIONS)
    of_each = applications if isinstance(applications, list) else []
    for args in (file, *(app.get("args") for app in of_each if isinstance(app, Mapping))):
        if not isinstance(args, Mapping):
            continue
        if isinstance(args.get(_MANY), list):
            yield from ((args[_MANY], index) for index in range(len(args[_MANY])))
        if _ONE in args:
            yield args, _ONE


def _name(config: Any) -> str:
    loads = config.get("model_loading_config") if isinstance(config, Mapping) else None
    named = loads.get("model_id") if isinstance(loads, Mapping) else None
    return str(named or "one without a model_id")
