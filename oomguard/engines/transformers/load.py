"""``from_pretrained`` on a device: what its checkpoint's own headers say of its weights, and how it is made another way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.lighter import lighter_weights
from oomguard.engines.transformers.place import Place, place_of
from oomguard.engines.transformers.weight_bytes import weights_of
from oomguard.engines.transformers.weights_on_host import keep_on_host, put_on_simulated
from oomguard.facts import FactValue
from oomguard.memory.model.files import ModelFiles, find_model
from oomguard.observe import torch_memory
from oomguard.remedy.modelled_load import ON_DEVICE, Lighter, Weights

_NAME: Final = "pretrained_model_name_or_path"
# With these the program places or shards the weights in a way of its own.
_OWN: Final = ("max_memory", "tp_plan", "tp_size", "device_mesh", "distributed_config", "gguf_file", "state_dict")
_DTYPES: Final = ("dtype", "torch_dtype")


def load_of(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Load:
    """Read a call of ``from_pretrained``; raise NotOneDeviceError where its weights go to no device that is watched."""
    return Load(wrapped, args, kwargs, place_of(kwargs.get("device_map")))


class Load:
    """One call of ``from_pretrained``."""

    def __init__(
        self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Place
    ) -> None:
        self._wrapped, self._args, self._kwargs, self.place = wrapped, args, kwargs, place

    @property
    def is_chosen(self) -> bool:
        """Whether the program named the device."""
        return self.place.is_chosen

    @property
    def why_not_on_host(self) -> str | None:
        """Why no layer can wait on the host; None where they can."""
        own = next((name for name in _OWN if self._kwargs.get(name) is not None), None)
        if own is not None:
            return f"{own} says where the weights go"
        return None if _has_accelerate() else "accelerate is not installed: pip install accelerate"

    def make(self, changed: Mapping[str, FactValue], host_bytes: int | None) -> Any:
        """Load the model, with these settings changed."""
        import torch

        kwargs, share = dict(self._kwargs), changed.get(ON_DEVICE)
        for setting in (name for name in changed if name != ON_DEVICE):
            if setting == "dtype":
                kwargs = {name: value for name, value in kwargs.items() if name not in _DTYPES}
                kwargs["dtype"] = getattr(torch, str(changed[setting]))
            else:
                kwargs["quantization_config"] = next(
                    way.config() for way in self._lighter() if way.told.value == changed[setting]
                )
        if self.place.is_simulated:
            return self._simulated(kwargs, share)
        if share is not None:
            limits: dict[int | str, int] = {self.place.index: int(share)}
            if host_bytes is not None:
                limits["cpu"] = host_bytes
            kwargs |= {"device_map": "sequential", "max_memory": limits}
        return self._wrapped(*self._args, **kwargs)

    def _simulated(self, kwargs: dict[str, Any], share: FactValue | None) -> Any:
        """Load the model on the host, and count it on the simulated device from there."""
        with torch_memory.on_host():
            loaded = self._wrapped(*self._args, **{name: kwargs[name] for name in kwargs if name != "device_map"})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if share is not None:
            keep_on_host(model, self.place, int(share))
        put_on_simulated(model)
        return loaded

    def weights(self) -> Weights | None:
        """Return what its weights are, by the headers of its checkpoint."""
        files = self._files
        return None if files is None else weights_of(files, self._dtype)

    def lighter(self) -> tuple[Lighter, ...]:
        """Return its weights in fewer bits."""
        return tuple(way.told for way in self._lighter())

    def _lighter(self) -> Any:
        given = self._kwargs.get("quantization_config") is not None
        return lighter_weights(self._files, self._dtype, self.place, is_quantized=given)

    @property
    def _dtype(self) -> str:
        given = next((self._kwargs[name] for name in _DTYPES if self._kwargs.get(name) is not None), "auto")
        return str(given).removeprefix("torch.")

    @functools.cached_property
    def _files(self) -> ModelFiles | None:
        name = self._args[0] if self._args else self._kwargs.get(_NAME)
        folder = None if name is None else _folder_of(str(name), self._kwargs)
        try:
            return None if folder is None else find_model(str(folder))
        except Exception:  # noqa: BLE001 - a folder of someone else: whatever is odd about it, its weights are not known
            return None


def _has_accelerate() -> bool:
    from importlib.util import find_spec

    return find_spec("accelerate") is not None


def _folder_of(name: str, kwargs: Mapping[str, Any]) -> Path | None:
    """Return where a model's files are: its folder, or that of the hub's cache; nothing is fetched."""
    sub = str(kwargs.get("subfolder") or "")
    if Path(name).is_dir():
        return Path(name, sub)
    from huggingface_hub import try_to_load_from_cache

    within = f"{sub}/config.json" if sub else "config.json"
    options = {key: kwargs[key] for key in ("cache_dir", "revision") if kwargs.get(key) is not None}
    found = try_to_load_from_cache(name, within, **options)
    return Path(found).parent if isinstance(found, str) else None
