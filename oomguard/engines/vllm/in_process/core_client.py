"""The client that a front end keeps while cores come and go: what the synchronous and the
asynchronous one share.

It sees every request and every output, so all that goes through an engine goes through it:
generate, chat, embed, score, beam search, streams. The front end never sees a death.
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
from oomguard.engines.start_attempt import MadeAgain
from oomguard.engines.vllm.in_process.requests import Unfinished
from oomguard.probe.host import Cgroup, read_cgroup

# A core that is gone without a word: vLLM notices it, and leaves its synchronous caller at an empty
# queue. This wakes the caller.

LOOKS_EVERY_S: Final = 0.25
EMPTY_FOR_S: Final = 1.0
NAME: Final = "oomguard-waker"


def watch(client: LastingClient) -> None:
    """Watch the client's core until it dies, is followed by another one, or the program lets go of
    the client.
    """
    inner = weakref.ref(client.inner)
    threading.Thread(
        target=_wake, args=(weakref.ref(client), inner), name=NAME, daemon=True
    ).start()


def _wake(attended: weakref.ref[LastingClient], watched: weakref.ref[Any]) -> None:
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
            return  # its task of outputs is cancelled, which wakes who waits
        elif not inner.outputs_queue.empty():
            empty_since_s = None
        else:
            empty_since_s = empty_since_s or time.monotonic()
            if time.monotonic() - empty_since_s >= EMPTY_FOR_S:
                inner.outputs_queue.put_nowait(death())
                return
        del client, inner


def death() -> Exception:
    """Return vLLM's exception for a core that has died."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error: Exception = EngineDeadError()
    return error


# The front end of an engine whose core was made again: what it holds of the old core becomes what
# the new one's own would hold.

# What a program may ask its engine for, and a new core may have otherwise.
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


# What decides how much a step takes, and is printed at no start of some engines.
_OF_A_STEP: Final = ("max_num_batched_tokens", "max_num_seqs")


def step_in_use(engine: Any) -> dict[str, SettingInForce]:
    """Return the settings of a step that an engine runs with, given or not; of none that it does
    not tell.
    """
    found = {
        name: getattr(getattr(engine.vllm_config, "scheduler_config", None), name, None)
        for name in _OF_A_STEP
    }
    return {
        name: SettingInForce(name, value, False, "engine")
        for name, value in found.items()
        if isinstance(value, int)
    }


def fit_front_end(engine: Any, fresh: Any) -> None:
    """Take over what follows from the new core: its limits, its counters, and that it has seen no
    image yet.

    Args:
        engine: the program's own engine (``LLMEngine``, ``AsyncLLM``), which has the new core now.
        fresh: the engine that the core was made with; it is dropped.
    """
    for part, names in _TOLD.items():
        for name in names:
            with contextlib.suppress(AttributeError):
                setattr(
                    getattr(engine.vllm_config, part),
                    name,
                    getattr(getattr(fresh.vllm_config, part), name),
                )
    # What was sent once is not sent again, and the new core has nothing of it.
    with contextlib.suppress(AttributeError):
        engine.renderer.clear_mm_cache()
    with contextlib.suppress(
        AttributeError
    ):  # its own have been taken out of the registry by the new ones
        engine.logger_manager = fresh.logger_manager
    with contextlib.suppress(AttributeError, IndexError):
        engine._logger_ref[0] = fresh.logger_manager


# A failure for memory happens again to the same request; any other death may have been chance.
_DEATHS_OF_MEMORY = 1
_DEATHS_OF_CHANCE = 2
# Calls that change what a core holds beyond its requests; who reads it may go on.
_CHANGING: Final = (
    "collective_rpc",
    "set_weight_version",
    "pause_scheduler",
    "sleep",
    "save_sharded_state",
)
_READING: Final = frozenset({"get_model_inspection"})
_UNDOING: Final = {"wake_up": "sleep", "resume_scheduler": "pause_scheduler"}

# What is asked after a death. None: the core is not made again.
AfterDeath = Callable[[Exception, "LastingClient"], MadeAgain | None]


class LastingClient:
    """A client whose requests and outputs outlive its core; everything else is the inner client's.

    Attributes:
        inner: the client of the core that works now.
        is_given_up: whether a core that dies, or has died, is not made again.
        unfinished: the requests that are not finished.
        before: the cgroup's count of kills while the core was last seen alive.
        suspects: the requests of the step at which the core died, where it said so.
        before_waking: called before a sleeping core is woken whole; what it raises keeps it asleep.
    """

    def __init__(self, engine: Any, inner: Any, make_again: AfterDeath) -> None:
        self.inner = inner
        self._make_again = make_again
        self._engine = weakref.ref(engine)
        self._changed: str | None = None
        self._is_closed = False
        self.is_given_up = False
        self.unfinished = Unfinished(is_exact=_is_float32(engine))
        self.before: Cgroup | None = read_cgroup()
        self.suspects: Collection[str] = ()
        self.before_waking: Callable[[], None] | None = None
        watch(self)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being made
            raise AttributeError(name)
        found = getattr(self.inner, name)
        plain = name.removesuffix("_async")
        if plain in _CHANGING or plain in _UNDOING:
            return _noting(self, plain, found)
        return found

    @property
    def resources(self) -> Any:
        """The inner client's, which are not dead while the core is made again: nobody is to give up
        meanwhile.
        """
        return _Resources(self.inner.resources, self.is_given_up)

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """End the core, which is not made again."""
        self.is_given_up = self._is_closed = True
        return self.inner.shutdown(*args, **kwargs)

    def note(self, call: str) -> None:
        """Note a call that changed what the core holds, or one that took that back."""
        if call in _CHANGING:
            self._changed = call
        elif _UNDOING[call] == self._changed:
            self._changed = None

    def replaced(self, error: Exception) -> MadeAgain:
        """Make the core again in the place of the dead one; raises the error that told of its death
        where that is not to be.
        """
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
                "the engine died, and is not made again",
                because=f"{self._changed} changed what it held",
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
            fit_front_end(engine, fresh)
        watch(self)
        return made

    def failing(self, made: MadeAgain, error: Exception) -> list[Any]:
        """Return the outputs that end the requests which cannot go on, with the reason."""
        failed = self.unfinished.lost(most_tokens=_most_tokens(made.engine))
        if (
            name := self.unfinished.at_fault(
                _DEATHS_OF_MEMORY if made.of_memory else _DEATHS_OF_CHANCE
            )
        ) is not None:
            failed[name] = "the engine died of this request while it ran alone"
        return self.told(failed, error)

    def told(self, failed: dict[str, str], error: Exception | None = None) -> list[Any]:
        """Return the outputs that tell of requests that failed; of those for a vector an exception
        tells (``fail``).
        """
        for name, why in failed.items():
            get_logger().warning("a request failed", request=name, because=why)
        of_tokens = [name for name in failed if self.unfinished.is_of_tokens(name)]
        for name in failed.keys() - of_tokens:
            self.unfinished.fail(name)
            self.fail(name, error or death())
        self.unfinished.drop(of_tokens)
        return [_failed_output(name, failed[name]) for name in of_tokens]

    def fail(self, name: str, error: Exception) -> None:
        """Have the caller of one request get an exception."""
        raise NotImplementedError

    def with_vectors(self, error: Exception) -> Exception:
        """Return an exception with what the requests for vectors gave, as ``partial``."""
        vectors = self.unfinished.vectors()
        done = sum(vector is not None for vector in vectors)
        with contextlib.suppress(AttributeError):
            error.partial = Partial(len(vectors), done, vectors)  # type: ignore[attr-defined]
            error.add_note(
                f"oomguard: {done} of {len(vectors)} requests are done: `partial` of this "
                "exception holds what they gave"
            )
        return error

    def differing(self) -> dict[str, str]:
        """Return the requests that are to fail because they came out otherwise, with the reason."""
        why = "computed once more after a death it gave other tokens than those that were delivered"
        return dict.fromkeys(self.unfinished.differing(), why)


class _Resources:
    """A client's resources, dead only once the core is not made again."""

    def __init__(self, inner: Any, is_given_up: bool) -> None:
        self._resources = inner
        self.engine_dead = inner.engine_dead and is_given_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resources, name)

    def __call__(self) -> Any:
        return self._resources()


def _noting(client: LastingClient, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of the inner client that is noted once it is made."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        if (
            name == "wake_up"
            and client.before_waking is not None
            and not (args and args[0])
            and not kwargs.get("tags")
        ):
            client.before_waking()
        if not (args and isinstance(args[0], str) and args[0] in _READING):
            client.note(name)
        return call(*args, **kwargs)

    return noted


def is_death(error: Exception, client: Any) -> bool:
    """Return whether an exception of a client tells that the core has died.

    vLLM's monitor notes a death and closes the client's sockets: who sends at that moment meets a
    socket that is none any more.
    """
    return (
        type(error).__name__ == "EngineDeadError"
        or getattr(client.resources, "engine_dead", False) is True
    )


def death_of(error: Exception) -> Exception:
    """Return the engine's own exception of a death for any that tells of one."""
    if type(error).__name__ == "EngineDeadError":
        return error
    engine_death = death()
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
    """Return outputs of single requests as a core gives them."""
    from vllm.v1.engine import EngineCoreOutputs

    return EngineCoreOutputs(outputs=outputs)
