"""Find a model's configuration and weights in a folder, a ``config.json`` or on the hub."""

from __future__ import annotations

import socket
import stat
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from oomguard.core.errors import InputError
from oomguard.core.installation import install_hint
from oomguard.estimate.model.shape import printable, read_json
from oomguard.estimate.model.weight_headers import (
    SUFFIX,
    Parameter,
    gguf_bytes,
    is_there,
    read_headers,
    read_tensor,
)

_HINT: Final = "name a model folder, its config.json, or a model on the hub (ORG/NAME)"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Hold a parsed configuration, its source, and the files next to it.

    ``parameters`` are the tensors of the weights, or None without a safetensors file. ``processor``
    is the configuration of the image processor, empty without one. ``gguf_bytes`` is the size of a
    GGUF file, or None without one.
    """

    name: str
    config_path: str
    config: Mapping[str, Any]
    parameters: tuple[Parameter, ...] | None
    processor: Mapping[str, Any] = field(default_factory=dict)
    gguf_bytes: int | None = None


def find_model(model: str) -> ModelFiles:
    """Read a model's configuration and headers without fetching its weights.

    Args:
        model: a folder, a ``config.json``, a GGUF file next to one, or a hub name (``ORG/NAME``).

    Raises:
        InputError: nothing has that name, or one of its files is irregular or unreadable.
        ConfigError: one of its files has unexpected content.
    """
    path = Path(model)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _from_hub(_hub_name(model))
    except (OSError, ValueError) as error:  # an impossible name, or another user's
        raise InputError(
            f"{printable(model)}: {getattr(error, 'strerror', None) or error}", hint=_HINT
        ) from None
    if path.suffix == SUFFIX and stat.S_ISREG(mode):
        return _of_gguf(model, path)
    if not stat.S_ISDIR(mode):
        return ModelFiles(model, model, read_json(path), None)
    config = read_json(path / "config.json")
    return ModelFiles(
        model,
        str(path / "config.json"),
        config,
        read_headers(path),
        _processor(path),
        gguf_bytes(path),
    )


def _of_gguf(model: str, path: Path) -> ModelFiles:
    config = path.with_name("config.json")
    if not is_there(config):
        raise InputError(
            f"{model}: there is no config.json next to it",
            hint="copy the config.json of the original model into that folder",
        )
    return ModelFiles(
        model, str(config), read_json(config), None, _processor(path.parent), gguf_bytes(path)
    )


def _hub_name(model: str) -> str:
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or model.endswith(".json"):
        raise InputError(f"{model}: no such folder or file", hint=_HINT)
    return model


def _processor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    if is_there(path):
        return read_json(path)
    return {}


def _from_hub(model: str) -> ModelFiles:
    """Fetch only the configuration and the weight headers of a model on the hub."""
    try:
        import huggingface_hub
        from huggingface_hub.constants import ENDPOINT
    except ImportError:
        raise InputError(
            f"{model}: no such folder, and huggingface_hub is not installed",
            hint=install_hint("hf"),
        ) from None
    offline = _is_offline(ENDPOINT)
    try:
        path = huggingface_hub.hf_hub_download(model, "config.json", local_files_only=offline)
    except Exception as error:  # noqa: BLE001
        # The library has a dozen exceptions for offline, gated, unknown and refused.
        raise _not_on_hub(model, error, offline=offline) from None
    if offline:
        return replace(find_model(str(Path(path).parent)), name=model)
    config = read_json(Path(path))
    try:
        found = huggingface_hub.get_safetensors_metadata(model)
    except Exception:  # noqa: BLE001
        # The headers are missing or in another format; the configuration is enough.
        return ModelFiles(model, path, config, None)
    tensors = tuple(
        read_tensor(name, {"dtype": info.dtype, "shape": list(info.shape)}, path)
        for file in found.files_metadata.values()
        for name, info in file.tensors.items()
    )
    return ModelFiles(model, path, config, tensors)


def _is_offline(endpoint: str) -> bool:
    """Return whether the hub's name has no address; the library would retry for half a minute."""
    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return True
    return False


def _not_on_hub(model: str, error: Exception, *, offline: bool) -> InputError:
    from huggingface_hub.constants import HF_HUB_CACHE

    if offline:
        folder = Path(HF_HUB_CACHE) / "--".join(("models", *model.split("/")))
        return InputError(
            f"{model}: no such folder, the hub cannot be reached, and its config.json is not in "
            f"the cache {folder}",
            hint="name a folder or a config.json, or fetch the model where there is a network",
        )
    if str(error).strip():
        reason = str(error).strip().splitlines()[0]
    else:
        reason = type(error).__name__
    return InputError(
        f"{model}: no such folder, and the hub did not return its config.json ({reason})",
        hint="name a folder or a config.json",
    )
