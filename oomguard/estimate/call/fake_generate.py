"""Run ``generate`` under fake tensors, which have shapes but no bytes, and track live memory.

Nothing is allocated on any device. Questions about tensor values get the answers of an ordinary
call. This module imports torch and transformers, so only import it if both are already loaded.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from oomguard.core.files import read_tables
from oomguard.estimate.call.call_budget import STEPS, TracedSteps
from oomguard.estimate.model.parameters import auto_config
from oomguard.probe.torch_memory import LiveStorages

# ``copy.deepcopy`` of a fake tensor must become an operation with a shape and a size.
#
# torch 2.13 itself copies the constants behind a fake tensor (``torch.tensor([1])``, like the
# end-of-sequence tokens). That raises, and the half-made copy is freed twice, which ends the
# process. Models copy tensors while running: assisted generation copies the configuration and the
# cache.


class FakeCopies(TorchFunctionMode):  # type: ignore[misc]
    """Copy each fake tensor once with ``clone``, and format its numbers as plain numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = bool(args) and isinstance(args[0], FakeTensor)
        if func is torch.Tensor.__format__ and is_fake and not args[0].dim():
            return format(
                args[0].item(), *args[1:]
            )  # same as for a real tensor: a name with a number in it
        if func is not torch.Tensor.__deepcopy__ or not is_fake:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                memo[id(tensor)] = torch.nn.Parameter(copied)
            else:
                memo[id(tensor)] = copied
        return memo[id(tensor)]


# Some torch functions add in place on a device, but out of place under a mode or with fake tensors.
#
# In torch 2.11 to 2.13 these are ATen/native's ``_scaled_dot_product_attention_math`` (the mask)
# and ``linear`` (the bias for a strided input), which check ``isTensorSubclassLike``. One
# additional tensor would shift every later block.

_FUNCTIONS: Final = frozenset(
    {torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.linear}
)
_ADD: Final = torch.ops.aten.add.Tensor
_ADD_IN_PLACE: Final = torch.ops.aten.add_.Tensor


def as_on_device(device_type: str | None) -> AbstractContextManager[object]:
    """Return a context in which these functions add like on a device of that type.

    The simulated device is itself a mode.
    """
    if device_type == "cuda":
        return FakeInPlace()
    return nullcontext()


class FakeInPlace(TorchFunctionMode):  # type: ignore[misc]
    """Make these functions add in place, like on a device without a tensor mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        with _InPlace():
            return func(*args, **(kwargs or {}))


class _InPlace(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape:
            return _ADD_IN_PLACE(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# A fake tensor has no memory, and code that reads at its address would end the process.
#
# torch (2.13) returns the address 0, and ``apply_`` writes there. Libraries only compare addresses,
# which is harmless. User code passes them to ctypes, a kernel or another library.

_CHANGED_BY_PYTHON: Final = frozenset({torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_})
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


class FakeMemory(TorchFunctionMode):  # type: ignore[misc]
    """Raise RuntimeError if user code accesses a fake tensor's memory.

    That is a Python function over each number (``apply_``), or the address in code outside of
    libraries.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in _CHANGED_BY_PYTHON or (
            func is torch.Tensor.data_ptr and not _is_installed(sys._getframe(1))
        )
        if reads and any(isinstance(arg, FakeTensor) for arg in args):
            raise RuntimeError(
                "Cannot access data pointer of a fake tensor"
            )  # torch's own message for this
        return func(*args, **(kwargs or {}))


def _is_installed(frame: Any) -> bool:
    return not _INSTALLED.isdisjoint(Path(frame.f_code.co_filename).parts)


# Model code may move a module to another data type or device (``router.to(torch.float32)``).
#
# torch 2.13 swaps the weights of such a module in place, which fails for fake tensors.


@contextlib.contextmanager
def moving_fakes() -> Iterator[None]:
    """Make modules replace fake tensors with new ones in this thread."""
    torchs = torch.nn.Module._apply
    own = threading.get_ident()

    def apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        tensors = [*self.parameters(recurse=recurse), *self.buffers(recurse=recurse)]
        has_fakes = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if threading.get_ident() != own or not has_fakes:
            return torchs(self, fn, recurse)
        for module in self.modules() if recurse else [self]:
            for held in (module._parameters, module._buffers):
                held.update({name: _moved(tensor, fn) for name, tensor in held.items()})
        return self

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = torchs


def _moved(tensor: Any, fn: Callable[[Any], Any]) -> Any:
    if tensor is None:
        return None
    with torch.no_grad():
        moved = fn(tensor)
    if moved is tensor or not isinstance(tensor, torch.nn.Parameter):
        return moved
    return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)


# Kernels allocate scratch memory when an operation begins and free it when the operation ends.
#
# scratch.toml has the formulas by torch's operation names.

_FILE: Final = Path(__file__).with_name("scratch.toml")
_RESULT: Final = "result"


@dataclass(frozen=True, slots=True)
class ScratchBlock:
    """Describe one scratch block: a sum of products, each a factor and names of numbers.

    ``least`` and ``below`` limit numbers by name; outside of them there is no block. A block with
    ``before`` exists before the result. The operation succeeds without a block that ``may_fail``.
    """

    terms: tuple[tuple[float, tuple[str, ...]], ...]
    least: Mapping[str, float]
    below: Mapping[str, float]
    before: bool
    may_fail: bool

    def bytes(self, numbers: Mapping[str, float]) -> int:
        """Return the block's bytes, or 0 if there is no block."""
        if any(numbers[name] < limit for name, limit in self.least.items()):
            return 0
        if any(numbers[name] >= limit for name, limit in self.below.items()):
            return 0
        return math.ceil(
            sum(times * math.prod(numbers[name] for name in names) for times, names in self.terms)
        )


class KernelScratch:
    """Hold the scratch blocks of all operations on one device type, e.g. ``cuda``."""

    def __init__(self, device_type: str | None) -> None:
        self._blocks = _operations().get(device_type or "", {})

    def blocks_bytes(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[list[int], list[int]] | None:
        """Return the bytes of an operation's scratch blocks before and after its result.

        Returns None if the operation has none. An operation always has the same number of blocks,
        so that calls with other batch sizes compare linearly: an unused block has one byte. Blocks
        that may fail are negative.
        """
        blocks = self._blocks.get(operation._schema.name)
        if blocks is None:
            return None
        numbers = _numbers(operation, args, kwargs, result)
        found: tuple[list[int], list[int]] = ([], [])
        for block in blocks:
            found[not block.before].append(
                max(1, block.bytes(numbers)) * (-1 if block.may_fail else 1)
            )
        return found


def _numbers(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> dict[str, float]:
    """Return the numbers that formulas may name, by torch's argument names.

    ``self.bytes`` is a tensor's size, ``k`` a plain number.
    """
    given = _given(operation, args, kwargs)
    numbers: dict[str, float] = {}
    for name, value in (*given.items(), (_RESULT, next(iter(tree_leaves(result)), None))):
        if isinstance(value, (list, tuple)):
            numbers[f"{name}.tensors"] = sum(isinstance(entry, torch.Tensor) for entry in value)
        elif isinstance(value, torch.Tensor):
            if value.dim():
                width = value.shape[-1]
            else:
                width = 1
            numbers |= {
                f"{name}.bytes": value.numel() * value.element_size(),
                f"{name}.elements": value.numel(),
                f"{name}.width": width,
                f"{name}.rows": value.numel() // max(1, width),
                f"{name}.channels": value.shape[1] if value.dim() > 1 else 1,
                f"{name}.element_bytes": value.element_size(),
                f"{name}.copied_bytes": 0
                if _is_in_order(value)
                else value.numel() * value.element_size(),
            }
        elif isinstance(value, (bool, int, float)):
            numbers[name] = value
    return numbers


def _given(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an operation's arguments by name, defaults included."""
    given = {}
    for argument in operation._schema.arguments:
        if argument.has_default_value():
            given[argument.name] = argument.default_value
    for argument, value in zip(operation._schema.arguments, args, strict=False):
        given[argument.name] = value
    return {**given, **kwargs}


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Return whether a kernel reads a tensor without copying it first."""
    is_image = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return bool(is_image or tensor.is_contiguous())


@cache
def _operations() -> dict[str, dict[str, tuple[ScratchBlock, ...]]]:
    """Return the scratch blocks of every operation, by device type."""
    found: dict[str, dict[str, tuple[ScratchBlock, ...]]] = {}
    for row in read_tables("scratch", [_FILE])[_FILE]["operation"]:
        blocks = tuple(_block(block) for block in row["blocks"])
        found.setdefault(row["device"], {}).update(dict.fromkeys(row["names"], blocks))
    return found


def _block(row: Mapping[str, Any]) -> ScratchBlock:
    terms = tuple((times, tuple(names)) for times, *names in row["sum"])
    limits = row.get("least", {}), row.get("below", {})
    return ScratchBlock(terms, *limits, row.get("before", False), row.get("may_fail", False))


# Steps of the short call that represents the end of another: the prefill, a step that may still
# have the prefill's tensors, and the last step.
_END_STEPS: Final = 3
# The trace reads these operations as true ("continue the beam search") and aten::eq ("all rows have
# ended") as false. The caller supplies the answer for the mask.
_READ_AS_TRUE: Final = frozenset({"aten::bitwise_and", "aten::logical_and"})
# The inputs of a call; without any of them it is the call's first tensor: images or sound.
_PROMPTS: Final = ("inputs", "input_ids", "inputs_embeds", "input_features")
_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_CAPTURING: Final = "transformers.utils.output_capturing"
# One trace at a time, because it changes what transformers considers a fake tensor.
_ONE_AT_A_TIME: Final = threading.RLock()
# A model's own loop may wait for a value that no fake tensor has. The trace ends after this time.
_LONGEST_S: Final = 120.0
_READ: Final = torch.ops.aten._local_scalar_dense.default
_GROUPED: Final = (
    getattr(torch.ops.aten, "_grouped_mm", None) and torch.ops.aten._grouped_mm.default
)


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Hold a copy of a model under fake tensors: the same code and shapes without bytes."""

    model: Any
    mode: FakeTensorMode


def twin_of(model: Any) -> FakeModel:
    """Copy a model under fake tensors; raises the same errors as copying its modules."""
    with _disable_current_modes():
        # An operation without a shape rule raises here. Otherwise it would run on the full device.
        mode = FakeTensorMode(allow_fallback_kernels=False)
        with FakeCopyMode(mode):
            twin = copy.deepcopy(model)
    for module in twin.modules():
        for hooks in (getattr(module, name, {}) for name in _HOOKS):
            for number, hook in list(hooks.items()):
                if not _captures(hook):
                    del hooks[number]  # the user's own functions must see no fake tensor
    return FakeModel(twin, mode)


def _captures(hook: Any) -> bool:
    """Return whether a hook is transformers' own hook for hidden states and attentions."""
    return str(getattr(hook, "__module__", "")) == _CAPTURING


def trace_call(
    twin: FakeModel,
    arguments: Mapping[str, Any],
    steps: int,
    *,
    mask_is_full: bool,
    keep_events: bool = False,
) -> TracedSteps:
    """Trace a call of ``steps`` steps: its first steps, and its last one in a shorter call.

    Args:
        twin: the model under fake tensors.
        arguments: the arguments of ``generate``.
        steps: tokens that the call generates.
        mask_is_full: whether the attention mask hides nothing.
        keep_events: whether to record allocations and frees for a replay.

    Raises:
        Exception: the model's code fails under fake tensors.
    """
    first = trace_steps(
        twin, arguments, steps=min(STEPS, steps), mask_is_full=mask_is_full, keep_events=keep_events
    )
    if steps <= STEPS:
        return first
    end = trace_steps(
        twin, _near_the_end(twin, arguments, steps), steps=_END_STEPS, mask_is_full=mask_is_full
    )
    # The step after the prefill may still have tensors of the prefill (a sliding window's longer
    # cache).
    return replace(first, end_bytes=end.peaks_bytes[-1] - end.start_bytes + first.start_bytes)


def _near_the_end(twin: FakeModel, arguments: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the arguments with all but the last tokens of the answer as part of the prompt."""
    changed = {**arguments, "max_new_tokens": _END_STEPS}
    for name in ("max_length", "min_length", "min_new_tokens"):
        changed.pop(name, None)
    for name in (*_PROMPTS, *arguments):
        main: Any = arguments.get(name)
        if isinstance(main, torch.Tensor):
            break
    if getattr(twin.model.config, "is_encoder_decoder", False):
        begun = arguments.get("decoder_input_ids")
        length = (0 if begun is None else begun.shape[1]) + steps - _END_STEPS
        with _disable_current_modes(), twin.mode:
            changed["decoder_input_ids"] = torch.ones(
                (main.shape[0], length), dtype=torch.long, device=main.device
            )
        return changed
    prompt = main.shape[1]
    for name, value in changed.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == prompt:
            shape = (value.shape[0], prompt + steps - _END_STEPS, *value.shape[2:])
            with _disable_current_modes(), twin.mode:
                changed[name] = torch.empty(shape, dtype=value.dtype, device=value.device)
    return changed


def trace_steps(
    twin: FakeModel,
    arguments: Mapping[str, Any],
    *,
    steps: int,
    mask_is_full: bool,
    keep_events: bool = False,
) -> TracedSteps:
    """Run the first ``steps`` steps of ``twin.model.generate(**arguments)`` on fake tensors.

    The arguments are the same as for ``trace_call``; real tensors among them become fake.

    Raises:
        Exception: the model's code fails under fake tensors.
    """
    storages = LiveStorages(keep_events=keep_events)
    watch = _Watch(storages, twin, mask_is_full=mask_is_full)
    with (
        _ONE_AT_A_TIME,
        _disable_current_modes(),
        twin.mode,
        _as_if_real(),
        warnings.catch_warnings(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        faked = {name: _fake(twin.mode, value) for name, value in arguments.items()}
        for tensor in (*twin.model.parameters(), *twin.model.buffers()):
            storages.adopt(tensor)
        weights_bytes = storages.bytes
        for value in faked.values():
            storages.adopt(value)
        storages.reset_peak()
        start_bytes = storages.bytes
        ends = _Steps(storages, steps)
        with watch, as_on_device(watch.device_type), FakeCopies(), FakeMemory():
            try:
                twin.model.generate(**faked, stopping_criteria=StoppingCriteriaList([ends]))
            except _EnoughError:
                pass
            else:  # the call ended early: the last step includes what came after it
                if ends.peaks_bytes:
                    ends.peaks_bytes[-1] = max(ends.peaks_bytes[-1], storages.peak_bytes)
    # Ignore frees that only happened because the trace interrupted the call.
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
    """Hide from transformers that tensors are fake, and let their modules move.

    Otherwise transformers would build masks that an ordinary call omits.
    """
    from transformers.utils import import_utils

    asks = getattr(import_utils, "is_fake_tensor", None)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(
        logging.CRITICAL
    )  # the exception already reports an operation without a shape rule
    try:
        if asks is not None:
            own = threading.get_ident()
            import_utils.is_fake_tensor = lambda x: (
                False if threading.get_ident() == own else asks(x)
            )
        with moving_fakes():
            yield
    finally:
        log.setLevel(level)
        if asks is not None:
            import_utils.is_fake_tensor = asks


def rows_like(twin: FakeModel, tensor: Any, rows: int) -> Any:
    """Return a fake tensor of the same kind with another number of rows."""
    with _disable_current_modes(), twin.mode:
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)


def is_full(mask: Any) -> bool:
    """Return whether a real attention mask hides nothing.

    A simulated device does not see the question. A full device has room for it.
    """
    with _disable_current_modes():
        return mask is None or not bool((mask.detach().to("cpu") == 0).any())


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    return value


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Count every operation's bytes on the device, and answer questions about values."""

    def __init__(self, storages: LiveStorages, twin: FakeModel, *, mask_is_full: bool) -> None:
        super().__init__()
        self._storages = storages
        self._mask_is_full = mask_is_full
        self._ends_s = time.monotonic() + _LONGEST_S
        self.device_type = next((tensor.device.type for tensor in twin.model.parameters()), None)
        self._scratch = KernelScratch(self.device_type)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:
            if time.monotonic() > self._ends_s:
                raise TimeoutError(f"the trace did not end within {_LONGEST_S:.0f} s")
            is_known = (
                getattr(args[0], "constant", None) is not None
            )  # an integer from plain numbers (LED's count of windows)
            if is_known:
                return func(*args)
            return _answer(args[0])
        if func is _GROUPED:
            out = _grouped_product(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
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
            if isinstance(leaf, torch.Tensor) and leaf.device.type == (
                self.device_type or leaf.device.type
            ):
                self._storages.adopt(leaf)  # not storages on the host
        self._storages.note_peak()

    def _note_answer(self, name: str, args: Any, out: Any) -> None:
        """Remember how to answer an operation's result if the answer is neither false nor 0."""
        first: Any = args[0] if args else None
        if name == "aten::sum" and len(args) == 1 and first.dtype == torch.bool:
            out._oomguard_counted = first.dim(), first.numel()
        # transformers checks the whole padding mask, by its number of true entries (faster) or by
        # all.
        if name == "aten::eq":
            counted = getattr(first, "_oomguard_counted", None)
        else:
            counted = None
        if counted is not None and counted[0] > 1 and args[1] == counted[1]:
            out._oomguard_true = self._mask_is_full
        # With one entry per row, transformers asks whether rows are packed, and they are not.
        elif name in _READ_AS_TRUE or (
            name == "aten::all" and (self._mask_is_full or first.dim() < 2)
        ):
            out._oomguard_true = True


def _grouped_product(first: Any, second: Any, *_: Any, **options: Any) -> Any:
    """Compute the shape of the experts' product for any data type.

    torch 2.13 has a shape rule for bfloat16 only, though real tensors of other types work.
    """
    if first.dim() != second.dim():
        groups = []
    elif first.dim() == 3:
        groups = [second.shape[0]]
    else:
        groups = [options["offs"].shape[0]]
    shape = (*groups, first.shape[-2], second.shape[-1])
    return torch.empty(shape, dtype=options.get("out_dtype") or first.dtype, device=first.device)


def _answer(tensor: Any) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return getattr(tensor, "_oomguard_true", False)
    if tensor.dtype.is_floating_point:
        return 0.0
    return 0


class _Steps(StoppingCriteria):  # type: ignore[misc]
    """Record each step's peak, and end the call after the last traced step."""

    def __init__(self, storages: LiveStorages, steps: int) -> None:
        self._storages = storages
        self._steps = steps
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


# The child process of ``traced_steps``: one JSON object on standard input, one on standard output,
# with the bytes of the weights, the peak of each step, and the allocations in order.


def _trace_question(asked: dict[str, Any]) -> TracedSteps:
    """Trace one call; ``asked`` has the model's configuration and the call's numbers."""
    if asked["cache_implementation"]:
        options = {"cache_implementation": asked["cache_implementation"]}
    else:
        options = {}
    with FakeTensorMode() as mode:
        model = AutoModelForCausalLM.from_config(
            auto_config(asked["config"]),
            attn_implementation=asked["attn_implementation"],
            dtype=getattr(torch, asked["dtype"]),
            trust_remote_code=False,
        ).eval()
    rows = asked["batch_size"]
    length = asked["prompt_tokens"]
    arguments = {
        "input_ids": torch.ones((rows, length), dtype=torch.long),
        "attention_mask": torch.ones((rows, length), dtype=torch.long),
        "max_new_tokens": asked["max_new_tokens"],
        "do_sample": False,
        "num_beams": asked["num_beams"],
        "pad_token_id": 0,
        "eos_token_id": None,
        **options,
    }
    return trace_call(
        FakeModel(model, mode),
        arguments,
        asked["max_new_tokens"],
        mask_is_full=True,
        keep_events=True,
    )


def main() -> None:
    """Trace the call from standard input."""
    print(json.dumps(asdict(_trace_question(json.load(sys.stdin)))))  # noqa: T201 - the answer to the parent
