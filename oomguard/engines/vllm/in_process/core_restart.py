"""Give a running front end a client that restarts the engine core after its death.

The client takes the place of the one that the front end (``LLMEngine``, ``AsyncLLM``) has. Every
request and every output goes through it: generate, chat, embed, score, beam search, streams. So the
front end never sees that the engine core died.

The client keeps the unfinished requests with their delivered tokens. After a death, a request
continues behind the tokens that its caller has received: they join its prompt. The next token may
depend on more than that: penalties for generated tokens, a grammar, the state of a seed. If numbers
are exact, such a request is computed again from its beginning, and delivered tokens are not
delivered twice.

Nothing of vLLM is imported at load: its request objects are used as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.errors import Partial
from oomguard.core.incident import SettingInForce
from oomguard.core.log import get_logger
from oomguard.engines.protocol import RestartedEngine
from oomguard.probe.host import Cgroup, read_cgroup

# --- unfinished requests ---

# Sampling parameters whose meaning does not depend on where the prompt ends. These are limits
# that oomguard shortens, parameters of a single step or of the text, and the penalty that counts
# prompt and output alike.
_OF_ONE_STEP: Final = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "logit_bias",
        "allowed_token_ids",
        "seed",
        "repetition_penalty",
    }
)
_OF_PROMPT: Final = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")


def resume_request(
    asked: Any, tokens: Sequence[int], features: Mapping[str, Any], *, is_exact: bool
) -> tuple[Any, int]:
    """Return a request for the restarted engine, and how many delivered tokens it repeats.

    Args:
        asked: the request as the front end sent it.
        tokens: its delivered tokens.
        features: images and other media by hash, of those sent to the earlier core.
        is_exact: whether the same request gives the same tokens in another batch.
    """
    asked = _whole(asked, features)
    params = asked.sampling_params
    if not tokens or params is None:
        return asked, 0
    if repeats_tokens(asked, is_exact=is_exact):
        return asked, len(tokens)
    shorter = copy.copy(params)
    if params.max_tokens is not None:
        shorter.max_tokens = params.max_tokens - len(tokens)
    shorter.min_tokens = max(0, params.min_tokens - len(tokens))
    # These were delivered with the first token.
    for name in _OF_PROMPT:
        if hasattr(shorter, name):
            setattr(shorter, name, None)
    made = copy.copy(asked)
    made.prompt_token_ids = [*asked.prompt_token_ids, *tokens]
    made.sampling_params = shorter
    return made, 0


def repeats_tokens(asked: Any, *, is_exact: bool) -> bool:
    """Return whether a begun request is computed again from its beginning.

    It is if that gives the same tokens, or if nothing else is possible.
    """
    if follows_from_tokens(asked):
        return False
    must = _has_grammar(asked) or not _has_plain_prompt(asked)
    return must or (is_exact and _is_repeatable(asked.sampling_params))


def why_lost(
    asked: Any, done_tokens: int, features: Mapping[str, Any], *, is_session: bool
) -> str | None:
    """Return why a request cannot continue after a restart; None if it can."""
    if is_session:
        return "it was sent in several parts, and the engine that received them is gone"
    for one in getattr(asked, "mm_features", None) or ():
        if one.data is None and one.mm_hash not in features:
            return "an earlier request had sent its image, to the engine that is gone"
    params = asked.sampling_params
    if not done_tokens or params is None or _is_repeatable(params):
        return None
    if _has_grammar(asked) or not _has_plain_prompt(asked):
        return "it samples without a seed, so it cannot continue in the middle"
    return None


def follows_from_tokens(asked: Any) -> bool:
    """Return whether the next token depends on the earlier tokens only, and on no engine state."""
    params = asked.sampling_params
    if not _has_plain_prompt(asked) or (params.temperature and params.seed is not None):
        return False
    plain = type(params)()
    # A parameter that oomguard does not know may depend on anything, so its value must be the
    # default.
    for name in set(type(params).__struct_fields__) - _OF_ONE_STEP:
        value = getattr(params, name)
        default = getattr(plain, name)
        is_same = value == default or (_is_off(value) and _is_off(default))
        if not is_same and not name.startswith("_"):
            return False
    return True


def _is_off(value: Any) -> bool:
    """Return whether a parameter has no effect.

    The front end writes False or an empty list if the caller gave None.
    """
    return value is None or value is False or (isinstance(value, (list, dict, str)) and not value)


def _whole(asked: Any, features: Mapping[str, Any]) -> Any:
    """Return the request with the images that it left out because the earlier core had them."""
    own = getattr(asked, "mm_features", None)
    if not own or all(one.data is not None for one in own):
        return asked
    made = copy.copy(asked)
    made_features = []
    for one in own:
        filled = copy.copy(one)
        if filled.data is None:
            filled.data = features[filled.mm_hash]
        made_features.append(filled)
    made.mm_features = made_features
    return made


def _has_grammar(asked: Any) -> bool:
    return getattr(asked.sampling_params, "structured_outputs", None) is not None


def _is_repeatable(params: Any) -> bool:
    return not params.temperature or params.seed is not None


def _has_plain_prompt(asked: Any) -> bool:
    return asked.prompt_token_ids is not None and getattr(asked, "prompt_embeds", None) is None


# After so many deaths in whose last step it was, without a new token since, a request runs alone.
_SUSPECT_AFTER: Final = 2


@dataclass(slots=True)
class _Request:
    """One request; ``again`` is how many delivered tokens the engine still has to repeat."""

    asked: Any
    tokens: list[int] = field(default_factory=list)
    again: int = 0
    differs: bool = False
    is_session: bool = False
    deaths: int = 0
    deaths_alone: int = 0


class UnfinishedRequests:
    """The unfinished requests of one engine, in the order in which they came.

    Args:
        is_exact: whether the engine computes in float32. Only then does the same request give the
            same tokens in another batch.

    Attributes:
        progressed: whether a new token or result has come since the engine was last started.
    """

    def __init__(self, *, is_exact: bool = True) -> None:
        self._is_exact = is_exact
        self._requests: dict[str, _Request] = {}
        self._is_alone = False
        self._running: str | None = None
        self._suspects: list[str] = []
        self._held: list[str] = []
        self._vectors: dict[str, Any] = {}
        self._failed: set[str] = set()
        self.progressed = False

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, asked: Any) -> bool:
        """Add a request; return whether to send it now.

        While requests run one at a time, it waits.
        """
        name = asked.request_id
        is_session = name in self._requests or bool(getattr(asked, "resumable", False))
        self._requests[name] = _Request(asked, is_session=is_session)
        if not self.is_of_tokens(name):
            self._vectors[name] = None
        if self._is_alone:
            self._held.append(name)
        return not self._is_alone

    def drop(self, ids: Iterable[str]) -> None:
        """Forget requests that their callers aborted."""
        for name in ids:
            self._requests.pop(name, None)
            self._vectors.pop(name, None)

    def fail(self, name: str) -> None:
        """Forget a failed pooling request; ``vectors`` still returns the results of the others."""
        self._requests.pop(name)
        self._failed.add(name)

    def vectors(self) -> list[Any]:
        """Return the results of the pooling requests in their order; None without a result."""
        return list(self._vectors.values())

    def take(self, outputs: Any) -> Any:
        """Record what an engine's outputs deliver, and return them without repeated tokens."""
        outputs.outputs = list(filter(self._delivers, outputs.outputs))
        # The callers of the finished pooling requests have received their vectors.
        if self._vectors and not self._requests and not self._failed:
            self._vectors.clear()
        return outputs

    def _delivers(self, output: Any) -> bool:
        found = self._requests.get(output.request_id)
        if found is None:
            return True
        had = len(output.new_token_ids)
        if found.again:
            _cut(found, output)
        if found.differs:
            return False
        found.tokens += output.new_token_ids
        if output.new_token_ids or output.finish_reason is not None:
            self.progressed = True
            found.deaths = 0
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            if output.request_id in self._vectors:
                self._vectors[output.request_id] = output.pooling_output
            return True
        return bool(output.new_token_ids) or not had

    def differing(self) -> list[str]:
        """Return the requests whose repetition gave other tokens."""
        return list(filter(lambda name: self._requests[name].differs, self._requests))

    def begin_again(self, *, alone: bool, suspects: Collection[str] = ()) -> list[Any]:
        """Return the requests to send to a restarted engine.

        Args:
            alone: whether requests run one at a time; ``next`` returns the following ones.
            suspects: the requests of the step in which the core died; empty if unknown, then all
                are suspects. The other requests wait for them.
        """
        self.progressed = False
        named = []
        again = []
        for name, request in self._requests.items():
            if name in suspects:
                named.append(name)
                request.deaths += 1
                if request.deaths >= _SUSPECT_AFTER:
                    again.append(name)
        earlier: list[str] = []
        if self._is_alone:
            earlier = list(filter(self._requests.__contains__, self._suspects))
        is_found = self._is_alone and self._running not in self._requests
        self._running = None
        if is_found or (self._is_alone and not named):
            # One suspect of an earlier round is settled; the others have not been tried yet.
            self._suspects = earlier
        elif alone:
            self._suspects = named or list(self._requests)
        else:
            self._suspects = again
        self._is_alone = bool(self._suspects)
        if not self._is_alone:
            return [self._resumed(name) for name in self._requests]
        # In the order in which they came.
        self._held = list(filter(lambda name: name not in self._suspects, self._requests))
        return self.next()

    def next(self) -> list[Any]:
        """Return the requests to send now if they run one at a time; none while one runs."""
        if not self._is_alone or self._running in self._requests:
            return []
        while self._suspects:
            self._running = self._suspects.pop(0)
            if self._running in self._requests:
                return [self._resumed(self._running)]
        self._is_alone = False
        held = self._held
        self._held = []
        return [self._resumed(name) for name in filter(self._requests.__contains__, held)]

    def lost(self, *, most_tokens: int | None = None) -> dict[str, str]:
        """Return the requests that cannot continue, each with the reason.

        ``most_tokens`` is the restarted engine's limit for one request; None if it is unknown.
        """
        known = self._features()
        found = {}
        for name, one in self._requests.items():
            why = why_lost(one.asked, len(one.tokens), known, is_session=one.is_session)
            length = len(one.asked.prompt_token_ids or ()) + len(one.tokens)
            if why is None and most_tokens is not None and length >= most_tokens:
                why = f"it has {length} tokens, but the restarted engine allows only {most_tokens}"
            if why is not None:
                found[name] = why
        return found

    def at_fault(self, most: int) -> str | None:
        """Return the request that ran alone in the ``most``-th death; None without one."""
        found = None
        if self._is_alone:
            found = self._requests.get(self._running or "")
        if found is None:
            return None
        found.deaths_alone += 1
        if found.deaths_alone >= most:
            return self._running
        return None

    def is_of_tokens(self, name: str) -> bool:
        """Return whether a request generates text; a pooling request cannot report its failure."""
        return self._requests[name].asked.sampling_params is not None

    def _features(self) -> dict[str, Any]:
        """Return the media of unfinished requests by hash; an engine receives each only once."""
        features = {}
        for found in self._requests.values():
            for one in getattr(found.asked, "mm_features", None) or ():
                if one.data is not None:
                    features[one.mm_hash] = one.data
        return features

    def _resumed(self, name: str) -> Any:
        found = self._requests[name]
        asked, found.again = resume_request(
            found.asked, found.tokens, self._features(), is_exact=self._is_exact
        )
        return asked


def _cut(found: _Request, output: Any) -> None:
    """Remove repeated tokens from an output."""
    new = output.new_token_ids
    known = len(found.tokens) - found.again
    cut = min(found.again, len(new))
    found.differs = found.differs or list(new[:cut]) != found.tokens[known : known + cut]
    is_short = output.finish_reason is not None and cut < found.again
    found.differs = found.differs or is_short
    found.again -= cut
    output.new_token_ids = new[cut:]
    output.new_prompt_logprobs_tensors = None
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(cut, len(new) - cut)


# --- the client ---

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
            # vLLM cancels its output task, which wakes the caller.
            return
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
    config = getattr(engine.vllm_config, "scheduler_config", None)
    found = {}
    for name in _OF_A_STEP:
        value = getattr(config, name, None)
        if isinstance(value, int):
            found[name] = SettingInForce(name, value, False, "engine")
    return found


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
        # Before `__init__` has set it, this would call itself for ever.
        if name == "inner":
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
        of_tokens = list(filter(self.unfinished.is_of_tokens, failed))
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


def can_restart_core(engine: Any) -> bool:
    """Return whether an engine's core is another process with a single client.

    It is not with data parallelism, nor if the core runs in this process.
    """
    client = getattr(engine, "engine_core", None)
    needed = ("resources", "outputs_queue", "add_request")
    is_single = type(client).__name__ in {"SyncMPClient", "AsyncMPClient"} and not getattr(
        client, "is_dp", False
    )
    return is_single and all(hasattr(client, name) for name in needed)


def install_restarting_client(engine: Any, make_again: RestartCore) -> None:
    """Replace the engine's client by one that outlives the engine core."""
    client = engine.engine_core
    if type(client).__name__ == "SyncMPClient":
        engine.engine_core = RestartingSyncClient(engine, client, make_again)
        return
    engine.engine_core = RestartingAsyncClient(engine, client, make_again)
    handler = getattr(engine, "output_handler", None)
    # The old task still reads from the client that is replaced.
    if handler is not None:
        handler.cancel()
        engine.output_handler = None
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            engine._run_output_handler()


class RestartingSyncClient(RestartingClient):
    """The restarting client of ``LLMEngine``."""

    def __init__(self, engine: Any, inner: Any, make_again: RestartCore) -> None:
        super().__init__(engine, inner, make_again)
        self._failed: list[Any] = []
        self._raised_last: Exception | None = None

    def add_request(self, request: Any) -> None:
        """Send a request; if the core has died, restart it first."""
        if not self.unfinished.add(request) and not self.is_given_up:
            return
        try:
            self.inner.add_request(request)
        except Exception as error:  # noqa: BLE001 - raised again unless the core is restarted
            self._died(error)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests."""
        self.unfinished.drop(request_ids)
        self.inner.abort_requests(request_ids)
        self._send(self.unfinished.next())

    def get_output(self) -> Any:
        """Return the core's next outputs; if the core has died, restart it first."""
        while True:
            if self._failed:
                failed = self._failed
                self._failed = []
                return outputs_of(failed)
            if self._raised_last is not None and not len(self.unfinished):
                self.shutdown()
                raise self.with_vectors(self._raised_last)
            try:
                outputs = self.unfinished.take(self.inner.get_output())
            except Exception as error:  # noqa: BLE001 - as in add_request
                self._died(error)
                continue
            if differing := self.differing():
                self.inner.abort_requests(list(differing))
                self._failed += self.failure_outputs(differing)
            self._send(self.unfinished.next())
            return outputs

    def fail(self, name: str, error: Exception) -> None:
        """Raise the exception once all other requests are done.

        vLLM has no other way to report a failed pooling request.
        """
        del name
        self._raised_last = self._raised_last or error

    def _died(self, error: Exception) -> None:
        if not is_core_death(error, self.inner):
            raise error
        error = as_engine_dead_error(error)
        made = self.replaced(error)
        self._failed += self.failing(made, error)
        self._send(self.unfinished.begin_again(alone=made.alone, suspects=self.suspects))

    def _send(self, requests: list[Any]) -> None:
        try:
            for request in requests:
                self.inner.add_request(request)
        except Exception as error:
            # get_output meets the death and sends all unfinished requests again.
            if not is_core_death(error, self.inner):
                raise


class RestartingAsyncClient(RestartingClient):
    """The restarting client of ``AsyncLLM``. The event loop runs on during a restart."""

    def __init__(self, engine: Any, inner: Any, make_again: RestartCore) -> None:
        super().__init__(engine, inner, make_again)
        # True between a death and the sending of the unfinished requests.
        self._is_away = False

    async def add_request_async(self, request: Any) -> None:
        """Send a request; if the core has died, restart it first."""
        if (not self.unfinished.add(request) or self._is_away) and not self.is_given_up:
            return
        try:
            await self.inner.add_request_async(request)
        except Exception as error:
            # The task that waits for outputs meets the death too, and sends all unfinished
            # requests, this one included.
            if not is_core_death(error, self.inner) or self.is_given_up:
                raise

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort requests."""
        self.unfinished.drop(request_ids)
        await self.inner.abort_requests_async(request_ids)
        await self._send(self.unfinished.next())

    async def get_output_async(self) -> Any:
        """Return the core's next outputs; if the core has died, restart it first."""
        while True:
            try:
                outputs = self.unfinished.take(await self.inner.get_output_async())
            except Exception as error:
                if not is_core_death(error, self.inner):
                    raise
                failed = await self._died(error)
                if failed:
                    return outputs_of(failed)
                continue
            if differing := self.differing():
                await self.inner.abort_requests_async(list(differing))
                outputs.outputs += self.failure_outputs(differing)
            await self._send(self.unfinished.next())
            return outputs

    def fail(self, name: str, error: Exception) -> None:
        """Raise the exception in the caller of this request; all other requests continue."""
        if (engine := self._engine()) is None:
            return
        state = engine.output_processor.request_states.get(name)
        if state is not None and state.queue is not None:
            engine.output_processor.abort_requests([name], internal=True)
            # Instead of the output that reports the abort.
            state.queue.put(error)

    async def _died(self, error: Exception) -> list[Any]:
        self._is_away = True
        try:
            made = await asyncio.to_thread(self.replaced, error)
        except asyncio.CancelledError:
            # Ctrl-C, or the loop ends: the loop joins the thread, and no caller needs the engine.
            self.is_given_up = self._is_closed = True
            raise
        else:
            failed = self.failing(made, error)
            resumed = self.unfinished.begin_again(alone=made.alone, suspects=self.suspects)
        finally:
            self._is_away = False
        await self._send(resumed)
        return failed

    async def _send(self, requests: list[Any]) -> None:
        try:
            for request in requests:
                await self.inner.add_request_async(request)
        except Exception as error:
            if not is_core_death(error, self.inner):
                raise
