"""Store the measurements of one start and use them instead of the priors.

A calibration applies to one engine version, GPU and model. A start's printed parts add up:
requested = weights + activation peak + non-torch + CUDA graphs (if the version counts them) + KV
cache. The correction is their difference to the model's own sum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import ConfigError, InputError, OomguardError, SettingError
from oomguard.core.facts import GIB, format_gib, number_of
from oomguard.core.files import OWN_FOLDER, read_regular, state_file, write_whole
from oomguard.core.incident import EngineStart
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.model.shape import ModelShape
from oomguard.estimate.start.fixed_parts import counts_graphs
from oomguard.estimate.start.start import Correction, StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start

# Check that a measured start belongs to one model, by its weights and cache, and to one engine.

# vLLM prints totals and requests with two decimals.
_TOTAL_SLACK_BYTES: Final = 2e-2 * GIB
# A computed size may be off by this much; another model's weights differ by more.
_SAME_WEIGHTS_RATIO: Final = 0.1
# The tokens in a printed pool may be off by this much, because its size has two decimals.
_SAME_TOKENS_RATIO: Final = 0.05


def refuse_other_start(start: EngineStart, own: VllmSettings, model: Model, name: str) -> None:
    """Raise SettingError for a start of another model, with a draft, or of several engines.

    Args:
        start: the measured start.
        own: the settings of that start.
        model: the model, read with those settings.
        name: the start's name in messages, usually its log file.
    """
    if "speculative" in start.facts and start.facts["speculative"].value:
        raise SettingError(
            f"{name} is a log of a start with a draft model",
            hint="give the log of a start without one",
        )
    desired = number_of(start.facts, "desired_bytes")
    asked = own.gpu_total_bytes * own.gpu_memory_utilization
    if desired is not None:
        slack = start.facts["desired_bytes"].slack + _TOTAL_SLACK_BYTES
    else:
        slack = 0.0
    if desired is not None and own.kv_cache_memory_bytes is None and abs(desired - asked) > slack:
        raise SettingError(
            f"{name} shows several engines: {format_gib(desired)} requested, but its "
            f"settings request {format_gib(asked)}",
            hint="give the log of one start",
        )
    printed = number_of(start.facts, "model_weights_bytes")
    weights = budget_start(model, replace(own, device_free_bytes=None)).weights_bytes
    if printed is not None and abs(printed - weights) > _SAME_WEIGHTS_RATIO * weights:
        raise SettingError(
            f"{name} was measured on a different model ({format_gib(printed)} of weights; "
            f"this model: {format_gib(weights)})",
            hint="give the log of a start of this model",
        )
    _check_tokens(start, own, model, name)


def _check_tokens(start: EngineStart, own: VllmSettings, model: Model, name: str) -> None:
    """Raise SettingError if the printed pool does not match this model's tokens.

    Models of the same size can differ in this number.
    """
    pool = number_of(start.facts, "kv_cache_available_bytes")
    tokens = number_of(start.facts, "kv_cache_capacity_tokens")
    if not pool or not tokens or not model.exact or not start.settings_complete:
        return
    known = budget_start(
        model, replace(own, device_free_bytes=None, kv_cache_memory_bytes=round(pool))
    )
    slack = start.facts["kv_cache_available_bytes"].slack / pool
    if abs(tokens - known.kv_cache_tokens) > (_SAME_TOKENS_RATIO + slack) * tokens:
        raise SettingError(
            f"{name} was measured on a different model ({tokens:,.0f} tokens in "
            f"{format_gib(pool)}; this model: {known.kv_cache_tokens:,})",
            hint="give the log of a start of this model, with the settings of that start",
        )


_SCHEMA: Final = 1
_MAX_BYTES: Final = 16_000_000
# Engines print a device's total with two decimals, and a user may say 24 GiB for 23.6. Up to this
# ratio it is the same device.
_SAME_DEVICE_RATIO: Final = 0.05


def measured_start(starts: tuple[EngineStart, ...]) -> EngineStart:
    """Return the last start whose log shows the size of its KV cache.

    Raises:
        InputError: no start in the log does.
    """
    for start in reversed(starts):
        if "kv_cache_available_bytes" in start.facts and number_of(
            start.facts, "device_total_bytes"
        ):
            return start
    raise InputError(
        "the log has no vLLM start with both the device's size and the size of its KV cache",
        hint="give the log of a start at logging level INFO, from its first line",
    )


def settings_of_start(start: EngineStart) -> VllmSettings:
    """Return the settings of a measured start."""
    from oomguard.estimate.start.failed_start import settings_of

    total = number_of(start.facts, "device_total_bytes") or 0
    return settings_of(start.settings, start.facts, start.framework_version, round(total))


def correction_of(start: EngineStart, model: Model, source: str) -> Correction:
    """Return the difference between a measured start and the model's sum, part by part.

    Non-torch memory gets the remainder that no printed part explains.

    Args:
        start: the start, with the size of its KV cache.
        model: its model, read with the start's own settings.
        source: the origin, for the assumptions of a budget.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        SettingError: oomguard cannot estimate the start's settings.
    """
    settings = replace(settings_of_start(start), device_free_bytes=None)
    predicted = budget_start(model, settings)
    facts = start.facts

    def beyond(name: str, part_bytes: int) -> int:
        printed = number_of(facts, name)
        if printed is None:
            return 0
        return round(printed) - part_bytes

    if predicted.cudagraph_bytes:
        graphs = beyond("cudagraph_bytes", predicted.cudagraph_bytes)
    else:
        graphs = 0
    slack = 0.0
    for name in _USED:
        if name in facts:
            slack += facts[name].slack
    found = Correction(
        source,
        weights_bytes=beyond(
            "model_weights_bytes", predicted.weights_bytes + predicted.draft_weights_bytes
        ),
        peak_activation_bytes=beyond(
            "peak_activation_bytes",
            predicted.peak_activation_bytes + _graphs_within(start, predicted, model.shape),
        ),
        cudagraph_bytes=graphs,
        uncertainty_bytes=round(slack),
        max_num_seqs=predicted.settings.max_num_seqs or 0,
        max_num_batched_tokens=predicted.settings.max_num_batched_tokens or 0,
        enforce_eager=settings.enforce_eager,
    )
    if settings.kv_cache_memory_bytes is None:
        left = round(number_of(facts, "kv_cache_available_bytes") or 0)
        pool = budget_start(model, replace(settings, correction=found)).kv_cache_pool_bytes
        found = replace(found, non_torch_bytes=pool - left)
    return found


def _graphs_within(start: EngineStart, predicted: StartBudget, shape: ModelShape) -> int:
    """Return the CUDA graphs' part of the printed peak.

    The summary of weights and the rest includes the engine's estimate of the graphs. Logs rarely
    print that estimate, so the final size of the graphs replaces it. Source:
    https://github.com/vllm-project/vllm/pull/57983.
    """
    summed = "consumed_bytes" in start.facts and "non_torch_bytes" not in start.facts
    printed = number_of(start.facts, "cudagraph_bytes")
    counted = counts_graphs(predicted.settings, shape)
    if summed and counted and printed is not None and predicted.cudagraph_bytes:
        return round(printed)
    return 0


_USED: Final = ("kv_cache_available_bytes", "desired_bytes")


def apply_calibration(
    start: EngineStart,
    name: str,
    settings: VllmSettings,
    kept: Calibrations,
    read: Callable[[str, str | None], Model],
) -> VllmSettings:
    """Store a start's measurement, and correct matching settings by it.

    Args:
        start: the measured start.
        name: its name in messages, usually its log file.
        settings: the settings to correct.
        kept: the store of corrections.
        read: reads the model with the start's own data type and quantization.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        InputError: the correction cannot be stored.
        SettingError: the start had another model, or other ranks, data types or version than
            ``settings``.
    """
    model, own, correction = store_start(start, name, kept, read)
    asked = _of(model, settings)
    measured = _of(model, own)
    if not _same(asked, measured):
        other = []
        for key, value in asked.items():
            if key != "gpu_total_bytes" and value != measured[key]:
                other.append(key)
        raise SettingError(
            f"stored {name}, but it does not apply to this plan: "
            f"{', '.join(other) or 'the size of the GPU'} differs",
            hint="plan with the settings of that start",
        )
    return replace(settings, correction=correction)


def store_start(
    start: EngineStart, name: str, kept: Calibrations, read: Callable[[str, str | None], Model]
) -> tuple[Model, VllmSettings, Correction]:
    """Store a start's measurement; return its model, its settings and the correction.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        InputError: the correction cannot be stored.
        SettingError: the start had another model.
    """
    own = settings_of_start(start)
    model = read(own.dtype, own.quantization)
    correction = checked_correction(start, own, model, name)
    kept.keep(model, own, correction)
    return model, own, correction


def store_measurement(start: EngineStart, name: str, kept: Calibrations, session: str = "") -> bool:
    """Store the measurement of a model in a local folder; return whether it was stored.

    A folder without safetensors files stores nothing: oomguard would have to build its weights,
    which imports too much.
    """
    own = settings_of_start(start)
    folder = start.settings.get("model")
    if folder is None:
        named = None
    else:
        named = folder.value
    if (
        start.framework_version is None
        or own.pipeline_parallel_size > 1
        or not isinstance(named, str)
    ):
        return False
    from oomguard.estimate.start.failed_start import local_path

    path = local_path(named)
    if path is None:
        return False
    try:
        files = find_model(str(path))
        if files.parameters is None:
            return False
        model = read_model(files, dtype=own.dtype, quantization=own.quantization)
        if not model.exact or (model.encoder is not None and not start.settings_complete):
            return False
        learned = {"session": session, "model": named}
        kept.keep(
            model, own, checked_correction(start, own, model, name), learned if session else {}
        )
    except OomguardError:
        return False
    return True


def checked_correction(
    start: EngineStart, own: VllmSettings, model: Model, name: str
) -> Correction:
    """Return the correction of a start; raises SettingError for another model or a draft."""
    refuse_other_start(start, own, model, name)
    if start.framework_version:
        version = f"vLLM {start.framework_version}"
    else:
        version = "vLLM"
    return correction_of(start, model, f"a start of {version}, {name}")


class Calibrations:
    """Store corrections by engine version, GPU and model in the user's state folder."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_file("calibrations.json")

    def keep(
        self,
        model: Model,
        settings: VllmSettings,
        correction: Correction,
        learned: Mapping[str, str] | None = None,
    ) -> None:
        """Store a correction and replace an earlier one.

        Args:
            model: the model.
            settings: the start's settings.
            correction: the correction.
            learned: the session and the model's name if ``run`` learned it; None if a user gave it.

        Raises:
            InputError: the file cannot be written.
        """
        own = _of(model, settings)
        entries = []
        for entry in self.entries():
            if not _same(entry["of"], own):
                entries.append(entry)
        self.write([*entries, {"of": own, "correction": asdict(correction), **(learned or {})}])

    def write(self, entries: list[dict[str, Any]]) -> None:
        """Replace all entries of the file; raises InputError if it cannot be written."""
        text = json.dumps({"schema": _SCHEMA, "calibrations": entries}, indent=1)
        try:
            write_whole(self.path, text.encode(), folder_mode=OWN_FOLDER)
        except OSError as error:
            raise InputError(
                f"{self.path}: {error.strerror}", hint="set XDG_STATE_HOME to another folder"
            ) from None

    def find(self, model: Model, settings: VllmSettings) -> Correction | None:
        """Return the correction for this model, engine version and GPU.

        Returns None if there is none, or the file is unreadable.
        """
        wanted = _of(model, settings)
        try:
            entries = self.entries()
        except InputError:  # the priors apply instead, and a budget lists them
            return None
        for entry in entries:
            if _same(entry["of"], wanted):
                return Correction(**entry["correction"])
        return None

    def entries(self) -> list[dict[str, Any]]:
        """Return the file's entries, or nothing without a file.

        Raises:
            InputError: the file cannot be read.
            ConfigError: the file has unexpected content.
        """
        try:
            found = json.loads(read_regular(self.path, _MAX_BYTES))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(
                f"{self.path}: {error.strerror}", hint="plan with --no-calibration"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"the file cannot be read: {error}",
                path=str(self.path),
                hint="delete it, or plan with --no-calibration",
            ) from None
        if isinstance(found, dict) and found.get("schema") == _SCHEMA:
            entries = found.get("calibrations")
        else:
            entries = None
        if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
            raise ConfigError(
                "this is not a file of calibrations",
                path=str(self.path),
                hint="delete it, or plan with --no-calibration",
            )
        return entries


def _of(model: Model, settings: VllmSettings) -> dict[str, Any]:
    """Return the key of a correction.

    The model's configuration identifies it, because its folder may get another name.
    """
    config = json.dumps(model.shape.outer, sort_keys=True, default=str)
    key = {
        "engine": "vllm",
        "version": f"{settings.version.major}.{settings.version.minor}",
        "device": settings.device,
        "gpu_total_bytes": settings.gpu_total_bytes,
        "model": hashlib.sha256(config.encode()).hexdigest()[:16],
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "quantization": settings.quantization,
        "dtype": settings.dtype if settings.dtype in {"float32", "float"} else "16 bit",
        "data_parallel_size": settings.data_parallel_size,
        "enable_expert_parallel": settings.enable_expert_parallel,
        "speculative": settings.speculative_config is not None,
        "lora": settings.enable_lora,
        "limit_mm_per_prompt": settings.limit_mm_per_prompt if model.encoder is not None else None,
    }
    # Entries that earlier versions wrote lack these settings, so the key has them only when set.
    if settings.skip_mm_profiling:
        key["skip_mm_profiling"] = settings.skip_mm_profiling
    if model.encoder is not None and settings.mm_processor_kwargs:
        key["mm_processor_kwargs"] = settings.mm_processor_kwargs
    return key


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # Drivers report slightly different totals for the same GPU, so only the rest must be equal.
    rest = dict(one)
    other_rest = dict(other)
    a = rest.pop("gpu_total_bytes")
    b = other_rest.pop("gpu_total_bytes")
    return rest == other_rest and abs(a - b) <= _SAME_DEVICE_RATIO * max(a, b)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("of"), dict):
        return False
    if not isinstance(entry["of"].get("gpu_total_bytes"), int) or not isinstance(
        entry.get("correction"), dict
    ):
        return False
    correction = entry["correction"]
    if set(correction) != {field.name for field in fields(Correction)}:
        return False
    types = {"source": str, "enforce_eager": bool}
    return all(isinstance(value, types.get(name, int)) for name, value in correction.items())


# ``oomguard run`` can drop the calibrations that it learned itself. The user's own (``plan
# --calibrate``) stay.

# The end of a source from before sessions were stored with it.
_BY_RUN: Final = "oomguard run on "


def learned(
    kept: Calibrations, sessions: Collection[str] | None, model: str | None
) -> tuple[str, ...]:
    """Describe the learned calibrations of some sessions (None: any) or of a model, a line each."""
    lines = []
    for entry in kept.entries():
        if _is_of(entry, sessions, model):
            lines.append(_words(entry))
    return tuple(lines)


def forget(kept: Calibrations, sessions: Collection[str] | None, model: str | None) -> None:
    """Drop the calibrations that ``learned`` returns; raises InputError if writing fails."""
    entries = kept.entries()
    left = []
    for entry in entries:
        if not _is_of(entry, sessions, model):
            left.append(entry)
    if len(left) < len(entries):
        kept.write(left)


def _is_of(entry: dict[str, Any], sessions: Collection[str] | None, model: str | None) -> bool:
    if "session" not in entry and _BY_RUN not in entry["correction"]["source"]:
        return False
    if model is not None:
        named = str(entry.get("model", ""))
        return model in {named, str(Path(named).expanduser().resolve()) if named else ""}
    return sessions is None or entry.get("session") in sessions


def _words(entry: dict[str, Any]) -> str:
    of = entry["of"]
    where = f"{of.get('device') or 'a GPU'} of {format_gib(of['gpu_total_bytes'])}"
    return (
        f"calibration of {entry.get('model') or 'a model'} on {where} by "
        f"{entry['correction']['source']}"
    )


# vLLM's compile cache shows whether the next start compiles and so has a larger peak.
#
# A hash of the engine's version, the settings, the traced code and the environment names an entry,
# and only vLLM can compute it. Each entry also has the graph as text, with the shape of the
# embedding on a rank. If no entry has that shape for as many ranks, the next start certainly
# compiles. If one has it, the start compiles only if something else changed. Layout:
# ``VllmBackend.__call__`` in vllm/compilation/backends.py of 0.17 to 0.33.

_FOLDER: Final = "torch_compile_cache"
_GRAPH: Final = "computation_graph.py"
_VOCAB_PADDING_ROWS: Final = 64
_MOST_ENTRIES: Final = 1_000
# The embedding is an argument of the graph, in its first lines. The largest models' arguments have
# a few MiB.
_MOST_BYTES: Final = 4 << 20


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return vLLM's cache folder by its own rules (vllm/envs.py, VLLM_CACHE_ROOT)."""
    given = environ.get("VLLM_CACHE_ROOT")
    if given:
        return Path(given).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm"


def has_entry(
    root: Path,
    shape: ModelShape,
    ranks: int,
    stages: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Return whether the cache may have an entry for this model and number of ranks.

    False means that the next start certainly compiles.

    Args:
        root: vLLM's cache folder; a missing folder has no entries.
        shape: the model's numbers.
        ranks: the number of ranks that share the embedding.
        stages: pipeline stages with that many ranks each.
        environ: the environment; ``VLLM_DISABLE_COMPILE_CACHE`` makes every start compile.
    """
    if environ.get("VLLM_DISABLE_COMPILE_CACHE", "0") not in {"", "0"}:
        return False
    rows = -(-shape.vocab // _VOCAB_PADDING_ROWS) * _VOCAB_PADDING_ROWS // ranks
    table = re.compile(rf"\[{rows}, {shape.hidden}\]".encode())
    return any(_holds(entry, table, ranks * stages) for entry in _entries(root))


def _entries(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root / _FOLDER) as found:
            for number, entry in enumerate(found):
                if number >= _MOST_ENTRIES:
                    return
                if entry.is_dir():
                    yield Path(entry.path)
    except OSError:
        return


def _holds(entry: Path, table: re.Pattern[bytes], ranks: int) -> bool:
    """Return whether an entry has that many ranks and its first graph has the embedding."""
    try:
        folders = sorted(path.name for path in entry.glob("rank_*_0"))
        if folders != sorted(f"rank_{rank}_0" for rank in range(ranks)):
            return False
        for graph in entry.glob(f"rank_0_0/*/{_GRAPH}"):
            if table.search(_first_bytes(graph)):
                return True
        return False
    except OSError:
        return False


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(_MOST_BYTES)
