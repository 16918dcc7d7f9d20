"""A planned call of transformers' ``generate``, as it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oomguard.budgeting.device import find_gpu
from oomguard.budgeting.values import CALL_SETTINGS, SettingValue, read_values
from oomguard.memory.generate.call import CallBudget, PlannedCall
from oomguard.memory.generate.call_budget import budget_call
from oomguard.memory.model.files import find_model
from oomguard.memory.model.model import Model, read_model

_DEFAULTS: Final = {"batch_size": 1, "prompt_tokens": 1024, "max_new_tokens": 256}


@dataclass(frozen=True, slots=True)
class AskedCall:
    """A call to budget: the model read once, the call's numbers, and the GPU's size.

    ``trace`` runs the model's own code under fake tensors in place of the closed form.
    """

    model: Model
    call: PlannedCall
    gpu_total_bytes: int
    trace: bool

    def budget(self) -> CallBudget:
        """Budget the call; raises SettingError for its numbers, InputError where ``trace`` cannot run the model."""
        return budget_call(self.model, self.call, self.gpu_total_bytes, trace=self.trace)


def ask_for_call(
    model: str,
    *,
    gpu_memory: str | int | None = None,
    gpu: int | None = None,
    gpu_name: str | None = None,
    trace: bool = False,
    **values: SettingValue,
) -> AskedCall:
    """Read what a call is asked for with; the arguments are those of ``oomguard.plan``."""
    given = _DEFAULTS | read_values(values, CALL_SETTINGS, ("gpu_memory", "gpu_name", "trace"))
    total_bytes = find_gpu(gpu_memory, gpu, gpu_name).total_bytes
    dtype, quantization = given.pop("dtype", "auto"), given.pop("quantization", None)
    read = read_model(find_model(model), dtype=dtype, quantization=quantization)
    weights_dtype = "float32" if read.shape.dtype_bytes == 4 else "bfloat16"
    return AskedCall(read, PlannedCall(read.shape.config, **given, dtype=weights_dtype), total_bytes, trace)
