"""Record and restore the state that a call of ``generate`` changes besides its result.

This is the random generators, the user's own KV cache, and the layer count of a draft model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from oomguard.engines.transformers.inputs import given_cache
from oomguard.probe import torch_memory

# Attributes that a call leaves on its model for the next one, with a value per row (Qwen-VL's
# ``rope_deltas``). After the last part they are joined.
_NAMES: Final = ("rope_deltas",)


@contextlib.contextmanager
def join_row_state(
    model: Any,
    kept: dict[int, list[tuple[Any, str, Any]]],
    start: int,
    rows_left: int,
) -> Iterator[None]:
    """Record the row attributes that a part leaves; after the last part, join them all.

    Args:
        model: the model.
        kept: what earlier parts left, by their first row.
        start: the first row of the part.
        rows_left: the number of rows after it.
    """
    yield
    left = []
    for module in model.modules():
        for name in _NAMES:
            value = getattr(module, name, None)
            if getattr(value, "ndim", 0) > 0:
                left.append((module, name, value))
    kept[start] = left
    if rows_left == 0 and len(kept) > 1:
        import torch

        for found in zip(*(kept[begin] for begin in sorted(kept)), strict=False):
            module, name, _ = found[0]
            setattr(module, name, torch.cat([value for _, _, value in found]))


# With this option the model drafts tokens itself: its configuration has fewer layers meanwhile, and
# a failure leaves it so.
EARLY_EXIT: Final = "assistant_early_exit"
_LAYERS: Final = "num_hidden_layers"


@dataclass(frozen=True, slots=True)
class CallState:
    """The state before a call.

    Attributes:
        states: the states of the random generators.
        cache_tokens: the tokens in each layer of a given cache. None: there is no cache, or not one
            that only grows.
        layers: the layer count in the model's configuration; None if it has none.
    """

    states: States
    cache_tokens: tuple[int, ...] | None = None
    layers: int | None = None

    @classmethod
    def now(cls, model: Any, main: Any, cache: Any) -> CallState:
        """Record the present state for a call of ``model`` with the inputs ``main``."""

        layers = _plain_layers(cache)
        if layers is None:
            tokens = None
        else:
            tokens = tuple(int(layer.get_seq_length()) for layer in layers)
        layers = getattr(_config(model), _LAYERS, None)
        return cls(generator_states(getattr(main, "device", None)), tokens, layers)

    def restore_layers(self, model: Any) -> None:
        """Restore the layer count in the model's configuration."""
        config = _config(model)
        if self.layers is not None and getattr(config, _LAYERS, None) != self.layers:
            setattr(config, _LAYERS, self.layers)

    def restore(self, arguments: Mapping[str, Any]) -> None:
        """Remove what a failed call added to the cache; some layers may have more than others."""
        if self.cache_tokens is None:
            return
        layers = _plain_layers(given_cache(arguments))
        for number, layer in enumerate(layers or ()):
            if number < len(self.cache_tokens):
                tokens = self.cache_tokens[number]
            else:
                tokens = 0
            for name in ("keys", "values"):
                if (
                    (held := getattr(layer, name, None)) is not None
                    and held.dim() > 1
                    and held.shape[-2] > tokens
                ):
                    setattr(layer, name, held[..., :tokens, :])


def _config(model: Any) -> Any:
    return getattr(getattr(model, "base_model", model), "config", None)


def _plain_layers(cache: Any) -> list[Any] | None:
    """Return the layers of a cache that only grows; None for any other cache."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        return None
    for layer in layers:
        # A subclass may drop old tokens, such as a sliding window, so only the class itself counts.
        if type(layer).__name__ != "DynamicLayer":
            return None
    return layers


# The rows of a part draw the random numbers that the whole call would draw for them.


States = Mapping[torch.device, torch.Tensor]
_OTHERWISE: Final = "it draws random numbers that parts cannot repeat"
_FACTORIES: Final = frozenset({torch.rand, torch.randn, torch.randint})
# Devices besides the CPU with generators that can be read and set.
_DEVICES: Final = frozenset({"cuda", "xpu", "npu"})


def generator_states(device: torch.device | None) -> States:
    """Return the states of the generators that a call on ``device`` uses."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    if device is not None and device.type in _DEVICES:
        states[device] = getattr(torch, device.type).get_rng_state(device)
    return states


class Draws:
    """The random draws of one call's parts.

    Attributes:
        problem: why the parts cannot draw what the whole call would have drawn; None if they can.
    """

    def __init__(self, states: States, rows: int, *, may_draw: bool) -> None:
        """Set the generator states before the call, and its rows.

        ``may_draw`` is False if the draws of this call are unknown.
        """
        self._states = states
        self._rows = rows
        self._may_draw = may_draw
        self._furthest: States = states
        self._most_draws = 0
        self._draws_nothing = False
        self.problem: str | None = None

    @contextlib.contextmanager
    def of_rows(self, start: int, stop: int) -> Iterator[None]:
        """In the block, draw what the whole call would draw for rows ``start`` to ``stop``.

        Afterwards the generators are in the whole call's end state. If nothing is drawn, they are
        not touched, because other threads use them too. If an earlier part drew nothing, the
        operations of later parts are not watched, which is faster; the generators still are.
        """
        mode = _OfRows(start, stop, self._rows, self._states)
        try:
            # Watching costs time for every operation, and greedy search draws nothing.
            if start and self._draws_nothing:
                yield
            else:
                with mode:
                    yield
                self._draws_nothing = mode.number == 0
        finally:
            if not are_equal(mode.expected, _now(self._states)) or (
                mode.number and not self._may_draw
            ):
                mode.problem = mode.problem or _OTHERWISE
            self.problem = self.problem or mode.problem
            if mode.number > self._most_draws:
                self._most_draws = mode.number
                self._furthest = mode.expected
            if mode.number:
                set_generator_states(self._furthest)


class _OfRows(TorchFunctionMode):  # type: ignore[misc]
    """Draws the part's rows of the whole call's ``multinomial``, and its single numbers."""

    def __init__(self, start: int, stop: int, total: int, states: States) -> None:
        super().__init__()
        self._start = start
        self._stop = stop
        self._total = total
        self._states = states
        self.expected: States = _now(states)
        self.number = 0
        self.problem: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.multinomial or func is torch.Tensor.multinomial:
            found = self._drawn(*args, **(kwargs or {}))
            if found is not None:
                return found
        elif func in _FACTORIES:
            return self._of_all_rows(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _drawn(  # the names of its arguments are torch's
        self,
        input: Any,  # noqa: A002
        num_samples: int,
        replacement: bool = False,
        *,
        generator: Any = None,
        out: Any = None,
    ) -> Any:
        """Return the sampled tokens; None if torch must sample them itself."""
        rows = self._stop - self._start
        known = input.device in self._states and input.dim() == 2 and input.shape[0] % rows == 0
        plain = generator is None and out is None and (num_samples == 1 or not replacement)
        if not (known and plain and _draws_so(input.device, input.dtype)):
            self.problem = _OTHERWISE
            return None
        if not are_equal(self.expected, _now(self._states)):
            # Other code has drawn.
            self.problem = _OTHERWISE
            return None
        if not bool((input.max() < float("inf")) & (input.min() >= 0)):
            # torch raises what the whole call would have raised.
            return None
        # The first draw of a part begins where the whole call began.
        if not self.number:
            set_generator_states(self._states)
        each = input.shape[0] // rows
        own = range(self._start * each, self._stop * each)
        found = _drawn_for(input, own, self._total * each, num_samples)
        self.number += 1
        self.expected = _now(self._states)
        return found

    def _of_all_rows(self, draw: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return a number that the whole call draws only once, whatever its rows.

        Versions of transformers draw one for layers that training skips.
        """
        is_next = kwargs.get("generator") is None and are_equal(self.expected, _now(self._states))
        if is_next and not self.number:
            set_generator_states(self._states)
        found = draw(*args, **kwargs)
        of_all = found.dim() == 0 or (found.numel() == 1 and self._stop - self._start > 1)
        if not (is_next and of_all):
            self.problem = _OTHERWISE
        else:
            self.number += 1
            self.expected = _now(self._states)
        return found


def _drawn_for(probabilities: Any, own: range, total: int, number: int) -> Any:
    """Return tokens for rows ``own`` of ``total``, and advance the generator by all rows."""
    # CUDA's noise depends on the size of the tensor, so it is drawn for all rows at once.
    if not gives_row_by_row(probabilities.device, probabilities.dtype):
        noise = probabilities.new_empty((total, probabilities.shape[1])).exponential_(1)
        return _largest(probabilities, noise[own.start : own.stop], number)
    noise = torch.empty_like(probabilities)
    _pass_over(own.start, noise)
    found = _largest(probabilities, noise.exponential_(1), number)
    _pass_over(total - own.stop, noise)
    return found


def _pass_over(rows: int, buffer: Any) -> None:
    """Advance the generator by the noise of ``rows`` rows; ``buffer`` is overwritten."""
    for done in range(0, rows, len(buffer)):
        buffer[: rows - done].exponential_(1)


def _largest(probabilities: Any, noise: Any, number: int) -> Any:
    """Return the tokens with the largest p/q; ``noise`` is overwritten, as in torch."""
    weighed = torch.div(probabilities, noise, out=noise)
    if number == 1:
        return weighed.argmax(dim=-1, keepdim=True)
    return weighed.topk(number).indices


def gives_row_by_row(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether a generator gives the same noise row by row as in one call.

    A CPU's generator does, and CUDA's does not. transformers samples in float32.
    """
    return device.type == "cpu" and _cpu_gives_row_by_row(dtype)


@functools.cache
def _cpu_gives_row_by_row(dtype: torch.dtype) -> bool:
    generator = torch.Generator()
    # Watched devices must not count these tensors, and they must not be fake.
    with _disable_current_modes():
        # The first size is below one vector, the second above one thread's share.
        for rows, tokens in ((5, 7), (3, 20_001)):
            at_once = torch.empty((rows, tokens), dtype=dtype).exponential_(
                1, generator=generator.manual_seed(1)
            )
            after = generator.get_state()
            one_by_one = torch.empty_like(at_once)
            generator.manual_seed(1)
            for row in one_by_one:
                row.exponential_(1, generator=generator)
            if not (torch.equal(at_once, one_by_one) and torch.equal(after, generator.get_state())):
                return False
    return True


@functools.cache
def _draws_so(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch samples as this module does, with the same generator state."""
    before = generator_states(device)
    try:
        given = (
            torch.arange(1, 65, dtype=torch.float32, device=device).reshape(4, 16).to(dtype) / 64
        )
        found = []
        for number in (1, 3):
            set_generator_states(before)
            theirs = torch.multinomial(given, number)
            after = _now(before)
            set_generator_states(before)
            ours = _largest(given, torch.empty_like(given).exponential_(1), number)
            found.append(bool((theirs == ours).all()) and are_equal(after, _now(before)))
        return all(found)
    finally:
        set_generator_states(before)


def _now(like: States) -> States:
    found = {}
    for device in like:
        if device.type == "cpu":
            found[device] = torch.get_rng_state()
        else:
            found[device] = getattr(torch, device.type).get_rng_state(device)
    return found


def set_generator_states(states: States) -> None:
    """Set the states of the generators."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            getattr(torch, device.type).set_rng_state(state, device)


def are_equal(one: States, other: States) -> bool:
    """Return whether the generators have the same states."""
    # The states are on the host; a device may be full during the comparison.
    with torch_memory.on_host():
        return all(torch.equal(state, other[device]) for device, state in one.items())
