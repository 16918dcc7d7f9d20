"""What a model is, where the user does not say it: its name, values of its weights, and the settings that its modules hold.

Training and a new download change the weights, a sweep changes a module's scale or hangs a hook on it; a hook's content cannot be told.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from oomguard.mapping.content import UnknownContentError, digest
from oomguard.mapping.plain_values import NotPlainError, plain
from oomguard.observe import torch_memory

# What a model has that a list of prompts, a lock or a logger has not.
_OF_MODELS: Final = ("parameters", "generate")
_NO_VALUE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# Values that are read of each weight: training changes nearly all, and reading all of them would take as long as loading them.
_SAMPLED: Final = 64
_DIGEST_BYTES: Final = 8
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
# Whose hooks move weights and note outputs: they come with the model and change no result.
_KNOWN_HOOKS: Final = frozenset({"accelerate", "oomguard", "peft", "torch", "transformers"})
# What a forward pass itself may set: a table of positions that grew, whether bitsandbytes has chosen its type.
_OWN_NOTES: Final = ("cache", "_is_set")
# Of a module's own notes (a name that begins with "_"), those of peft that decide which adapter is used.
_COUNTED_NOTES: Final = frozenset({"_active_adapter", "_disable_adapters"})


class UnnamedModelError(TypeError):
    """A model of which nothing tells what it is; the message is its type and what is amiss."""


def is_model(value: Any) -> bool:
    """Return whether a value is a model, or holds one as a pipeline of transformers does."""
    return _is_model_itself(value) or _is_model_itself(_inner(value))


def model_name(value: Any) -> str:
    """Return the name and revision of a model, with digests of values of its weights, or of its folder's files, and of its settings.

    Raises:
        UnnamedModelError: it has no name, or hooks that change what it computes.
    """
    model = value if _is_model_itself(value) else _inner(value)
    path = getattr(model, "name_or_path", None)
    if not isinstance(path, str) or not path:
        raise UnnamedModelError(f"{type(model).__qualname__} without a name")
    if (hook := _hook(model)) is not None:
        raise UnnamedModelError(f"{type(model).__qualname__} with a forward hook, {hook}")
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    generation = [_generation(holder) for holder in ((model,) if model is value else (model, value))]
    parts = (path, revision, _weights(model) or _files(Path(path)), *generation, _settings(model))
    return " ".join(str(part) for part in parts if part)


def _is_model_itself(value: Any) -> bool:
    return not isinstance(value, _NO_VALUE) and any(callable(getattr(value, name, None)) for name in _OF_MODELS)


def _inner(value: Any) -> Any:
    return None if isinstance(value, _NO_VALUE) else getattr(value, "model", None)


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        yield from model.named_modules()


def _hook(model: Any) -> str | None:
    """Return the name of a forward hook that the user hung on a model or on one of its modules."""
    for place, module in _modules(model):
        for hook in (hook for kind in _HOOKS for hook in getattr(module, kind).values()):
            function = getattr(hook, "func", hook)  # functools.partial
            package = (getattr(function, "__module__", None) or "").partition(".")[0]
            if package not in _KNOWN_HOOKS:
                name = getattr(function, "__qualname__", type(function).__qualname__)
                return f"{name} on {place}" if place else str(name)
    return None


def _generation(model: Any) -> str | None:
    """Return a digest of how a model generates; None where it does not say it."""
    to_dict = getattr(getattr(model, "generation_config", None), "to_dict", None)
    if not callable(to_dict):
        return None
    said = {name: value for name, value in to_dict().items() if name != "transformers_version"}
    return f"generation {_short(json.dumps(said, sort_keys=True, default=lambda value: type(value).__qualname__))}"


def _settings(model: Any) -> str | None:
    """Return a digest of the plain attributes of a model's modules, without what these note for themselves; None of other models."""
    found: list[Any] = []
    for place, module in _modules(model):
        for name, value in sorted(vars(module).items()):
            if (name[:1] == "_" and name not in _COUNTED_NOTES) or any(part in name for part in _OWN_NOTES):
                continue
            try:
                found.append((place, name, digest(plain(value)).hex()))
            except (NotPlainError, UnknownContentError):
                continue
    return f"settings {_short(repr(found))}" if found else None


def _short(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


def _weights(model: Any) -> str | None:
    """Return a digest of some values of each weight; None where there are none to read: another process or a disk holds them."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return None
    told, read = blake2b(digest_size=_DIGEST_BYTES), False
    try:
        with torch.no_grad(), torch_memory.on_host():
            for name, module in model.named_modules():
                for own, weight in _stored(module):
                    told.update(f"{name}.{own} {weight.dtype} {tuple(weight.shape)}".encode())
                    values = weight.detach().reshape(-1)
                    values = values[:: max(1, values.numel() // _SAMPLED)].to("cpu").contiguous()
                    told.update(values.view(torch.uint8).numpy().tobytes())
                    read = True
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # on the meta device, of a layout without places
        return None
    return f"weights {told.hexdigest()}" if read else None


def _stored(module: Any) -> list[tuple[str, Any]]:
    """Return the weights of a module itself, as a checkpoint has them: no caches and no tables that are computed."""
    buffers = {name: held for name, held in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return [(name, weight) for name, weight in {**module._parameters, **buffers}.items() if weight is not None]


def _files(folder: Path) -> str | None:
    """Return a digest of names, sizes and times of the files in a model's folder; None where its name is none of a folder."""
    try:
        files = sorted((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    except OSError:
        return None
    return f"files {_short(repr([(name, found.st_size, found.st_mtime_ns) for name, found in files]))}"
