"""Make a Ray ``runtime_env`` that brings oomguard's vLLM plugin to the workers."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from oomguard._version import __version__
from oomguard.core.facts import FactValue
from oomguard.core.incident import Diagnosis, Incident
from oomguard.engines.ray.engine_arguments import arguments_of
from oomguard.engines.vllm import plugin

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
    variables = {name: os.environ[name] for name in _HANDED_ON if os.environ.get(name)}
    if patches is not None and (changed := arguments_of(patches, engine_version)):
        variables[plugin.OVERRIDES] = json.dumps(changed)
    allowed = given.get(_ALLOWED, os.environ.get(_ALLOWED))
    if allowed is not None:  # join the user's allow-list, but never create one
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
