"""A record that somebody contributed, read as a stranger's: refused where it names anybody, or where its numbers cannot be a start's.

``contribution.py`` writes such records; benchmarks/fit_constants.py fits with those that are read here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomguard.budgeting.contribution import PRINTED_GIB, SCHEMA, without_names
from oomguard.errors import InputError, SettingError
from oomguard.memory.constants import engine_version
from oomguard.surfaces import surfaces

_FIELDS: Final = frozenset({"schema", "vllm_version", "gpu", "gpu_total_gib", "config", "flags", "printed"})
_TOKENS: Final = "kv_tokens"
# Beyond any device and any cache.
_MOST_GIB, _MOST_TOKENS = 4096, 10**12
_ENGINE: Final = "vllm"
# What a value may be: a number, an engine's own word, an object of both.
_VALUE: Final = re.compile(r"[\w.+-]{1,24}")
_GPU: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 +-]{0,40}")
_HINT: Final = "oomguard report START.log writes such records"


def read_record(line: str, where: str) -> dict[str, Any]:
    """Return a contributed record.

    Args:
        line: one line of JSON.
        where: its file and line, for messages.

    Raises:
        InputError: it is no such record, names somebody or something, or has numbers that no start has.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON: {error}", hint=_HINT) from None
    problem = next(_problems(record), None)
    if problem is not None:
        raise InputError(f"{where}: {problem}", hint=_HINT)
    found: dict[str, Any] = record
    return found


def _problems(record: Any) -> Iterator[str]:
    if not isinstance(record, Mapping) or set(record) != _FIELDS:
        fields = sorted(set(record) ^ _FIELDS) if isinstance(record, Mapping) else []
        yield f"not a record of a start: {', '.join(map(str, fields)) or 'no object'} missing or unknown"
        return
    if record["schema"] != SCHEMA:
        yield f"schema is {record['schema']!r}, not {SCHEMA}"
    try:
        engine_version(str(record["vllm_version"]))
    except SettingError:
        yield "vllm_version is no version"
    gpu, total = record["gpu"], record["gpu_total_gib"]
    if gpu is not None and not (isinstance(gpu, str) and _GPU.fullmatch(gpu)):
        yield "gpu is no GPU's name"
    if not _is_number(total) or not 0 < total <= _MOST_GIB:
        yield f"gpu_total_gib is {total!r}"
        return
    if not isinstance(record["config"], Mapping) or without_names(record["config"]) != record["config"]:
        yield "config holds texts that are no engine's words: they may be somebody's"
    yield from _of_flags(record["flags"])
    yield from _of_printed(record["printed"], total)


def _of_flags(flags: Any) -> Iterator[str]:
    if not isinstance(flags, list) or not all(isinstance(word, str) for word in flags):
        yield "flags is no list of words"
        return
    own = surfaces(_ENGINE).values()
    known = {flag for one in own for flag in (*one.flags, one.off_flag, *(inside for inside, _ in one.inside))}
    for word in flags:
        if word.startswith("--"):
            if word not in known:
                yield "flags has one that is no setting of the memory model"
        elif not _VALUE.fullmatch(word) and not _is_plain_object(word):
            yield "flags has a value that is neither a number nor an engine's word: it may be somebody's"


def _is_plain_object(text: str) -> bool:
    """Whether a text is an object of numbers and short words."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(held, dict) and all(
        _VALUE.fullmatch(name) and (_is_number(value) or (isinstance(value, str) and _VALUE.fullmatch(value)))
        for name, value in held.items()
    )


def _of_printed(printed: Any, total_gib: float) -> Iterator[str]:
    if not isinstance(printed, Mapping) or not set(printed) <= {*PRINTED_GIB, _TOKENS}:
        yield "printed has figures that no start prints"
        return
    for name, value in printed.items():
        most = _MOST_TOKENS if name == _TOKENS else total_gib
        if not _is_number(value) or not 0 <= value <= most:
            yield f"printed.{name} is {value!r} on a device of {total_gib} GiB"
    parts = [printed[name] for name in ("weights_gib", "available_kv_gib") if _is_number(printed.get(name))]
    if sum(parts) > total_gib:
        yield f"printed weights and KV cache are {sum(parts):.2f} GiB on a device of {total_gib} GiB"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
