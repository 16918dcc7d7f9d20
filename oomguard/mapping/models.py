"""What a model is, where the user does not say it: its name, and values of its weights, which training and a new download change."""

from __future__ import annotations

import sys
import types
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from oomguard.observe import torch_memory

# What a model has that a list of prompts, a lock or a logger has not.
_OF_MODELS: Final = ("parameters", "generate")
_NO_VALUE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# Values that are read of each weight: training changes nearly all, and reading all of them would take as long as loading them.
_SAMPLED: Final = 64
_DIGEST_BYTES: Final = 8


class UnnamedModelError(TypeError):
    """A model of which nothing tells what it is; the message is its type."""


def is_model(value: Any) -> bool:
    """Return whether a value is a model, or holds one as a pipeline of transformers does."""
    return _is_model_itself(value) or _is_model_itself(_inner(value))


def model_name(value: Any) -> str:
    """Return the name and revision of a model, with a digest of values of its weights, or of its folder's files.

    Raises:
        UnnamedModelError: it has no name.
    """
    model = value if _is_model_itself(value) else _inner(value)
    path = getattr(model, "name_or_path", None)
    if not isinstance(path, str) or not path:
        raise UnnamedModelError(type(model).__qualname__)
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    parts = (path, revision, _weights(model) or _files(Path(path)))
    return " ".join(str(part) for part in parts if part)


def _is_model_itself(value: Any) -> bool:
    return not isinstance(value, _NO_VALUE) and any(callable(getattr(value, name, None)) for name in _OF_MODELS)


def _inner(value: Any) -> Any:
    return None if isinstance(value, _NO_VALUE) else getattr(value, "model", None)


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
    told = repr([(name, found.st_size, found.st_mtime_ns) for name, found in files]).encode("utf-8", "surrogatepass")
    return f"files {blake2b(told, digest_size=_DIGEST_BYTES).hexdigest()}"
