"""``model.to("cuda")``: a model that is loaded on the host and moved to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oomguard.engines.transformers.place import NotOneDeviceError, Place, place_of
from oomguard.engines.transformers.weight_bytes import weights_in
from oomguard.engines.transformers.weights_on_host import keep_on_host, put_on_simulated
from oomguard.facts import FactValue
from oomguard.observe.exceptions import may_be_oom
from oomguard.remedy.modelled_load import ON_DEVICE, Lighter, Weights


def move_of(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Move:
    """Read a call of ``to`` or ``cuda``; raise NotOneDeviceError where it goes to no device that is watched."""
    import torch

    if wrapped.__name__ == "cuda":
        given = args[0] if args else kwargs.get("device")
        return Move(wrapped, args, kwargs, place_of("cuda" if given is None else given))
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    if device is None:  # another data type
        raise NotOneDeviceError
    return Move(wrapped, args, kwargs, place_of(device))


class Move:
    """One move of a model to a device."""

    def __init__(
        self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Place
    ) -> None:
        self._wrapped, self._args, self._kwargs, self.place = wrapped, args, kwargs, place
        self._model: Any = wrapped.__self__  # type: ignore[attr-defined]  # a bound method

    @property
    def is_chosen(self) -> bool:
        """Whether the program named the device: a move always does."""
        return self.place.is_chosen

    @property
    def why_not_on_host(self) -> str | None:
        """Why no layer can wait on the host; None where they can."""
        from importlib.util import find_spec

        if getattr(self._model, "hf_quantizer", None) is not None:
            return "its weights are quantized"
        return None if find_spec("accelerate") is not None else "accelerate is not installed: pip install accelerate"

    def make(self, changed: Mapping[str, FactValue], host_bytes: int | None) -> Any:
        """Move the model, with these settings changed; one that has no room goes back to the host, with what of it has moved."""
        import torch

        share = changed.get(ON_DEVICE)
        if "dtype" in changed:
            torch.nn.Module.to(self._model, dtype=getattr(torch, str(changed["dtype"])))
        if share is not None:
            keep_on_host(self._model, self.place, int(share), host_bytes)
        moved = self._model if share is not None else self._moved()
        if self.place.is_simulated:
            put_on_simulated(moved)
        return moved

    def _moved(self) -> Any:
        import torch

        try:
            return self._wrapped(*self._args, **self._kwargs)
        except Exception as error:
            if may_be_oom(error) and not self.place.is_simulated:
                torch.nn.Module.to(self._model, "cpu")
            raise

    def weights(self) -> Weights:
        """Return what its weights are."""
        return weights_in(self._model)

    def lighter(self) -> tuple[Lighter, ...]:
        """Return its weights in 16 bits, where they have 32."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        need = sum(t.nbytes // 2 if t.is_floating_point() and t.element_size() == 4 else t.nbytes for t in tensors)
        if need == sum(tensor.nbytes for tensor in tensors):
            return ()
        return (Lighter("dtype", "bfloat16", 'dtype="bfloat16"', need),)
