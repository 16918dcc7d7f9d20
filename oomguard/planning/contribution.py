"""Turn a measured start into a record that its user may share, without names, paths or hosts.

benchmarks/fit_constants.py reads the same fields and fits constants on such records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import InputError, SettingError, UsageError
from oomguard.core.facts import GIB, format_gib, number_of
from oomguard.core.incident import EngineStart
from oomguard.core.settings import surfaces
from oomguard.estimate.constants import engine_version
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.calibration import checked_correction, settings_of_start
from oomguard.estimate.start.start import VllmSettings, known_gpu
from oomguard.planning.start import serve_words, start_of_log

SCHEMA: Final = 1
_PRINTED: Final = {
    "model_weights_bytes": "weights_gib",
    "kv_cache_available_bytes": "available_kv_gib",
    "peak_activation_bytes": "peak_activation_gib",
    "non_torch_bytes": "non_torch_gib",
    "cudagraph_bytes": "graph_gib",
}
PRINTED_GIB: Final = frozenset(_PRINTED.values())
# The texts of these fields describe a model. Any other text in a configuration may be private.
_WORDS: Final = frozenset(
    {
        *(
            "architectures",
            "model_type",
            "torch_dtype",
            "dtype",
            "hidden_act",
            "hidden_activation",
            "layer_types",
        ),
        *(
            "quant_method",
            "quant_algo",
            "kv_cache_quant_algo",
            "fmt",
            "scale_fmt",
            "type",
            "strategy",
            "format",
        ),
        *(
            "rope_type",
            "expert_dtype",
            "version",
            "layers_block_type",
            "hybrid_override_pattern",
            "mlp_layer_types",
        ),
    }
)
_WORD: Final = re.compile(r"[\w.+*-]{1,60}")
_FIELD: Final = re.compile(r"[a-zA-Z_]\w{0,60}")


def contribution(log: str, model: str | None = None) -> dict[str, Any]:
    """Return the record of the last measured start in a log.

    Args:
        log: vLLM's start-up log.
        model: the model's folder, its config.json or its name on the hub; None uses the log's model
            if it is on this machine.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        InputError: the log has no measured start or absurd numbers, or its model does not exist.
        SettingError: the start had another model.
        UsageError: the log names no model on this machine.
    """
    start = start_of_log(log)
    settings = settings_of_start(start)
    name = Path(log).name
    printed = _printed(start, settings, name)
    files = find_model(_model(start, model, name))
    read = read_model(files, dtype=settings.dtype, quantization=settings.quantization)
    checked_correction(start, settings, read, name)
    named = set(start.settings) & {field.name for field in fields(settings)}
    gpu = known_gpu(settings)
    return {
        "schema": SCHEMA,
        "vllm_version": str(settings.version),
        "gpu": None if gpu is None else gpu["name"],
        "gpu_total_gib": round(settings.gpu_total_bytes / GIB, 2),
        "config": anonymize(files.config),
        "flags": serve_words(settings, named),
        "printed": printed,
    }


def _model(start: EngineStart, given: str | None, name: str) -> str:
    setting = start.settings.get("model")
    if given is not None:
        return given
    if setting is None or not Path(str(setting.value)).exists():
        raise UsageError(
            f"{name} names no model that is on this machine", hint="name the model: --model FOLDER"
        )
    return str(setting.value)


def _printed(start: EngineStart, settings: VllmSettings, name: str) -> dict[str, float]:
    """Return the figures in GiB.

    Raises:
        InputError: they cannot belong to one start on this device.
    """
    found = {}
    for fact, key in _PRINTED.items():
        size = number_of(start.facts, fact)
        if size is None:
            continue
        if not 0 <= size <= settings.gpu_total_bytes:
            total = format_gib(settings.gpu_total_bytes)
            raise InputError(
                f"{name}: {fact} is {format_gib(size)} on a device of {total}",
                hint="give the log of one start",
            )
        found[key] = round(size / GIB, 3)
    tokens = number_of(start.facts, "kv_cache_capacity_tokens")
    if tokens is None:
        return found
    return {**found, "kv_tokens": round(tokens)}


def anonymize(value: Any, field: str = "") -> Any:
    """Return a configuration without private texts.

    Numbers stay, and so do the words of known fields.
    """
    if isinstance(value, Mapping):
        fields: dict[str, Any] = {}
        for name, inner in value.items():
            # A key that is no plain name can itself be a private text, such as a path.
            if not _FIELD.fullmatch(str(name)):
                continue
            public = anonymize(inner, name)
            if public is not None:
                fields[name] = public
        return fields
    if isinstance(value, list):
        entries = []
        for one in value:
            public = anonymize(one, field)
            if public is not None:
                entries.append(public)
        return entries
    if isinstance(value, str):
        if field in _WORDS and _WORD.fullmatch(value):
            return value
        return None
    return value


# A contributed record is untrusted. oomguard rejects it if it names anyone, or if its numbers
# cannot belong to a start.
#
# ``contribution`` above writes such records; benchmarks/fit_constants.py fits constants with them.

_FIELDS: Final = frozenset(
    {"schema", "vllm_version", "gpu", "gpu_total_gib", "config", "flags", "printed"}
)
_TOKENS: Final = "kv_tokens"
# Larger than any device and any cache.
_MOST_GIB = 4096
_MOST_TOKENS = 10**12
_ENGINE: Final = "vllm"
# A value is a number, an engine's own word, or an object of both.
_VALUE: Final = re.compile(r"[\w.+-]{1,24}")
_GPU: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 +-]{0,40}")
_HINT: Final = "create a record with: oomguard contribute START.log"


def read_record(line: str, where: str) -> dict[str, Any]:
    """Parse and check a contributed record.

    Args:
        line: one line of JSON.
        where: its file and line, for messages.

    Raises:
        InputError: it is not a record, contains private texts, or has impossible numbers.
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
        if isinstance(record, Mapping):
            fields = sorted(set(record) ^ _FIELDS)
        else:
            fields = []
        yield (
            f"not a record of a start: {', '.join(map(str, fields)) or 'no object'} "
            "missing or unknown"
        )
        return
    if record["schema"] != SCHEMA:
        yield f"schema is {record['schema']!r}, expected {SCHEMA}"
    try:
        engine_version(str(record["vllm_version"]))
    except SettingError:
        yield "vllm_version is not a version"
    gpu = record["gpu"]
    total = record["gpu_total_gib"]
    if gpu is not None and not (isinstance(gpu, str) and _GPU.fullmatch(gpu)):
        yield "gpu is not the name of a GPU"
    if not _is_number(total) or not 0 < total <= _MOST_GIB:
        yield f"gpu_total_gib is {total!r}"
        return
    if not isinstance(record["config"], Mapping) or anonymize(record["config"]) != record["config"]:
        yield "config has texts that are not an engine's words and may be private"
    yield from _of_flags(record["flags"])
    yield from _of_printed(record["printed"], total)


def _of_flags(flags: Any) -> Iterator[str]:
    if not isinstance(flags, list) or not all(isinstance(word, str) for word in flags):
        yield "flags is not a list of words"
        return
    known: set[str | None] = set()
    for spelling in surfaces(_ENGINE).values():
        known |= {*spelling.flags, spelling.off_flag}
        known |= {inside for inside, _ in spelling.inside}
    for word in flags:
        if word.startswith("--"):
            if word not in known:
                yield "flags has one that is not a setting of the estimator"
        elif not _VALUE.fullmatch(word) and not _is_plain_object(word):
            yield (
                "flags has a value that is neither a number nor an engine's word and may be private"
            )


def _is_plain_object(text: str) -> bool:
    """Return whether a text is an object of numbers and short words."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(held, dict):
        return False
    for name, value in held.items():
        is_word = isinstance(value, str) and _VALUE.fullmatch(value)
        if not _VALUE.fullmatch(name) or not (is_word or _is_number(value)):
            return False
    return True


def _of_printed(printed: Any, total_gib: float) -> Iterator[str]:
    if not isinstance(printed, Mapping) or not set(printed) <= {*PRINTED_GIB, _TOKENS}:
        yield "printed has numbers that no start prints"
        return
    for name, value in printed.items():
        most = _MOST_TOKENS if name == _TOKENS else total_gib
        if not _is_number(value) or not 0 <= value <= most:
            yield f"printed.{name} is {value!r} on a device of {total_gib} GiB"
    # Both are in memory at the same time; other parts can peak at other times.
    together = 0
    for name in ("weights_gib", "available_kv_gib"):
        if _is_number(printed.get(name)):
            together += printed[name]
    if together > total_gib:
        sizes = f"printed weights and KV cache are {together:.2f} GiB"
        yield f"{sizes} on a device of {total_gib} GiB"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
