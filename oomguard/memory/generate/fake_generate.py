"""``generate`` under fake tensors, which have shapes and sizes and no bytes: what would be alive at every step.

Nothing is allocated on any device. What ``generate`` asks of values is answered as in an ordinary call. This imports torch and
transformers, so only code that has them already may import it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import StoppingCriteria, StoppingCriteriaList

from oomguard.live_storages import LiveStorages
from oomguard.memory.generate.drawing import Drawn
from oomguard.memory.generate.fake_copies import FakeCopies
from oomguard.memory.generate.fake_in_place import as_on_device
from oomguard.memory.generate.fake_memory import FakeMemory
from oomguard.memory.generate.fake_moves import moving_fakes
from oomguard.memory.generate.scratch import KernelScratch
from oomguard.memory.generate.traced_steps import STEPS, TracedSteps

# Steps of the call that stands for another's end: the prefill, one that may still hold what it made, and the last.
_END_STEPS: Final = 3
# Operations whose answer is read as yes, "do beams go on"; "has all ended" (aten::eq) is no. The caller tells of the mask.
_READ_AS_TRUE: Final = frozenset({"aten::bitwise_and", "aten::logical_and"})
# What a call is made for; where it has none of them, its first tensor: images, sound.
_PROMPTS: Final = ("inputs", "input_ids", "inputs_embeds", "input_features")
_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_CAPTURING: Final = "transformers.utils.output_capturing"
# One trace at a time: it changes for its duration what transformers takes for a fake tensor.
_ONE_AT_A_TIME: Final = threading.RLock()
# A model's own loop may wait for a value that no fake tensor has: such a trace ends here.
_LONGEST_S: Final = 120.0
_READ: Final = torch.ops.aten._local_scalar_dense.default
_GROUPED: Final = getattr(torch.ops.aten, "_grouped_mm", None) and torch.ops.aten._grouped_mm.default


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy of a model under fake tensors: the same code and shapes, no bytes."""

    model: Any
    mode: FakeTensorMode


def twin_of(model: Any) -> Twin:
    """Copy a model under fake tensors; raises whatever copying a module of its kind raises."""
    with _disable_current_modes():
        # An operation without a shape rule raises here; otherwise it would run for real, on a device that is full.
        mode = FakeTensorMode(allow_fallback_kernels=False)
        with FakeCopyMode(mode):
            twin = copy.deepcopy(model)
    for module in twin.modules():
        for hooks in (getattr(module, name, {}) for name in _HOOKS):
            for number in [number for number, hook in hooks.items() if not _captures(hook)]:
                del hooks[number]  # the user's own functions must see no fake tensor
    return Twin(twin, mode)


def _captures(hook: Any) -> bool:
    """Return whether a hook is transformers' own, by which a model keeps the states and attentions that it is asked for."""
    return str(getattr(hook, "__module__", "")) == _CAPTURING


def trace_call(
    twin: Twin,
    arguments: Mapping[str, Any],
    steps: int,
    *,
    mask_is_full: bool,
    keep_events: bool = False,
) -> TracedSteps:
    """Trace a call of ``steps`` steps: its first ones, and its last one in a call that begins shortly before the end.

    Args:
        twin: the model under fake tensors.
        arguments: the arguments of ``generate``.
        steps: tokens that the call generates.
        mask_is_full: whether the attention mask hides nothing.
        keep_events: whether to keep allocations and ends, for a replay.

    Raises whatever the model's code raises under fake tensors.
    """
    first = trace_steps(twin, arguments, steps=min(STEPS, steps), mask_is_full=mask_is_full, keep_events=keep_events)
    if steps <= STEPS:
        return first
    end = trace_steps(twin, _near_the_end(twin, arguments, steps), steps=_END_STEPS, mask_is_full=mask_is_full)
    # The step after the prefill may still hold what only that made (a sliding window's longer past).
    return replace(first, end_bytes=end.peaks_bytes[-1] - end.start_bytes + first.start_bytes)


def _near_the_end(twin: Twin, arguments: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the arguments with all but the last tokens of the answer as part of the prompt."""
    changed = {
        name: value for name, value in arguments.items() if name not in {"max_length", "min_length", "min_new_tokens"}
    }
    changed["max_new_tokens"] = _END_STEPS
    main = next(arguments[n] for n in (*_PROMPTS, *arguments) if isinstance(arguments.get(n), torch.Tensor))
    if getattr(twin.model.config, "is_encoder_decoder", False):
        begun = arguments.get("decoder_input_ids")
        length = (0 if begun is None else begun.shape[1]) + steps - _END_STEPS
        with _disable_current_modes(), twin.mode:
            changed["decoder_input_ids"] = torch.ones((main.shape[0], length), dtype=torch.long, device=main.device)
        return changed
    prompt = main.shape[1]
    for name, value in changed.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == prompt:
            shape = (value.shape[0], prompt + steps - _END_STEPS, *value.shape[2:])
            with _disable_current_modes(), twin.mode:
                changed[name] = torch.empty(shape, dtype=value.dtype, device=value.device)
    return changed


def trace_steps(
    twin: Twin, arguments: Mapping[str, Any], *, steps: int, mask_is_full: bool, keep_events: bool = False
) -> TracedSteps:
    """Run the first ``steps`` steps of ``twin.model.generate(**arguments)``; real tensors among the arguments become fake.

    The arguments are those of ``trace_call``. Raises whatever the model's code raises under fake tensors.
    """
    storages = LiveStorages(keep_events=keep_events)
    watch = _Watch(storages, twin, mask_is_full=mask_is_full)
    with _ONE_AT_A_TIME, _disable_current_modes(), twin.mode, _as_if_real(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        faked = {name: _fake(twin.mode, value) for name, value in arguments.items()}
        for tensor in (*twin.model.parameters(), *twin.model.buffers()):
            storages.adopt(tensor)
        weights_bytes = storages.bytes
        for value in faked.values():
            storages.adopt(value)
        storages.reset_peak()
        start_bytes, ends = storages.bytes, _Steps(storages, steps)
        with watch, as_on_device(watch.device_type), FakeCopies(), FakeMemory():
            try:
                twin.model.generate(**faked, stopping_criteria=StoppingCriteriaList([ends]))
            except _EnoughError:
                pass
            else:  # it ended by itself: the last step has what came after it too
                if ends.peaks_bytes:
                    ends.peaks_bytes[-1] = max(ends.peaks_bytes[-1], storages.peak_bytes)
    # What ended because the call was broken off does not count.
    events = tuple(storages.events or ())[: ends.events_seen[-1] if ends.events_seen else None]
    return TracedSteps(
        weights_bytes,
        start_bytes,
        tuple(ends.peaks_bytes),
        events,
        tuple(ends.events_seen),
    )


@contextlib.contextmanager
def _as_if_real() -> Iterator[None]:
    """Hide from transformers that tensors are fake, as it would keep masks that an ordinary call leaves out; let their modules be moved."""
    from transformers.utils import import_utils

    asks, log = getattr(import_utils, "is_fake_tensor", None), logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # its exception already reports an operation without a shape rule
    try:
        if asks is not None:
            own = threading.get_ident()
            import_utils.is_fake_tensor = lambda x: False if threading.get_ident() == own else asks(x)
        with moving_fakes():
            yield
    finally:
        log.setLevel(level)
        if asks is not None:
            import_utils.is_fake_tensor = asks


def rows_like(twin: Twin, tensor: Any, rows: int) -> Any:
    """A fake tensor of the same kind with another number of rows."""
    with _disable_current_modes(), twin.mode:
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)


def is_full(mask: Any) -> bool:
    """Whether a real attention mask hides nothing; a simulated device does not see the question, and a full one needs no room for it."""
    with _disable_current_modes():
        return mask is None or not bool((mask.detach().to("cpu") == 0).any())


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    return value


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Counts what every operation makes on the device, and answers what is read of values."""

    def __init__(self, storages: LiveStorages, twin: Twin, *, mask_is_full: bool) -> None:
        super().__init__()
        self._storages, self._mask_is_full = storages, mask_is_full
        self.drawn = Drawn()
        self._ends_s = time.monotonic() + _LONGEST_S
        self.device_type = next((tensor.device.type for tensor in twin.model.parameters()), None)
        self._scratch = KernelScratch(self.device_type)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:
            if time.monotonic() > self._ends_s:
                raise TimeoutError(f"the trace has not ended after {_LONGEST_S:.0f} s")
            is_known = getattr(args[0], "constant", None) is not None  # made of numbers alone (LED's count of windows)
            return func(*args) if is_known else _answer(args[0])
        out = _grouped_product(*args, **(kwargs or {})) if func is _GROUPED else func(*args, **(kwargs or {}))
        self.drawn.note(func, args, kwargs or {}, out)
        if isinstance(out, torch.Tensor):
            self._note_answer(func._schema.name, args, out)
        blocks = self._scratch.blocks_bytes(func, args, kwargs or {}, out)
        if blocks is None:
            self._adopt(out)
            return out
        before, after = blocks
        with self._storages.passing(before):
            self._adopt(out)
            with self._storages.passing(after):
                return out

    def _adopt(self, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == (self.device_type or leaf.device.type):
                self._storages.adopt(leaf)  # not what waits on the host
        self._storages.note_peak()

    def _note_answer(self, name: str, args: Any, out: Any) -> None:
        """Note on what an operation gives how it is to be read, where that is not as no or as 0."""
        first: Any = args[0] if args else None
        if name == "aten::sum" and len(args) == 1 and first.dtype == torch.bool:
            out._oomguard_counted = first.dim(), first.numel()
        # The padding mask is asked whole, by how many of it are true (that is faster) or by all.
        counted = getattr(first, "_oomguard_counted", None) if name == "aten::eq" else None
        if counted is not None and counted[0] > 1 and args[1] == counted[1]:
            out._oomguard_true = self._mask_is_full
        # One entry a row is asked whether rows are packed, and they are not.
        elif name in _READ_AS_TRUE or (name == "aten::all" and (self._mask_is_full or first.dim() < 2)):
            out._oomguard_true = True


def _grouped_product(first: Any, second: Any, *_: Any, **options: Any) -> Any:
    """The experts' product has a shape rule for bfloat16 only (torch 2.13), real tensors of other types multiply all the same."""
    groups = (
        () if first.dim() != second.dim() else (second.shape[0],) if first.dim() == 3 else (options["offs"].shape[0],)
    )
    shape = (*groups, first.shape[-2], second.shape[-1])
    return torch.empty(shape, dtype=options.get("out_dtype") or first.dtype, device=first.device)


def _answer(tensor: Any) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return getattr(tensor, "_oomguard_true", False)
    return 0.0 if tensor.dtype.is_floating_point else 0


class _Steps(StoppingCriteria):  # type: ignore[misc]
    """Notes each step's peak, and ends the call after the last one asked for."""

    def __init__(self, storages: LiveStorages, steps: int) -> None:
        self._storages, self._steps = storages, steps
        self.peaks_bytes: list[int] = []
        self.events_seen: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.peaks_bytes.append(self._storages.peak_bytes)
        self.events_seen.append(len(self._storages.events or ()))
        self._storages.reset_peak()
        if len(self.peaks_bytes) >= self._steps:
            raise _EnoughError
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _EnoughError(Exception):
    pass
