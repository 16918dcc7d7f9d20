"""What runs inside vLLM: changes the engine arguments of an unchanged script, told by environment
variables.

vLLM calls ``register`` through the entry-point group ``vllm.general_plugins`` in every process it
starts, in every environment where oomguard is installed. So: standard library only, nothing at all
unless our variable is set, and no exception ever (vLLM does not guard the call). The hook is where
every front end turns arguments into a configuration (0.8.5 to 0.32; `make vllm-versions` looks);
where another version has something else in its place nothing is hooked.

Variables reach all that the command starts, and stay with what outlives it. So a change is made
only while its attempt lasts, and only to the engines that it was computed for, where those are
known. Where it is asked to, it tells which arguments an engine was started with, by the names it
was given and no others.
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

# The entry points that vLLM loads, and what is hooked: a module, its class of engine arguments, and
# a method of that.
GROUP = "vllm.general_plugins"
HOOK = ("vllm.engine.arg_utils", "EngineArgs", "create_engine_config")
# A JSON object: engine arguments and the values that they get.
OVERRIDES = "OOMGUARD_VLLM_OVERRIDES"
# A JSON list: the models whose engines are changed, as the engine printed them; every engine where
# it is not set.
MODELS = "OOMGUARD_VLLM_MODELS"
# A JSON list: for each engine that failed its `model`, its `order` among those of its process, from
# 1, and its own `overrides`. Where it is set, each engine gets its own; None stands for any model,
# and for any order.
ENGINES = "OOMGUARD_VLLM_ENGINES"
# A JSON list: the arguments that are told. Nothing else of an engine is.
REPORT = "OOMGUARD_VLLM_REPORT"
# The file that is told what was changed, and what was seen. Its folder is there for as long as the
# attempt lasts.
ACKNOWLEDGE = "OOMGUARD_VLLM_ACKNOWLEDGE"
# Where a guard in the process that starts the engine listens.
LISTENER = "OOMGUARD_VLLM_LISTENER"
# The file that is told what vLLM logs, where `oomguard run` started the command. Its folder is that
# of the attempt.
SAID = "OOMGUARD_VLLM_SAID"
# The file for a memory snapshot where an allocation fails, of `oomguard run --snapshot` or set by
# hand.
SNAPSHOT = "OOMGUARD_SNAPSHOT"

_MOST_CHARS = 65_536
_MOST_ACKNOWLEDGED_BYTES = 1 << 20
_MOST_TEXT_CHARS = 200
# Where a configuration keeps what the engine goes on with.
_PARTS = ("cache_config", "scheduler_config", "model_config")

_calls = 0


def register() -> None:
    """Hook vLLM's engine arguments where overrides are set, or a report is asked for, and tell a
    guarded start; never raises.
    """
    _speak()
    _record_snapshot()
    try:
        raw = os.environ.get(OVERRIDES)
        asked = os.environ.get(REPORT)
        if not (raw or asked) or _is_off():
            return
        if not raw and HOOK[0] not in sys.modules:
            # a process that is given its configuration: nothing to tell, and nothing to import for
            # it
            return
        _hook(_parsed(raw, dict) if raw else {}, _names(asked))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong with us, the engine starts
        if raw:  # what was only to be told of is no matter of the user's
            _say(error)


def _speak() -> None:
    """Tell the guarded start, or the run, that started this process what vLLM logs here; do nothing
    without one.
    """
    if os.environ.get(LISTENER) or os.environ.get(SAID):
        with contextlib.suppress(Exception):
            from oomguard.engines.vllm.in_process import message_sender

            message_sender.speak()


def _record_snapshot() -> None:
    """Have torch record for a memory snapshot in this process, where one is asked for."""
    path = os.environ.get(SNAPSHOT)
    if path and not _is_off():
        with contextlib.suppress(Exception):
            from oomguard.probe import snapshot_recorder

            snapshot_recorder.record_here(path)


def _is_off() -> bool:
    return os.environ.get("OOMGUARD_DISABLE", "").strip().lower() in ("1", "true", "yes", "on")


def _say(error: Exception) -> None:
    """Log why no change was made, on one line: a traceback would be taken for the engine's."""
    try:
        reason = str(error).partition("\n")[0][:200]
        logging.getLogger("oomguard").warning(
            "the overrides did not reach vLLM: %s: %s", type(error).__name__, reason
        )
    except Exception:  # noqa: BLE001, S110 - a handler of the user's that raises
        pass


def _parsed(raw: str, kind: type) -> Any:
    if len(raw) > _MOST_CHARS:
        raise ValueError(f"{len(raw)} characters of JSON")
    found = json.loads(raw)
    if not isinstance(found, kind):
        raise TypeError(f"a JSON {kind.__name__} is expected, not {type(found).__name__}")
    return found


def _names(asked: str | None) -> list[str]:
    """Return the arguments that are to be told; none where they cannot be read: a report is no
    reason to lose a change.
    """
    try:
        if asked == "all":
            from oomguard.engines.vllm.plugin_messages import arguments_told

            return arguments_told()
        if asked:
            return [name for name in _parsed(asked, list) if _is_name(name)]
        return []
    except Exception:  # noqa: BLE001 - as said
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
        global _calls  # noqa: PLW0603 - of this process
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
    """Return the method to hook; raises TypeError for what another version, or another plugin, has
    put in its place.
    """
    import inspect

    found = inspect.getattr_static(owner, HOOK[2], None)
    if (
        not inspect.isfunction(found)
        or inspect.iscoroutinefunction(found)
        or inspect.isgeneratorfunction(found)
    ):
        raise TypeError(f"{HOOK[1]}.{HOOK[2]} is no plain method here")
    parameters = [*inspect.signature(found, follow_wrapped=False).parameters.values()]
    if not parameters or parameters[0].kind in {
        parameters[0].KEYWORD_ONLY,
        parameters[0].VAR_KEYWORD,
    }:
        raise TypeError(f"{HOOK[1]}.{HOOK[2]} takes no engine arguments here")
    return found


def _report(holder: object, names: list[str], what: str, order: int, model: object) -> None:
    """Tell which arguments an engine was started with that differ from their defaults, or what its
    configuration made of them.
    """
    if not names or _is_over():
        return
    if what == "arguments":
        import dataclasses

        if not dataclasses.is_dataclass(holder):
            return
        fields = [field for field in dataclasses.fields(holder) if field.name in names]
        pairs = [
            (f.name, getattr(holder, f.name))
            for f in fields
            if getattr(holder, f.name) != f.default
        ]
    else:
        parts = [
            part for part in (getattr(holder, name, None) for name in _PARTS) if part is not None
        ]
        pairs = [
            (name, getattr(part, name)) for part in parts for name in names if hasattr(part, name)
        ]
    told = {name: value for name, value in pairs if is_plain(value)}
    _tell(
        {
            "pid": os.getpid(),
            "order": order,
            "model": model if is_plain(model) else None,
            what: told,
        }
    )


def is_plain(value: object) -> bool:
    """Return whether a value may be told as it is: a switch, a number, a short text."""
    if isinstance(value, str):
        return len(value) <= _MOST_TEXT_CHARS
    return isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _change(arguments: object, overrides: dict[str, object], order: int) -> None:
    """Change engine arguments: fields that there are, to values of their kind."""
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
        except Exception as error:  # noqa: BLE001 - the other ones may be set
            _say(error)
    if applied:
        _tell({"pid": os.getpid(), "order": order, "applied": applied})


def _of_engine(model: object, order: int) -> dict[str, object]:
    """Return the overrides of the engine with this model that is the ``order``-th of
    its process.
    """
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
    """Whether the attempt that the change is for has ended: what was started in it may go on, and
    start an engine again.
    """
    path = os.environ.get(ACKNOWLEDGE)
    # no import that is not needed
    return path is not None and path != "" and not os.path.isdir(os.path.dirname(path))  # noqa: PTH112, PTH120


def _is_meant(model: object) -> bool:
    """Whether an engine of this model is to be changed."""
    raw = os.environ.get(MODELS)
    if raw is None:
        return True
    models = _parsed(raw, list)
    return isinstance(model, str) and any(
        isinstance(other, str) and _is_same(model, other) for other in models
    )


def _is_same(model: str, printed: str) -> bool:
    """Whether a model is the one that an engine printed: a name of the hub may be printed as its
    folder in the cache.
    """
    if model == printed or "--".join(("models", *model.split("/"))) in printed.split("/"):
        return True
    return os.path.exists(model) and os.path.realpath(model) == os.path.realpath(printed)  # noqa: PTH110


def fitting(old: object, new: object) -> object:
    """Return the value as the argument takes it; raises TypeError for one of another kind."""
    if isinstance(new, bool):
        fits = old is None or isinstance(old, bool)
    elif isinstance(new, (int, float)):
        fits = math.isfinite(new) and not isinstance(old, (bool, list, tuple, dict))
    elif isinstance(new, str):
        if new.startswith("{") and (old is None or isinstance(old, dict)):
            return _parsed(
                new, dict
            )  # an argument that is text on the command line, an object here
        fits = not isinstance(old, (bool, int, float, list, tuple, dict))
    else:
        fits = False
    if not fits:
        raise TypeError(
            f"a value of the type {type(new).__name__} in place of {type(old).__name__}"
        )
    return new


def _tell(row: dict[str, object]) -> None:
    """Tell the supervisor one thing: a line appended to the file it named, a regular file and no
    other.
    """
    path = os.environ.get(ACKNOWLEDGE)
    if not path:
        return
    try:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            return  # a FIFO would wait for a reader, and opening a device may do something
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
