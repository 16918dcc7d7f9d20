"""Which of vLLM's two model runners starts a model: they profile different things, and keep other numbers of steps in flight."""

from __future__ import annotations

from packaging.version import Version

from oomguard.memory.constants import since
from oomguard.memory.model.layer_kinds import layer_kinds
from oomguard.memory.model.shape import ModelShape


def model_runner(version: Version, shape: ModelShape) -> int:
    """Return 1 or 2, by the version's default: ``VLLM_USE_V2_MODEL_RUNNER`` of the engine's environment is not known here."""
    if since("second_runner_since", version):
        return 2
    dense = (shape.number("num_experts") or 0) <= 1 and set(layer_kinds(shape)) <= {"full", "sliding"}
    return 2 if dense and not shape.has_encoder and since("second_runner_of_dense_since", version) else 1
