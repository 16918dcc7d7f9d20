"""Find the known engines: each is a folder, and the names of its modules say what it can do."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from oomguard.engines.command import Launch
    from oomguard.engines.protocol import (
        Handler,
        Insight,
        KilledBefore,
        Launcher,
        SeenCallHandler,
        Shelf,
        StartHandler,
    )

# Each guarded call imports this module, so it imports nothing that a successful call does not need.


@functools.cache
def _modules(name: str) -> tuple[ModuleType, ...]:
    """Return the modules of this name from all engines that have one, sorted by folder."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob(f"*/{name}.py"))
    return tuple(importlib.import_module(f"oomguard.engines.{folder}.{name}") for folder in folders)


def launchers() -> tuple[Launcher, ...]:
    """Return the ``launch`` modules of the engines that a command can start."""
    return cast("tuple[Launcher, ...]", _modules("launch"))


def insight_of(engine: Launcher) -> Insight:
    """Return the module ``insight`` of an engine, or the answers of an engine that has none."""
    from oomguard.engines.protocol import NoInsight

    package = getattr(engine, "__name__", "").rpartition(".")[0]
    for module in _modules("insight"):
        if module.__name__.rpartition(".")[0] == package:
            return cast("Insight", module)
    return NoInsight()


def watch_calls(handler: Handler, often: Handler, is_inside: Callable[[], bool]) -> None:
    """Route the watched calls of every engine with a module ``watched_calls`` through ``handler``.

    Frequent calls go through ``often``, unless ``is_inside`` returns that they run inside another
    watched call.
    """
    for module in _modules("watched_calls"):
        module.watch(handler, often, is_inside)


def watch_seen_calls(handler: SeenCallHandler) -> None:
    """Route recorded calls of every engine with a module ``call_recorder`` through ``handler``."""
    for module in _modules("call_recorder"):
        module.watch(handler)


def held_results_bytes() -> int:
    """Return the bytes that results of earlier calls hold on the device."""
    return sum(module.held_bytes() for module in _modules("watched_calls"))


def move_results() -> None:
    """Move results of earlier calls to the host. Raises MemoryError if they do not fit."""
    for module in _modules("watched_calls"):
        module.move_to_host()


def watch_starts(handler: StartHandler) -> None:
    """Route the starts of every engine with a module ``watched_starts`` through ``handler``."""
    for module in _modules("watched_starts"):
        module.watch(handler)


def launcher_of(launch: Launch) -> Launcher:
    """Return the engine whose own command a launch is; otherwise one that reaches scripts."""
    for engine in launchers():
        if engine.is_own_command(launch.argv):
            return engine
    # Exactly one engine changes scripts from inside: the plugin of vLLM.
    (engine,) = filter(_reaches_scripts, launchers())
    return engine


def _reaches_scripts(engine: Launcher) -> bool:
    return engine.reaches_scripts()


def shelf() -> Shelf | None:
    """Return the store that processes of one job share.

    None if no engine with a module ``remote_tasks`` has one here.
    """
    for module in _modules("remote_tasks"):
        found = module.shelf()
        if found is not None:
            return cast("Shelf", found)
    return None


def killed_before() -> KilledBefore | None:
    """Return how often the current task was killed for memory in other processes.

    None if no engine with a module ``remote_tasks`` reports a kill.
    """
    for module in _modules("remote_tasks"):
        found = module.killed_before()
        if found is not None:
            return cast("KilledBefore", found)
    return None


def guarded_remotely(function: object, decorate: Callable[..., object]) -> object | None:
    """Return a remote function or an actor class whose code runs under ``decorate``.

    None if ``function`` is neither for any engine with a module ``remote_tasks``.
    """
    for module in _modules("remote_tasks"):
        made: object | None = module.guarded(function, decorate)
        if made is not None:
            return made
    return None
