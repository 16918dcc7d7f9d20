"""Make records printable: mask every text, and remove terminal escapes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from oomguard.core.incident import EngineStart, Incident
from oomguard.core.redact import is_masking, mask, mask_command, mask_value, unmasked
from oomguard.core.text import strip_escapes

_PROC: Final = Path("/proc")
_SHOWN_CHARS: Final = 120
_SHOWN_HOLDERS: Final = 3


def process_label(pid: int) -> str:
    """Return a process's id and its command, with secrets masked."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        name = (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return f"pid {pid}"
    command = (
        shlex.join(mask_command([word.decode(errors="replace") for word in words if word]))
        or f"[{name}]"
    )
    return (
        f"pid {pid} ({command if len(command) <= _SHOWN_CHARS else command[:_SHOWN_CHARS] + '…'})"
    )


def process_list(numbers: Sequence[int], has: Callable[[int], str] = lambda _: "") -> str:
    """Return the labels of the first few processes, each followed by ``has(pid)``."""
    shown = [f"{process_label(pid)}{has(pid)}" for pid in numbers[:_SHOWN_HOLDERS]]
    more = len(numbers) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


T = TypeVar("T")


def masked(record: T) -> T:
    """Return a copy of a record, text, list or mapping with every text masked."""
    return cast("T", _rewrite(record, mask))


def drawn(record: T) -> T:
    """Return a copy for a screen or page: masked, without escapes and control characters."""
    return cast("T", _rewrite(record, lambda text: mask(plain(text))))


def record_repr(record: Any) -> str:
    """Return a record's ``repr``, masked; secret settings are masked at any depth."""
    if is_masking():
        shown = masked(record)
    else:
        shown = record
    with unmasked():  # the nested records are masked already
        texts = []
        for field in fields(shown):
            if field.repr:
                texts.append(f"{field.name}={getattr(shown, field.name)!r}")
        values = ", ".join(texts)
    return f"{type(record).__qualname__}({values})"


def plain(text: str) -> str:
    """Remove terminal escapes and control characters from a text.

    Line breaks stay; lone surrogates become ``U+FFFD``.
    """
    return well_formed("\n".join(map(strip_escapes, text.split("\n"))))


def well_formed(text: str) -> str:
    """Replace lone surrogates, which no encoding can write, by ``U+FFFD``."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _rewrite(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in fields(value):
            if field.init:
                changes[field.name] = _rewrite(getattr(value, field.name), change)
        if isinstance(
            name := changes.get("name"), str
        ):  # the name of a fact, a setting or a row may say that its value is secret
            for key, item in changes.items():
                if key == "value":
                    changes[key] = mask_value(name, item)
                elif is_dataclass(item) and not isinstance(item, type) and hasattr(item, "value"):
                    changes[key] = replace(item, value=mask_value(name, item.value))
        return replace(value, **changes)
    if isinstance(value, Mapping):
        items = {}
        for key, item in value.items():
            items[_rewrite(key, change)] = _mask_by_name(key, _rewrite(item, change))
        return items
    if isinstance(value, tuple) and hasattr(
        value, "_make"
    ):  # a NamedTuple takes its fields one by one
        return value._make(_rewrite(item, change) for item in value)
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrite(item, change) for item in value)
    return value


def _mask_by_name(name: Any, value: Any) -> Any:
    if isinstance(name, str) and isinstance(value, str):
        return mask_value(name, value)
    return value


def engine(record: Incident | EngineStart) -> str:
    """Return the framework and its version; "" for an unknown framework."""
    if record.framework == "unknown":
        return ""
    if record.framework_version:
        return f"{record.framework} {record.framework_version}"
    return record.framework
