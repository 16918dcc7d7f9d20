"""Read the file of a stack: the GPUs of a machine, and the command of each service."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import UsageError
from oomguard.core.files import read_regular
from oomguard.planning.stack import StackGpu, StartOn
from oomguard.planning.start import StartRequest, find_gpu

_HINT: Final = "gpus: [{name: RTX 4090, count: 2}] and services: {chat: vllm serve Qwen/Qwen3-8B}"
# A wrong file, such as a checkpoint, must not fill the memory.
_MAX_BYTES: Final = 1_000_000
_MOST_GPUS: Final = 64


def read_stack(
    path: str, request_of: Callable[[list[str]], StartRequest], options: Mapping[str, Any]
) -> tuple[list[StackGpu], dict[str, StartOn]]:
    """Read a stack.

    Args:
        path: the YAML file.
        request_of: reads the words after ``oomguard plan``.
        options: the options of the command line; they give the version, and the GPU if the file
            names none.

    Raises:
        InputError: the file cannot be read.
        UsageError: it is not a stack; the message names the wrong part.
    """
    import yaml

    try:
        found = yaml.safe_load(read_regular(Path(path), _MAX_BYTES))
    # Nested brackets in a short file can exceed the stack of Python.
    except (yaml.YAMLError, RecursionError) as error:
        what = str(error).splitlines()[0]
        raise UsageError(f"{path} is not YAML: {what}", hint=_HINT) from None
    if not isinstance(found, dict) or not isinstance(found.get("services"), dict):
        raise UsageError(f"{path} has no services by name", hint=_HINT)
    unknown = sorted(set(map(str, found)) - {"gpus", "services", "engine_version"})
    if unknown:
        raise UsageError(f"{path} has the unknown key {unknown[0]}", hint=_HINT)
    gpus: list[StackGpu] = []
    for row in found.get("gpus") or [None]:
        gpus += _gpus(path, row, options, len(gpus))
    version = options.get("engine_version") or found.get("engine_version")
    # It comes last, so it overrides the version of a command.
    more = [] if version is None else ["--engine-version", str(version)]
    starts = {}
    for name, text in found["services"].items():
        words = _words(path, str(name), text)
        starts[str(name)] = _reader([*words, *more], request_of)
    return gpus, starts


def _gpus(path: str, row: Any, options: Mapping[str, Any], first: int) -> list[StackGpu]:
    """Return the GPUs of one row, or the one of the options or of this machine without rows."""
    if row is None:
        gpu = find_gpu(options.get("gpu_memory"), options.get("gpu"), options.get("gpu_name"))
        return [StackGpu(options.get("gpu") or 0, gpu.total_bytes, gpu.name)]
    if not isinstance(row, dict) or not set(row) <= {"name", "memory", "count"}:
        raise UsageError(f"{path}: a GPU has name, memory and count only", hint=_HINT)
    count = row.get("count", 1)
    if not isinstance(count, int) or not 0 < count <= _MOST_GPUS - first:
        raise UsageError(f"{path}: count is {count!r}, not 1 to {_MOST_GPUS} GPUs", hint=_HINT)
    gpu = find_gpu(row.get("memory"), None, row.get("name"))
    return [StackGpu(first + number, gpu.total_bytes, gpu.name) for number in range(count)]


def _words(path: str, name: str, text: Any) -> list[str]:
    try:
        words = shlex.split(text) if isinstance(text, str) else []
    except ValueError as error:
        raise UsageError(f"{path}: the command of {name}: {error}", hint=_HINT) from None
    # The words follow ``oomguard plan``, which takes the model first.
    if words[:2] == ["vllm", "serve"]:
        words = words[2:]
    if not words:
        raise UsageError(f"{path}: the command of {name} names no model", hint=_HINT)
    return words


def _reader(words: list[str], request_of: Callable[[list[str]], StartRequest]) -> StartOn:
    def start_on(gpu: StackGpu) -> StartRequest:
        size = ["--gpu-memory", str(gpu.total_bytes)]
        if gpu.name is not None:
            size += ["--gpu-name", gpu.name]
        return request_of([*words, *size])

    return start_on
