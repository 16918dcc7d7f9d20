"""A model's forward under fake tensors: what would be alive at its peak, and what it would give.

As fake_generate.py this imports torch, so only code that has it already may import it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from oomguard.live_storages import LiveStorages
from oomguard.memory.generate.drawing import Drawn
from oomguard.memory.generate.fake_copies import FakeCopies
from oomguard.memory.generate.fake_generate import _ONE_AT_A_TIME, Twin, _as_if_real, _fake, _Watch
from oomguard.memory.generate.fake_in_place import as_on_device
from oomguard.memory.generate.fake_memory import FakeMemory


@dataclass(frozen=True, slots=True)
class TracedForward:
    """A forward under fake tensors.

    Attributes:
        need_bytes: bytes at its peak beyond its arguments.
        result_bytes: bytes of what it gives.
        events: allocations and ends beyond the arguments, for a replay.
        shapes: of the tensors that it gives, as far as they are seen.
    """

    need_bytes: int
    result_bytes: int
    events: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[int, ...], ...]


def trace_forward(
    twin: Twin,
    arguments: Mapping[str, Any],
    *,
    mask_is_full: bool,
    keep_events: bool,
    drew: Callable[[Drawn], object] = lambda _: None,
) -> TracedForward:
    """Run ``twin.model(**arguments)``; real tensors among the arguments become fake.

    ``drew`` is called with what was drawn, also where it fails. Raises whatever the model's code raises under fake tensors.
    """
    storages = LiveStorages(keep_events=keep_events)
    watch = _Watch(storages, twin, mask_is_full=mask_is_full)
    with _ONE_AT_A_TIME, _disable_current_modes(), twin.mode, _as_if_real(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        faked = tree_map_only(torch.Tensor, lambda tensor: _fake(twin.mode, tensor), dict(arguments))
        for tensor in (*twin.model.parameters(), *twin.model.buffers()):
            storages.adopt(tensor)
        for value in faked.values():
            storages.adopt(value)
        storages.reset_peak()
        start_bytes, begun = storages.bytes, len(storages.events or ())
        try:
            with watch, as_on_device(watch.device_type), FakeCopies(), FakeMemory():
                result = twin.model(**faked)
        finally:
            drew(watch.drawn)
        need_bytes, result_bytes = storages.peak_bytes - start_bytes, storages.bytes - start_bytes
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        del result
    return TracedForward(need_bytes, result_bytes, tuple(storages.events or ())[begun:], shapes)
