"""Make records fit to show: mask every text in them, and for a screen take out terminal escapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from oomguard.escapes import strip_escapes
from oomguard.report.mask import mask, mask_value

T = TypeVar("T")


def masked(record: T) -> T:
    """Return a copy of a record (or of texts, lists and mappings of records) with every text in it masked."""
    return cast("T", _rewrite(record, mask))


def drawn(record: T) -> T:
    """Return a copy fit for a screen or a page: masked, and without escapes, control characters and lone surrogates."""
    return cast("T", _rewrite(record, lambda text: mask(plain(text))))


def plain(text: str) -> str:
    """Return a text without terminal escapes and control characters; line breaks stay, lone surrogates become ``U+FFFD``."""
    return well_formed("\n".join(strip_escapes(line) for line in text.split("\n")))


def well_formed(text: str) -> str:
    """Replace lone surrogates, which no encoding can write, by ``U+FFFD``."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _rewrite(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: _rewrite(getattr(value, field.name), change) for field in fields(value) if field.init}
        if "name" in changes and "value" in changes:  # a fact or a setting: its name may say that it is a secret
            changes["value"] = mask_value(changes["name"], changes["value"])
        return replace(value, **changes)
    if isinstance(value, Mapping):
        return {_rewrite(key, change): _rewrite(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrite(item, change) for item in value)
    return value
