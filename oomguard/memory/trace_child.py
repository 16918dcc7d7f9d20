"""Run by a child process: ``generate`` of a model under fake tensors, which have shapes and sizes and no bytes.

Reads one JSON object on standard input and prints one: the bytes of the weights and the peak of each step. Nothing is allocated
on any device: shapes decide what would be live, and what ``generate`` asks of values is answered as an ordinary call would be.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from oomguard.memory.parameters import auto_config

# Which operation's answer is read as yes: "is the mask all ones", and "do beams go on"; "has all ended" (aten::eq) is no.
_READ_AS_TRUE: Final = frozenset({"aten::all", "aten::bitwise_and", "aten::logical_and"})
_READ: Final = torch.ops.aten._local_scalar_dense.default


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, Any] = {}

    def adopt(self, tensor: object) -> None:
        """Count the tensor's storage from now on."""
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._ends[key] = weakref.ref(storage, functools.partial(self._drop, key))
        elif known == size:
            return
        self._sizes[key] = size
        self.live += size - (known or 0)
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int, _: object) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._ends.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:
            return _answer(args[0])
        out = func(*args, **(kwargs or {}))
        if func._schema.name in _READ_AS_TRUE and isinstance(out, torch.Tensor):
            out._oomguard_true = True
        for leaf in tree_leaves(out):
            self.adopt(leaf)
        return out


def _answer(tensor: Any) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return getattr(tensor, "_oomguard_true", False)
    return 0.0 if tensor.dtype.is_floating_point else 0


class _Steps(StoppingCriteria):  # type: ignore[misc]
    """Notes each step's peak, and ends the call after the last one asked for."""

    def __init__(self, live: LiveBytes, steps: int) -> None:
        self.live, self.steps = live, steps
        self.peaks: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.peaks.append(self.live.peak)
        self.live.peak = self.live.live
        if len(self.peaks) >= self.steps:
            raise _EnoughError
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _EnoughError(Exception):
    pass


def trace(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question; ``asked`` has the model's configuration and the call's numbers."""
    options = {"cache_implementation": asked["cache_implementation"]} if asked["cache_implementation"] else {}
    dtype = getattr(torch, asked["dtype"])
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(
            auto_config(asked["config"]), attn_implementation=asked["attn_implementation"], dtype=dtype
        ).eval()
        live = LiveBytes()
        for tensor in (*model.parameters(), *model.buffers()):
            live.adopt(tensor)
        weights, steps = live.live, _Steps(live, asked["steps"])
        rows, length = asked["batch_size"], asked["prompt_tokens"]
        ids, mask = torch.ones((rows, length), dtype=torch.long), torch.ones((rows, length), dtype=torch.long)
        with live, torch.no_grad():
            live.adopt(ids)
            live.adopt(mask)
            try:
                model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=asked["max_new_tokens"], do_sample=False,
                    num_beams=asked["num_beams"], pad_token_id=0, eos_token_id=None,
                    stopping_criteria=StoppingCriteriaList([steps]), **options,
                )  # fmt: skip
            except _EnoughError:
                pass
            else:
                steps.peaks[-1:] = [max([*steps.peaks[-1:], live.peak])]
    return {"weights_bytes": weights, "peaks_bytes": steps.peaks}


def main() -> None:
    """Answer the question on standard input."""
    print(json.dumps(trace(json.load(sys.stdin))))  # noqa: T201 - the answer to the parent


if __name__ == "__main__":
    main()
