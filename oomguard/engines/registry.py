"""The engines that are known here: a folder each, told by the modules that lie in it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

from oomguard.engines import no_insight
from oomguard.engines.command import Launch
from oomguard.engines.protocol import (
    Handler,
    Insight,
    KilledBefore,
    Launcher,
    SeenCallHandler,
    Shelf,
)
from oomguard.engines.start_attempt import StartHandler


@functools.cache
def _modules(name: str) -> tuple[ModuleType, ...]:
    """Return the modules of this name, of the engines that have one, in the order of
    their folders.
    """
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob(f"*/{name}.py"))
    return tuple(importlib.import_module(f"oomguard.engines.{folder}.{name}") for folder in folders)


def launchers() -> tuple[Launcher, ...]:
    """Return the engines that a command can start: their module ``launch``."""
    return cast("tuple[Launcher, ...]", _modules("launch"))


def insight_of(engine: Launcher) -> Insight:
    """Return what is known of an engine beyond its command; nothing, of one that has no module
    ``insight``.
    """
    package = getattr(engine, "__name__", "").rpartition(".")[0]
    found = next(
        (module for module in _modules("insight") if module.__name__.rpartition(".")[0] == package),
        no_insight,
    )
    return cast("Insight", found)


def watch_calls(handler: Handler, often: Handler, is_inside: Callable[[], bool]) -> None:
    """Have the watched calls of every engine that has a module ``calls`` go through ``handler``.

    Those of a kind that is made often go through ``often``, but not where ``is_inside`` tells that
    a watched call is around it.
    """
    for module in _modules("calls"):
        module.watch(handler, often, is_inside)


def watch_seen_calls(handler: SeenCallHandler) -> None:
    """Have the calls that are only shown go through ``handler``, of every engine that has a module
    ``seen_calls``.
    """
    for module in _modules("seen_calls"):
        module.watch(handler)


def held_results_bytes() -> int:
    """Return the bytes that the results of earlier calls hold on the device, of every engine that
    has a module ``results``.
    """
    return sum(module.held_bytes() for module in _modules("results"))


def move_results() -> None:
    """Move these results to the host; raise MemoryError where that has no room."""
    for module in _modules("results"):
        module.move_to_host()


def watch_starts(handler: StartHandler) -> None:
    """Have the starts of every engine that has a module ``starts`` go through ``handler``."""
    for module in _modules("starts"):
        module.watch(handler)


def launcher_of(launch: Launch) -> Launcher:
    """Return the engine whose own command line a launch is, else the first one that reaches into
    programs.
    """
    own = (engine for engine in launchers() if engine.is_own_command(launch.argv))
    into_programs = (engine for engine in launchers() if engine.reaches_scripts())
    return next(own, None) or next(into_programs)


def shelf() -> Shelf | None:
    """Return where this process and others of its job leave texts for each other.

    None where no engine that has a module ``shelf`` has one here.
    """
    return next(
        (found for module in _modules("shelf") if (found := module.shelf()) is not None), None
    )


def killed_before() -> KilledBefore | None:
    """Return how often what this process runs now was killed for memory in others.

    None where no engine that has a module ``retried`` tells of a kill.
    """
    for module in _modules("retried"):  # in each call of a guarded function: no generator
        found = module.killed_before()
        if found is not None:
            return cast("KilledBefore", found)
    return None


def guarded_remotely(function: object, decorate: Callable[..., object]) -> object | None:
    """Return what is called elsewhere (a remote function, a class of actors) with its code under
    ``decorate``.

    None where it is no such thing of an engine that has a module ``remote_calls``.
    """
    found = (module.guarded(function, decorate) for module in _modules("remote_calls"))
    return next((made for made in found if made is not None), None)
