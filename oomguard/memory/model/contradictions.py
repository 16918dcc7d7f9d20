"""Whether a configuration and the headers of the weights beside it are of one model: an engine refuses them when they are not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from oomguard.errors import ConfigError
from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.shape import ModelShape

_DECODER: Final = r"(?:model\.|language_model\.|transformer\.|decoder\.|text_model\.)*"
_TABLE: Final = re.compile(_DECODER + r"(?:embed_tokens|wte)\.weight")
_LAYER: Final = re.compile(_DECODER + r"(?:layers|h)\.(\d+)\.")
# Vocabularies are padded in a file or beside it: https://huggingface.co/Qwen has 151,643 to 152,064 of one tokenizer.
_PADDED_RATIO: Final = 0.05
_HINT: Final = "give the folder of one model: its config.json and its own weights"


def check_headers(parameters: Sequence[Parameter], shape: ModelShape, path: str) -> None:
    """Raise ConfigError where the weights' headers are of another model than the configuration.

    Args:
        parameters: the tensors that the headers announce.
        shape: the configuration's numbers.
        path: the configuration's path, for the message.
    """
    for parameter in parameters:
        if parameter.floating and len(parameter.shape) == 2 and _TABLE.fullmatch(parameter.name):
            _check_table(parameter, shape, path)
    layers = {int(match.group(1)) for p in parameters if (match := _LAYER.match(p.name))}
    more = shape.number("num_nextn_predict_layers") or 0
    if layers and not shape.layers <= len(layers) <= shape.layers + more:
        raise ConfigError(
            f"num_hidden_layers is {shape.layers}, the weights' headers have {len(layers)} layers",
            path=path,
            hint=_HINT,
        )


def _check_table(table: Parameter, shape: ModelShape, path: str) -> None:
    rows, width = table.shape
    wanted = shape.number("word_embed_proj_dim") or shape.hidden
    if width == wanted and abs(rows - shape.vocab) <= _PADDED_RATIO * shape.vocab:
        return
    said = f"vocab_size is {shape.vocab} and hidden_size {wanted}"
    raise ConfigError(f"{said}, the weights' headers have {table.name} as {rows} by {width}", path=path, hint=_HINT)
