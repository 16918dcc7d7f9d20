"""Share what the synchronous and the asynchronous restarting client have in common.

Every request and every output goes through this client: generate, chat, embed, score, beam search,
streams. So the front end never sees that the engine core died.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, Final

from oomguard.core.incident import SettingInForce
from oomguard.core.log import get_logger
from oomguard.core.partial_results import Partial
from oomguard.engines.protocol import RestartedEngine
from oomguard.engines.vllm.in_process.requests import UnfinishedRequests
from oomguard.probe.host import Cgroup, read_cgroup

# If a core dies silently, vLLM's monitor notices it, but the synchronous caller still waits at an
# empty queue. This watchdog wakes the caller.

LOOKS_EVERY_S: Final = 0.25
EMPTY_FOR_S: Final = 1.0
NAME: Final = "oomguard-waker"


def watch(client: RestartingClient) -> None:
    """Watch the client's core until it dies, is replaced, or the client is garbage-collected."""
    inner = weakref.ref(client.inner)
    threading.Thread(
        target=_wake, args=(weakref.ref(client), inner), name=NAME, daemon=True
    ).start()


def _wake(attended: weakref.ref[RestartingClient], watched: weakref.ref[Any]) -> None:
    empty_since_s: float | None = None
    while True:
        time.sleep(LOOKS_EVERY_S)
        client = attended()
        inner = watched()
        if client is None or inner is None or client.inner is not inner or client.is_given_up:
            return
        if not inner.resources.engine_dead:
            client.before = read_cgroup() or client.before
        elif type(inner).__name__ == "AsyncMPClient":
            return  # vLLM cancels its output task, which wakes the caller
        elif not inner.outputs_queue.empty():
            empty_since_s = None
        else:
            empty_since_s = empty_since_s or time.monotonic()
            if time.monotonic() - empty_since_s >= EMPTY_FOR_S:
                inner.outputs_queue.put_nowait(engine_dead_error())
                return
        del client, inner


def engine_dead_error() -> Exception:
    """Return vLLM's exception for a dead engine core."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error: Exception = EngineDeadError()
    return error


# Settings that a program may read from its engine, and that a restarted core may have changed.
_TOLD: Final = {
    "model_config": ("max_model_len",),
    "scheduler_config": ("max_num_batched_tokens", "max_num_seqs"),
    "cache_config": (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "num_gpu_blocks",
    ),
}


# Settings that limit a step. Some engines never print them.
_OF_A_STEP: Final = ("max_num_batched_tokens", "max_num_seqs")


def step_limits(engine: Any) -> dict[str, SettingInForce]:
    """Return the effective settings that limit a step, as far as the engine has them."""
    found = {
        name: getattr(getattr(engine.vllm_config, "scheduler_config", None), name, None)
        for name in _OF_A_STEP
    }
    return {
        name: SettingInForce(name, value, False, "engine")
        for name, value in found.items()
        if isinstance(value, int)
    }


def update_front_end(engine: Any, fresh: Any) -> None:
    """Copy the new core's limits into the program's engine, and clear its image cache.

    Args:
        engine: the program's own engine (``LLMEngine``, ``AsyncLLM``), now with the new core.
        fresh: the engine with which the core was made; it is dropped.
    """
    for part, names in _TOLD.items():
        for name in names:
            with contextlib.suppress(AttributeError):
                setattr(
                    getattr(engine.vllm_config, part),
                    name,
                    getattr(getattr(fresh.vllm_config, part), name),
                )
    # The front end sends an image only once, but the new core has received none.
    with contextlib.suppress(AttributeError):
        engine.renderer.clear_mm_cache()
    # The new engine's loggers replaced those of the old one in the metrics registry.
    with contextlib.suppress(AttributeError):
        engine.logger_manager = fresh.logger_manager
    with contextlib.suppress(AttributeError, IndexError):
        engine._logger_ref[0] = fresh.logger_manager


# A request that exhausts memory does so again; any other death may have been chance.
_DEATHS_OF_MEMORY = 1
_DEATHS_OF_CHANCE = 2
# Calls that change the state of a core beyond its requests.
_CHANGING: Final = (
    "collective_rpc",
    "set_weight_version",
    "pause_scheduler",
    "sleep",
    "save_sharded_state",
)
_READING: Final = frozenset({"get_model_inspection"})
_UNDOING: Final = {"wake_up": "sleep", "resume_scheduler": "pause_scheduler"}

# Restarts the core after a death. Its result None means that the core stays dead.
RestartCore = Callable[[Exception, "RestartingClient"], RestartedEngine | None]


class RestartingClient:
    """A client that keeps requests and outputs when the engine core dies.

    Everything else is delegated to the inner client.

    Attributes:
        inner: the client of the current core.
        is_given_up: whether a core that dies, or has died, is not restarted.
        unfinished: the unfinished requests.
        before: the cgroup's count of OOM kills when the core was last seen alive.
        suspects: the requests of the step in which the core died, if vLLM logged them.
        before_waking: called before a sleeping core wakes up completely. If it raises, the core
            stays asleep.
    """

    def __init__(self, engine: Any, inner: Any, make_again: RestartCore) -> None:
        self.inner = inner
        self._make_again = make_again
        self._engine = weakref.ref(engine)
        self._changed: str | None = None
        self._is_closed = False
        self.is_given_up = False
        self.unfinished = UnfinishedRequests(is_exact=_is_float32(engine))
        self.before: Cgroup | None = read_cgroup()
        self.suspects: Collection[str] = ()
        self.before_waking: Callable[[], None] | None = None
        watch(self)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet set in __init__
            raise AttributeError(name)
        found = getattr(self.inner, name)
        plain = name.removesuffix("_async")
        if plain in _CHANGING or plain in _UNDOING:
            return _noting(self, plain, found)
        return found

    @property
    def resources(self) -> Any:
        """The inner client's resources, which look alive during a restart.

        Otherwise the front end would give up.
        """
        return _Resources(self.inner.resources, self.is_given_up)

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """End the core, and do not restart it."""
        self.is_given_up = self._is_closed = True
        return self.inner.shutdown(*args, **kwargs)

    def note(self, call: str) -> None:
        """Record a call that changed the core's state, or one that undid that change."""
        if call in _CHANGING:
            self._changed = call
        elif _UNDOING[call] == self._changed:
            self._changed = None

    def replaced(self, error: Exception) -> RestartedEngine:
        """Restart the dead core. Raises ``error`` if it may not or cannot be restarted."""
        if self.is_given_up:
            raise error
        made = None
        if self._changed is None:
            try:
                made = self._make_again(error, self)
            finally:
                self.is_given_up = self.is_given_up or made is None
        else:
            get_logger().warning(
                "the engine core died and was not restarted",
                because=f"{self._changed} had changed its state",
            )
            self.is_given_up = True
        if made is None:
            raise error
        fresh = made.engine
        self.inner = fresh.engine_core
        fresh.engine_core = None
        if self._is_closed:
            self.inner.shutdown()
            raise error
        engine = self._engine()
        if engine is not None:
            update_front_end(engine, fresh)
        watch(self)
        return made

    def failing(self, made: RestartedEngine, error: Exception) -> list[Any]:
        """Return the outputs that end the requests which cannot continue, with the reason."""
        failed = self.unfinished.lost(most_tokens=_most_tokens(made.engine))
        if made.of_memory:
            most_deaths = _DEATHS_OF_MEMORY
        else:
            most_deaths = _DEATHS_OF_CHANCE
        name = self.unfinished.at_fault(most_deaths)
        if name is not None:
            failed[name] = "the engine core died while it ran this request alone"
        return self.failure_outputs(failed, error)

    def failure_outputs(self, failed: dict[str, str], error: Exception | None = None) -> list[Any]:
        """Log failed requests and return the outputs that report them.

        A pooling request gets an exception instead (``fail``).
        """
        for name, why in failed.items():
            get_logger().warning("a request failed", request=name, because=why)
        of_tokens = [name for name in failed if self.unfinished.is_of_tokens(name)]
        for name in failed.keys() - of_tokens:
            self.unfinished.fail(name)
            self.fail(name, error or engine_dead_error())
        self.unfinished.drop(of_tokens)
        return [_failed_output(name, failed[name]) for name in of_tokens]

    def fail(self, name: str, error: Exception) -> None:
        """Raise an exception in the caller of one request."""
        raise NotImplementedError

    def with_vectors(self, error: Exception) -> Exception:
        """Return the exception with the finished pooling results as its ``partial``."""
        vectors = self.unfinished.vectors()
        done = sum(vector is not None for vector in vectors)
        with contextlib.suppress(AttributeError):
            error.partial = Partial(len(vectors), done, vectors)  # type: ignore[attr-defined]
            error.add_note(
                f"oomguard: {done} of {len(vectors)} requests are done: this exception's "
                "`partial` has their results"
            )
        return error

    def differing(self) -> dict[str, str]:
        """Return the requests whose repetition gave other tokens, each with the reason."""
        why = "after a restart it gave other tokens than those already delivered"
        return dict.fromkeys(self.unfinished.differing(), why)


class _Resources:
    """A client's resources, which count as dead only if the core is not restarted."""

    def __init__(self, inner: Any, is_given_up: bool) -> None:
        self._resources = inner
        self.engine_dead = inner.engine_dead and is_given_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resources, name)

    def __call__(self) -> Any:
        return self._resources()


def _noting(client: RestartingClient, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of the inner client that also records itself (``note``)."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        is_partial = bool(args and args[0]) or bool(kwargs.get("tags"))
        if name == "wake_up" and client.before_waking is not None and not is_partial:
            client.before_waking()
        if not (args and isinstance(args[0], str) and args[0] in _READING):
            client.note(name)
        return call(*args, **kwargs)

    return noted


def is_core_death(error: Exception, client: Any) -> bool:
    """Return whether an exception of a client means that the core has died.

    vLLM's monitor notes a death and closes the client's sockets, so a sender may see a socket error
    instead of EngineDeadError.
    """
    return (
        type(error).__name__ == "EngineDeadError"
        or getattr(client.resources, "engine_dead", False) is True
    )


def as_engine_dead_error(error: Exception) -> Exception:
    """Return vLLM's EngineDeadError for any exception that means a death."""
    if type(error).__name__ == "EngineDeadError":
        return error
    engine_death = engine_dead_error()
    engine_death.__cause__ = error
    return engine_death


def _is_float32(engine: Any) -> bool:
    config = getattr(getattr(engine, "vllm_config", None), "model_config", None)
    return str(getattr(config, "dtype", "torch.float32")) == "torch.float32"


def _most_tokens(engine: Any) -> int | None:
    config = getattr(getattr(engine, "vllm_config", None), "model_config", None)
    found = getattr(config, "max_model_len", None)
    if isinstance(found, int):
        return found
    return None


def _failed_output(name: str, why: str) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    return EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=why)


def outputs_of(outputs: list[Any]) -> Any:
    """Return outputs of single requests in the form in which a core returns them."""
    from vllm.v1.engine import EngineCoreOutputs

    return EngineCoreOutputs(outputs=outputs)
