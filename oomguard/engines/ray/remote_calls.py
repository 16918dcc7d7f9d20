"""Guard remote functions and actor classes after Ray has made them.

The code inside is guarded, and Ray makes the remote function or actor class again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def guarded(function: object, decorate: Callable[..., Any]) -> Any | None:
    """Return a remote function or an actor class with its code under ``decorate``.

    None for anything else.

    Args:
        function: the object to guard.
        decorate: guards one function; its ``is_method`` says that it is one of several, which need
            not all be split.
    """
    ray = sys.modules.get("ray")
    if ray is None:
        return None
    if isinstance(function, ray.remote_function.RemoteFunction):
        return _again(ray, decorate(function._function), function._default_options)
    if isinstance(function, ray.actor.ActorClass):
        plain = function.__ray_metadata__.modified_class.__ray_actor_class__
        return _again(ray, _guarded_class(plain, decorate), function._default_options)
    return None


def _again(ray: Any, code: Any, options: dict[str, Any]) -> Any:
    """Return the code as Ray's, with the user's options; Ray sets its own options again."""
    chosen = {name: value for name, value in options.items() if not name.startswith("_")}
    if chosen:
        return ray.remote(**chosen)(code)
    return ray.remote(code)


def _guarded_class(plain: type, decorate: Callable[..., Any]) -> type:
    """Return a subclass of ``plain`` whose methods are guarded.

    ``__init__`` is one of them, because it may start an engine.
    """
    methods = {
        name: decorate(value, is_method=True)
        for owner in reversed(plain.__mro__[:-1])
        for name, value in vars(owner).items()
        if inspect.isfunction(value)
        and (not name.startswith("_") or name in ("__init__", "__call__"))
    }
    about = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    return type(plain.__name__, (plain,), {**methods, **about})
