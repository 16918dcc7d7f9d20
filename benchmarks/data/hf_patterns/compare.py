"""Compare two results type by type: shapes, order, dtype and values."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch

TOLERANCE = 1e-5


def differences(want: Any, got: Any, exact: bool, path: str = "result") -> list[str]:
    """Where ``got`` differs from ``want``; empty where it does not."""
    if type(want) is not type(got):
        return [f"{path}: type {type(want).__name__} became {type(got).__name__}"]
    if isinstance(want, torch.Tensor):
        return _arrays(want, got, exact, path, torch.allclose)
    if isinstance(want, numpy.ndarray):
        if want.dtype == object:
            return differences(want.tolist(), got.tolist(), exact, path)
        return _arrays(want, got, exact, path, numpy.allclose)
    if isinstance(want, Mapping):
        if list(want) != list(got):
            return [f"{path}: keys {list(want)} became {list(got)}"]
        return [d for key in want for d in differences(want[key], got[key], exact, f"{path}[{key!r}]")]
    if isinstance(want, (list, tuple)):
        if len(want) != len(got):
            return [f"{path}: length {len(want)} became {len(got)}"]
        pairs = enumerate(zip(want, got, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, exact, f"{path}[{i}]")]
    if isinstance(want, (float, numpy.floating)):
        same = want == got or (math.isnan(want) and math.isnan(got)) or abs(want - got) <= TOLERANCE * (1 + abs(want))
        if same:
            return []
        return [f"{path}: {want!r} became {got!r}"]
    return _objects(want, got, exact, path)


def _objects(want: Any, got: Any, exact: bool, path: str) -> list[str]:
    """Caches, data frames, dataclasses and plain values."""
    if type(want).__name__ == "DataFrame":
        return differences(want.to_dict("list"), got.to_dict("list"), exact, path)
    if hasattr(want, "layers") and hasattr(want, "get_seq_length"):
        both = [[[getattr(x, k) for x in c.layers] for k in ("keys", "values")] for c in (want, got)]
        return differences(both[0], both[1], exact, f"{path}.layers")
    if hasattr(want, "self_attention_cache"):
        names = ("self_attention_cache", "cross_attention_cache")
        return [d for n in names for d in differences(getattr(want, n), getattr(got, n), exact, f"{path}.{n}")]
    if dataclasses.is_dataclass(want):
        names = [f.name for f in dataclasses.fields(want)]
        return [d for n in names for d in differences(getattr(want, n), getattr(got, n), exact, f"{path}.{n}")]
    if want == got:
        return []
    return [f"{path}: {str(want)[:80]!r} became {str(got)[:80]!r}"]


def _arrays(want: Any, got: Any, exact: bool, path: str, close: Any) -> list[str]:
    """Tensors or arrays, whose shape and dtype must be the same too."""
    if tuple(want.shape) != tuple(got.shape):
        return [f"{path}: shape {tuple(want.shape)} became {tuple(got.shape)}"]
    if want.dtype != got.dtype:
        return [f"{path}: dtype {want.dtype} became {got.dtype}"]
    if getattr(want, "device", None) != getattr(got, "device", None):
        return [f"{path}: device {want.device} became {got.device}"]
    if getattr(want, "requires_grad", False) != getattr(got, "requires_grad", False):
        return [f"{path}: requires_grad {want.requires_grad} became {got.requires_grad}"]
    kind = str(want.dtype)
    if exact or "int" in kind or "bool" in kind or "<U" in kind:
        same = bool((want == got).all())
    else:
        same = bool(close(want, got, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    if same:
        return []
    wrong = want != got
    if want.ndim:
        rows = sorted({int(i) for i in (wrong.nonzero()[:, 0] if isinstance(want, torch.Tensor) else wrong.nonzero()[0])})
    else:
        rows = []
    return [f"{path}: values differ, shape {tuple(want.shape)}, rows {rows[:12]}"]
