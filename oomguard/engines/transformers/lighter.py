"""A checkpoint's weights in fewer bits: 16 where they have 32, and 8 or 4 where a library for that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.place import Place
from oomguard.engines.transformers.weight_bytes import weights_of
from oomguard.memory.model.files import ModelFiles
from oomguard.remedy.modelled_load import Lighter
from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("lighter_weights.toml")
_HALF: Final = "bfloat16"  # the range of float32: nothing overflows
_BITS: Final = (8, 4)


@dataclass(frozen=True, slots=True)
class Way:
    """The weights in fewer bits: what the plan says of it, and what makes the argument of ``from_pretrained``."""

    told: Lighter
    config: Callable[[], Any]


def lighter_weights(files: ModelFiles | None, dtype: str, place: Place, *, is_quantized: bool) -> tuple[Way, ...]:
    """Return the ways to load a checkpoint in fewer bits, the least costly first.

    Args:
        files: the checkpoint's; None where they are not known.
        dtype: the data type that the program asks for, ``auto`` for the checkpoint's own.
        place: where the weights go.
        is_quantized: whether the program quantizes them itself.
    """
    own = files is not None and any("quantization_config" in part for part in (files.config, *_parts(files.config)))
    if is_quantized or own:
        return ()
    return (*_half(files, dtype), *(_quantized(bits, files, dtype, place) for bits in _BITS))


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (part for part in config.values() if isinstance(part, Mapping))


def _half(files: ModelFiles | None, dtype: str) -> Iterator[Way]:
    whole = None if files is None else weights_of(files, dtype)
    half = None if files is None else weights_of(files, _HALF)
    if whole is not None and half is not None and half.total_bytes < whole.total_bytes:
        yield Way(Lighter("dtype", _HALF, f'dtype="{_HALF}"', half.total_bytes), lambda: None)


def _quantized(bits: int, files: ModelFiles | None, dtype: str, place: Place) -> Way:
    rows = [row for row in _rows() if row["bits"] == bits and not (row["cuda"] and place.is_simulated)]
    row = next((row for row in rows if _is_installed(row.get("module", row["package"]))), None)
    if row is None:
        names = ", ".join(row["package"] for row in rows)
        why = f"weights of {bits} bits: none of {names} is installed: pip install {rows[0]['package']}"
        return Way(Lighter("quantization", f"{bits}bit", None, None, why), lambda: None)
    return Way(
        Lighter("quantization", f"{row['package']}-{bits}bit", _as_kwarg(row), _need_bytes(files, dtype, row)),
        lambda: _config(row),
    )


def _need_bytes(files: ModelFiles | None, dtype: str, row: Mapping[str, Any]) -> int | None:
    """Return what they take while they are loaded: all of them in fewer bits, and the largest one as it is in the file."""
    if files is None or files.parameters is None:
        return None
    half = _HALF if dtype == "auto" else dtype
    found = weights_of(files, half, row["as_counted"])
    return None if found is None else found.total_bytes + max((p.bytes for p in files.parameters), default=0)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of optimum.quanto, where there is no optimum
        return False


def _config(row: Mapping[str, Any]) -> Any:
    import transformers

    made = {
        name: getattr(importlib.import_module(module), kind)() for name, (module, kind) in row.get("made", {}).items()
    }
    return getattr(transformers, row["config"])(**row.get("options", {}), **made)


def _as_kwarg(row: Mapping[str, Any]) -> str:
    given = [f"{name}={value!r}" for name, value in row.get("options", {}).items()]
    given += [f"{name}={kind}()" for name, (_, kind) in row.get("made", {}).items()]
    return f"quantization_config={row['config']}({', '.join(given)})"


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = next(iter(read_tables("lighter weights", [_FILE]).values()))["way"]
    return rows
