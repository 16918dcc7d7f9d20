"""The audio encoder of a model of an encoder and a decoder (Whisper), read from its configuration.

Source: vllm/model_executor/models/whisper.py, 0.32. families.toml has the names of its numbers. Audio encoders whose tokens are part
of the prompt (Qwen2-Audio) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomguard.memory.model.encoder import Encoder
from oomguard.memory.model.families import encoder_decoder
from oomguard.memory.model.shape import is_count

_MLP_TENSORS: Final = 2


def read_audio_encoder(config: Mapping[str, Any], output_width: int) -> Encoder | None:
    """Read the encoder; None where the model's decoder does not attend across to one, or where a number is missing."""
    both = encoder_decoder(config)
    if both is None:
        return None
    names = both["encoder"]
    found = [config.get(names[name]) for name in ("width", "mlp_width", "tokens_per_item")]
    counts = [number for number in found if is_count(number) and number > 0]
    if len(counts) != len(found):
        return None
    width, mlp, tokens = counts
    return Encoder(width, mlp, _MLP_TENSORS, 1, tokens, output_width, modality=names["modality"], in_prompt=False)
