"""Which models stand behind a failed start: each that can be read here, the most exact first."""

from __future__ import annotations

from oomguard.incident import Incident
from oomguard.memory.vllm.exact_kv import ExactKv, contradiction_of, kv_of
from oomguard.memory.vllm.failed_allocation import failed_allocation
from oomguard.memory.vllm.failed_start import fails_while_profiling
from oomguard.remedy.modelled import FailureModel, Models
from oomguard.remedy.modelled_allocation import AllocationModel
from oomguard.remedy.modelled_kv import KvModel
from oomguard.remedy.modelled_start import start_model


def models_behind(incident: Incident, model: str | None = None) -> FailureModel | None:
    """Return what is behind a failure of vLLM, None where nothing of it can be read here.

    ``model`` is the folder or hub name to read in place of the one that the log names.
    """
    start = start_model(incident, model)
    if start is not None and fails_while_profiling(incident):
        return Models(
            (start,)
        )  # a smaller step shrinks all of its tensors, and what is left for the KV cache counts too
    cache, allocation = kv_of(incident, model), failed_allocation(incident, model)
    if cache is not None and _is_laid_out_otherwise(cache, incident):
        cache = start = None  # what the engine printed counts
    found = (
        None if allocation is None else AllocationModel(allocation),
        None if cache is None else KvModel(cache),
        start,
    )
    models = tuple(one for one in found if one is not None)
    return Models(models) if models else None


def _is_laid_out_otherwise(cache: ExactKv, incident: Incident) -> bool:
    """Return whether the engine lays the cache out otherwise: where its bytes or blocks were set, nothing else explains the difference."""
    is_set = any(incident.number(name) is not None for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override"))
    return is_set and contradiction_of(cache, incident) is not None
