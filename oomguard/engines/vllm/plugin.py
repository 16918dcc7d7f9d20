"""Change the engine arguments of an unmodified script from inside vLLM.

vLLM calls ``register`` through the entry-point group ``vllm.general_plugins`` in every process that
it starts, in every environment where oomguard is installed. vLLM does not guard this call. So the
module imports only the standard library, does nothing unless one of our variables is set, and never
raises. The hook is the method in which every front end turns arguments into a configuration (vLLM
0.8.5 to 0.32; `make vllm-versions` checks it). If a version lacks it, nothing is hooked.

Every process that the command starts inherits the variables, also one that outlives it. So a change
applies only while its attempt runs, and only to the engines that it was computed for, if those are
known. If asked, the plugin reports the arguments of each engine, limited to the requested names.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
import sys
from typing import Any

# The entry-point group that vLLM loads, and the hooked method: module, class of engine arguments,
# method.
GROUP = "vllm.general_plugins"
HOOK = ("vllm.engine.arg_utils", "EngineArgs", "create_engine_config")
# A JSON object: engine arguments and their new values.
OVERRIDES = "OOMGUARD_VLLM_OVERRIDES"
# A JSON list: the models whose engines are changed, as the engine printed them. If it is not set,
# every engine is changed.
MODELS = "OOMGUARD_VLLM_MODELS"
# A JSON list with one row for each engine that failed: its `model`, its `order` among the engines
# of its process (from 1), and its `overrides`. If it is set, each engine gets its own overrides.
# null means any model, or any order.
ENGINES = "OOMGUARD_VLLM_ENGINES"
# A JSON list: the arguments that the plugin reports. It reports nothing else of an engine.
REPORT = "OOMGUARD_VLLM_REPORT"
# The file to which the plugin writes what it changed and saw. Its folder exists only while the
# attempt runs.
ACKNOWLEDGE = "OOMGUARD_VLLM_ACKNOWLEDGE"
# The socket of the guard in the process that starts the engine.
LISTENER = "OOMGUARD_VLLM_LISTENER"
# The file to which the plugin copies vLLM's log records under `oomguard run`. Its folder is the
# attempt's.
LOG_FILE = "OOMGUARD_VLLM_SAID"
# The file for a memory snapshot of a failed allocation: `oomguard run --snapshot`, or set by hand.
SNAPSHOT = "OOMGUARD_SNAPSHOT"
# `1`: engines survive a step that runs out of memory (in_process/step_recovery.py).
STEP_RECOVERY = "OOMGUARD_VLLM_STEP_RECOVERY"

_MOST_CHARS = 65_536
_MOST_ACKNOWLEDGED_BYTES = 1 << 20
_MOST_TEXT_CHARS = 200
# The parts of a configuration that hold the engine's effective settings.
_PARTS = ("cache_config", "scheduler_config", "model_config")

_calls = 0


def register() -> None:
    """Hook vLLM's engine arguments if overrides or a report are requested; never raise."""
    _speak()
    _recover_steps()
    _record_snapshot()
    try:
        raw = os.environ.get(OVERRIDES)
        asked = os.environ.get(REPORT)
        if not (raw or asked) or _is_off():
            return
        if not raw and HOOK[0] not in sys.modules:
            # This process gets a finished configuration: no need to import vLLM's arguments.
            return
        _hook(_parsed(raw, dict) if raw else {}, _names(asked))
    except Exception as error:  # noqa: BLE001 - the engine starts whatever goes wrong here
        # Without overrides only a report is lost, which the user did not ask for.
        if raw:
            _say(error)


def _speak() -> None:
    """Forward vLLM's log to the guarded start, or the run, that started this process, if any."""
    if os.environ.get(LISTENER) or os.environ.get(LOG_FILE):
        with contextlib.suppress(Exception):
            from oomguard.engines.vllm.in_process import message_sender

            message_sender.start_sending()


def _recover_steps() -> None:
    """Let engines of this process recover from an out-of-memory in a step, if requested."""
    if os.environ.get(STEP_RECOVERY) != "1" or _is_off():
        return
    # A worker gets its part from its engine core, and must not import the core's modules.
    if not {HOOK[0], "vllm.v1.engine.core"} & set(sys.modules):
        return
    with contextlib.suppress(Exception):
        from oomguard.engines.vllm.in_process import step_recovery

        why = step_recovery.install()
        if why is not None:
            logging.getLogger("vllm.oomguard").info(
                "oomguard: steps that run out of memory end the engine: %s", why
            )


def _record_snapshot() -> None:
    """Let torch record for a memory snapshot in this process, if one is requested."""
    path = os.environ.get(SNAPSHOT)
    if path and not _is_off():
        with contextlib.suppress(Exception):
            from oomguard.probe import snapshot_recorder

            snapshot_recorder.record_here(path)


def _is_off() -> bool:
    return os.environ.get("OOMGUARD_DISABLE", "").strip().lower() in ("1", "true", "yes", "on")


def _say(error: Exception) -> None:
    """Log on one line why nothing was changed; a traceback would look like the engine's."""
    try:
        reason = str(error).partition("\n")[0][:200]
        logging.getLogger("oomguard").warning(
            "oomguard did not change vLLM's arguments: %s: %s", type(error).__name__, reason
        )
    except Exception:  # noqa: BLE001, S110 - a logging handler of the user raised
        pass


def _parsed(raw: str, kind: type) -> Any:
    if len(raw) > _MOST_CHARS:
        raise ValueError(f"the JSON text has {len(raw)} characters, at most {_MOST_CHARS} are read")
    found = json.loads(raw)
    if not isinstance(found, kind):
        raise TypeError(f"expected a JSON {kind.__name__}, got {type(found).__name__}")
    return found


def _names(asked: str | None) -> list[str]:
    """Return the arguments to report; none if the list cannot be read.

    An unreadable list must not prevent a change.
    """
    try:
        if asked == "all":
            from oomguard.engines.vllm.in_process.message_receiver import reported_arguments

            return reported_arguments()
        if asked:
            return list(filter(_is_name, _parsed(asked, list)))
        return []
    except Exception:  # noqa: BLE001 - see the docstring
        return []


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_")


def _hook(overrides: dict[str, object], reported: list[str]) -> None:
    import functools
    import importlib

    owner = getattr(importlib.import_module(HOOK[0]), HOOK[1])
    original = _hookable(owner)
    if getattr(original, "_oomguard", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: object, *args: object, **kwargs: object) -> object:
        global _calls  # noqa: PLW0603 - a count for this process
        _calls += 1
        order = _calls
        model = None
        try:
            model = getattr(self, "model", None)
            with contextlib.suppress(Exception):
                _report(self, reported, "arguments", order, model)
            _change(self, overrides, order)
        except Exception as error:  # noqa: BLE001 - as in register
            _say(error)
        config = original(self, *args, **kwargs)
        try:
            _report(config, reported, "config", order, model)
        except Exception as error:  # noqa: BLE001 - as in register
            _say(error)
        return config

    create_engine_config._oomguard = True  # type: ignore[attr-defined]
    setattr(owner, HOOK[2], create_engine_config)


def _hookable(owner: type) -> Any:
    """Return the method to hook.

    Raises:
        TypeError: another version, or another plugin, has replaced it with something else.
    """
    import inspect

    found = inspect.getattr_static(owner, HOOK[2], None)
    if (
        not inspect.isfunction(found)
        or inspect.iscoroutinefunction(found)
        or inspect.isgeneratorfunction(found)
    ):
        raise TypeError(f"{HOOK[1]}.{HOOK[2]} is not a plain method here")
    parameters = [*inspect.signature(found, follow_wrapped=False).parameters.values()]
    if not parameters or parameters[0].kind in {
        parameters[0].KEYWORD_ONLY,
        parameters[0].VAR_KEYWORD,
    }:
        raise TypeError(f"{HOOK[1]}.{HOOK[2]} takes no engine arguments here")
    return found


def _report(holder: object, names: list[str], what: str, order: int, model: object) -> None:
    """Report an engine's arguments that differ from their defaults, or its configuration."""
    if not names or _is_over():
        return
    values: dict[str, object] = {}
    if what == "arguments":
        import dataclasses

        if not dataclasses.is_dataclass(holder):
            return
        for field in dataclasses.fields(holder):
            if field.name in names and getattr(holder, field.name) != field.default:
                values[field.name] = getattr(holder, field.name)
    else:
        for part_name in _PARTS:
            part = getattr(holder, part_name, None)
            for name in names:
                if hasattr(part, name):
                    values[name] = getattr(part, name)
    # An argument may be any object; a report has only values that mean the same as text.
    plain = {}
    for name, value in values.items():
        if is_plain(value):
            plain[name] = value
    acknowledge(
        {
            "pid": os.getpid(),
            "order": order,
            "model": model if is_plain(model) else None,
            what: plain,
        }
    )


def is_plain(value: object) -> bool:
    """Return whether a value may be reported unchanged: a switch, a number or a short text."""
    if isinstance(value, str):
        return len(value) <= _MOST_TEXT_CHARS
    return isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _change(arguments: object, overrides: dict[str, object], order: int) -> None:
    """Set the engine's arguments: existing fields only, values of their type only."""
    import dataclasses

    if _is_over():
        return
    model = getattr(arguments, "model", None)
    if ENGINES in os.environ:
        overrides = _of_engine(model, order)
    elif not _is_meant(model):
        return
    applied = {}
    for field in dataclasses.fields(arguments):  # type: ignore[arg-type]
        if field.name not in overrides or field.name.startswith("_"):
            continue
        try:
            value = fitting(getattr(arguments, field.name), overrides[field.name])
            setattr(arguments, field.name, value)
            applied[field.name] = overrides[field.name]
        except Exception as error:  # noqa: BLE001 - the other arguments may still be set
            _say(error)
    if applied:
        acknowledge({"pid": os.getpid(), "order": order, "applied": applied})


def _of_engine(model: object, order: int) -> dict[str, object]:
    """Return the overrides of the ``order``-th engine of its process, with this model."""
    found: dict[str, object] = {}
    for row in _parsed(os.environ[ENGINES], list):
        named = row["model"]
        number = row["order"]
        is_model = named is None or (
            isinstance(model, str) and isinstance(named, str) and _is_same(model, named)
        )
        if is_model and (number is None or number == order) and isinstance(row["overrides"], dict):
            found.update(row["overrides"])
    return found


def _is_over() -> bool:
    """Return whether the attempt has ended: a process that outlives it may start engines."""
    path = os.environ.get(ACKNOWLEDGE)
    # os.path, because pathlib would be an additional import in every process of vLLM.
    return path is not None and path != "" and not os.path.isdir(os.path.dirname(path))  # noqa: PTH112, PTH120


def _is_meant(model: object) -> bool:
    """Return whether an engine of this model is to be changed."""
    raw = os.environ.get(MODELS)
    if raw is None:
        return True
    if not isinstance(model, str):
        return False
    models = [other for other in _parsed(raw, list) if isinstance(other, str)]
    return any(_is_same(model, other) for other in models)


def _is_same(model: str, printed: str) -> bool:
    """Return whether a model is the one that an engine printed.

    An engine may print a Hub name as the path of its folder in the cache.
    """
    if model == printed or "--".join(("models", *model.split("/"))) in printed.split("/"):
        return True
    return os.path.exists(model) and os.path.realpath(model) == os.path.realpath(printed)  # noqa: PTH110


def fitting(old: object, new: object) -> object:
    """Return the value in the argument's type. Raises TypeError if it has another type."""
    if isinstance(new, bool):
        fits = old is None or isinstance(old, bool)
    elif isinstance(new, (int, float)):
        fits = math.isfinite(new) and not isinstance(old, (bool, list, tuple, dict))
    elif isinstance(new, str):
        if new.startswith("{") and (old is None or isinstance(old, dict)):
            # JSON text on the command line becomes an object here.
            return _parsed(new, dict)
        fits = not isinstance(old, (bool, int, float, list, tuple, dict))
    else:
        fits = False
    if not fits:
        raise TypeError(f"a value of type {type(new).__name__} does not fit {type(old).__name__}")
    return new


def acknowledge(row: dict[str, object]) -> None:
    """Append a line to the file that the supervisor named, if it is a regular file."""
    path = os.environ.get(ACKNOWLEDGE)
    if not path:
        return
    try:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            # Opening a FIFO waits for a reader, and opening a device may have side effects.
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size < _MOST_ACKNOWLEDGED_BYTES:
                os.write(descriptor, (json.dumps(row) + "\n").encode())
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        logging.getLogger("oomguard").debug("cannot acknowledge", exc_info=True)
