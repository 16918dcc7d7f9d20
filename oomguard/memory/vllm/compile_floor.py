"""What a start measures at least while it compiles: with an empty compile cache the peak has a floor of about one embedding table.

A second start of the same settings loads the compiled graphs from vLLM's cache, and its peak is without the floor. In some versions
it may count the table's memory once more after it was freed.
"""

from __future__ import annotations

from oomguard.memory.constants import constant
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.known_gpu import is_rocm
from oomguard.memory.vllm.start import VllmSettings


def compile_floor_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the least peak of a start that compiles, on a rank with the embedding; 0 for one that does not.

    A model of text and images looks its embeddings up before what is compiled.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    rule, tables = constant("compile_floor", settings.version), _tables_bytes(settings, shape)
    return tables + int(rule["base_bytes"]) if tables else 0


def pinned_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    """Return what may stay of the freed table beside the peak of a start that compiles, in versions where a small tensor can pin its block.

    Published starts had it on some machines and not on others, for no reason that the sources give: a plan names it, and does not count it.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    return _tables_bytes(settings, shape) if constant("compile_floor", settings.version).get("pinned") else 0


def _tables_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    tables = int(constant("compile_floor", settings.version)["tables"])
    compiled = (
        settings.device != "cpu" and not settings.enforce_eager and not shape.has_encoder and not is_rocm(settings)
    )
    table = shape.vocab * shape.hidden * shape.dtype_bytes // settings.tensor_parallel_size
    return tables * table if compiled else 0
