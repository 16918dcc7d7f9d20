"""Arguments of a model's forward for a few rows, found by its signature and by what it says is
missing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from support.tiny_models import parts_of

ROWS = 6
TOKENS = 16
# How many tokens of each row are no padding.
LENGTHS = (16, 11, 16, 7, 13, 16)
_MOST_REPAIRS = 10
_MOST_TOKENS = 1024
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")
_NAMED = re.compile(r"[`'\"]?([a-z][a-z_0-9]+)[`'\"]?")
_UNEQUAL = re.compile(r"[tT]okens:? (\d+),? (?:and )?(?:\w+ )?features:? (\d+)")


@dataclass(slots=True)
class Inputs:
    """What a model is given.

    Attributes:
        rows: tensors with ``per_row`` entries of each row along their first axis.
        per_row: how many these are; 1 where it is not named.
        others: arguments that are the same for any number of rows.
    """

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    per_row: dict[str, int] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Whether a row has several entries in an argument."""
        return any(number != 1 for number in self.per_row.values())

    def of(self, order: Sequence[int]) -> dict[str, Any]:
        """Return the arguments with the rows of these numbers."""
        found: dict[str, Any] = dict(self.others)
        for name, tensor in self.rows.items():
            each = self.per_row.get(name, 1)
            places = [row * each + number for row in order for number in range(each)]
            found[name] = tensor[places]
        return found


class InputsError(Exception):
    """No arguments were found that a model takes."""


@dataclass(slots=True)
class Maker:
    """Makes arguments of one model.

    Attributes:
        model: the model.
        call: what is called with them.
        is_padded: whether rows end, or begin, with padding.
        for_generate: whether they are for ``generate``.
        placeholders: how many tokens of each row stand for images or sound, by the token.
        counts: those numbers that were tried.
    """

    model: Any
    is_padded: bool
    for_generate: bool = False
    placeholders: dict[int, int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the model's forward."""
        return inspect.signature(self.model.forward).parameters

    def find(self, call: Callable[[dict[str, Any]], object], media: bool) -> Inputs:
        """Return arguments that a call takes; raises ``InputsError`` with what it said last.

        Args:
            call: runs the model; called with all rows.
            media: whether images or sound are given with the text.
        """
        names = self._begin(media)
        last = ""
        tried: set[str] = set()
        for _ in range(_MOST_REPAIRS):
            inputs = self.make(names)
            try:
                call(inputs.of(range(ROWS)))
            except Exception as error:
                last = f"{type(error).__name__}: {error}"
                if not self._repair(last, names, tried):
                    raise InputsError(last) from error
            else:
                return inputs
        raise InputsError(last)

    def make(self, names: Sequence[str]) -> Inputs:
        """Return arguments of these names."""
        inputs = Inputs()
        self.generator.manual_seed(7)
        for name in names:
            value = _PROVIDERS[name](self)
            if isinstance(value, tuple):
                inputs.rows[name], inputs.per_row[name] = value
            elif isinstance(value, torch.Tensor):
                is_choice = "MultipleChoice" in type(self.model).__name__ and name in _OF_TEXT
                if is_choice:
                    inputs.rows[name] = torch.stack([value, value], 1)
                else:
                    inputs.rows[name] = value
            else:
                inputs.others[name] = value
        return inputs

    @property
    def is_text(self) -> bool:
        """Whether the model is given tokens, so that rows can be padded."""
        return "input_ids" in self.parameters and "attention_mask" in self.parameters

    @property
    def has_media(self) -> bool:
        """Whether the model takes images or sound with its text."""
        return "input_ids" in self.parameters and any(name in self.parameters for name in _MEDIA)

    def _begin(self, media: bool) -> list[str]:
        given = self.parameters
        names = []
        main = getattr(self.model, "main_input_name", "input_ids")
        if "input_ids" in given:
            names.append("input_ids")
        elif main in given and main in _PROVIDERS:
            names.append(main)
        if media:
            names += [
                name
                for name in _MEDIA
                if name in given and name in _PROVIDERS and name not in names
            ][:1]
            if "image_grid_thw" in given and "pixel_values" in names:
                names.append("image_grid_thw")
        required = [
            name
            for name, each in given.items()
            if each.default is inspect.Parameter.empty
            and each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        names += [name for name in required if name in _PROVIDERS and name not in names]
        if (
            "attention_mask" in given
            and ("input_ids" in names or "input_values" in names)
            and self._masks
        ):
            names.append("attention_mask")
        makes_own = type(self.model).__name__.endswith(("Classification", "QuestionAnswering"))
        is_pair = getattr(self.model.config, "is_encoder_decoder", False) and not makes_own
        if is_pair and "decoder_input_ids" in given and not self.for_generate:
            names.append("decoder_input_ids")
        return names

    @property
    def _masks(self) -> bool:
        return self.is_padded or "input_ids" in self.parameters

    def _repair(self, said: str, names: list[str], tried: set[str]) -> bool:
        """Change the names, or what stands in the tokens, by what a model says; return whether
        something was changed.
        """
        if found := _UNEQUAL.search(said):
            return self._fill(int(found[2]))
        missing = _MISSING.search(said)
        candidates = _NAMED.findall(missing[1] if missing else said)
        for name in candidates:
            known = name in _PROVIDERS and (name in self.parameters or self.for_generate)
            if known and name not in names and name not in tried:
                names.append(name)
                tried.add(name)
                return True
        if (
            "unexpected keyword" in said
            or "not used by the model" in said
            or "multiple values" in said
        ):
            for name in candidates:
                if name in names and len(names) > 1:
                    names.remove(name)
                    tried.add(name)
                    return True
        if "attention_mask" in names and "attention_mask" not in tried:
            names.remove("attention_mask")
            tried.add("attention_mask")
            return True
        more = [
            name
            for name in _MORE
            if name in self.parameters
            and name not in names
            and name not in tried
            and name in _PROVIDERS
        ]
        if more:
            names.append(more[0])
            tried.add(more[0])
            return True
        return False

    def _fill(self, features: int) -> bool:
        """Have the text as many tokens for images as images give; some models count the numbers of
        all of them.
        """
        token = self.media_token()
        for each in (ROWS * self.width, ROWS):
            number = features // each
            if (
                token is not None
                and features % each == 0
                and number < _MOST_TOKENS
                and number not in self.counts
            ):
                self.counts.append(number)
                self.placeholders = {token: number}
                return True
        return False

    def media_token(self) -> int | None:
        """Return the token that stands for a part of an image, or of a sound."""
        for name in (
            "image_token_id",
            "image_token_index",
            "audio_token_id",
            "audio_token_index",
            "video_token_id",
        ):
            value = self.value(name)
            if isinstance(value, int) and value >= 0:
                return value
        return None

    def value(self, *names: str, default: Any = None) -> Any:
        """Return what the model's configuration, or one in it, has under the first of
        these names.
        """
        for part in parts_of(self.model.config):
            for name in names:
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return default

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of an image."""
        size = self.value("image_size", "img_size", "train_size", default=64)
        if isinstance(size, Mapping):
            return int(size["height"]), int(size["width"])
        if isinstance(size, (list, tuple)):
            return (int(size[0]), int(size[1]))
        return (int(size), int(size))

    @property
    def vocabulary(self) -> int:
        """How many tokens of text there are."""
        text = self.model.config.get_text_config()
        found = getattr(text, "vocab_size", None) or self.value("vocab_size", default=100)
        if isinstance(found, int):
            return int(found)
        return 100

    @property
    def width(self) -> int:
        """The width of a model's states."""
        text = self.model.config.get_text_config()
        return int(
            getattr(text, "hidden_size", None)
            or self.value("hidden_size", "d_model", "dim", default=64)
        )

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers, another for each row."""
        return torch.randn(ROWS, *shape, generator=self.generator)

    def whole(self, most: int, *shape: int, least: int = 0) -> torch.Tensor:
        """Return random whole numbers below ``most``."""
        return torch.randint(least, max(least + 1, most), (ROWS, *shape), generator=self.generator)

    @property
    def on_the_left(self) -> bool:
        """Whether padding stands before the text."""
        is_pair = getattr(self.model.config, "is_encoder_decoder", False)
        return bool(self.model.can_generate()) and not is_pair

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return TOKENS + sum(self.placeholders.values())


def _ids(maker: Maker) -> torch.Tensor:
    most = max(4, min(maker.vocabulary, 900) - 8)
    ids = torch.randint(
        min(20, most // 2), most, (ROWS, maker.tokens), generator=torch.Generator().manual_seed(3)
    )
    start = maker.tokens - 4 - sum(maker.placeholders.values())
    for token, number in maker.placeholders.items():
        ids[:, start : start + number] = token
        start += number
    eos = maker.value("eos_token_id")
    if (
        "Classification" in type(maker.model).__name__
        and isinstance(eos, int)
        and eos < maker.vocabulary
    ):
        ids[:, -1] = eos
    if maker.is_padded:
        pad = getattr(maker.model.config, "pad_token_id", None) or 0
        mask = _mask(maker)
        if 0 <= pad < maker.vocabulary:
            ids[mask == 0] = pad
    return ids


def _mask(maker: Maker) -> torch.Tensor:
    mask = torch.ones(ROWS, maker.tokens, dtype=torch.long)
    if maker.is_padded and "input_ids" in maker.parameters:
        for row, length in enumerate(LENGTHS):
            if maker.on_the_left:
                mask[row, : TOKENS - length] = 0
            elif not maker.placeholders:
                mask[row, length:] = 0
    elif "input_values" in maker.parameters:
        samples = _sound(maker).shape[-1]
        mask = torch.ones(ROWS, samples, dtype=torch.long)
        for row, length in enumerate(LENGTHS):
            mask[row, samples * length // TOKENS :] = 0
    return mask


def _decoder_ids(maker: Maker) -> torch.Tensor:
    decoder = getattr(maker.model.config, "decoder", None)
    most = getattr(decoder, "vocab_size", None) or maker.vocabulary
    ids = maker.whole(min(most, 900) - 8, 8, least=min(20, most // 2))
    if maker.value("num_codebooks") and "input_ids" in maker.parameters:
        return maker.whole(min(most, 900) - 8, 8).repeat_interleave(
            int(maker.value("num_codebooks")), 0
        )
    return ids


def _pixels(maker: Maker) -> Any:
    height, width = maker.size
    channels = int(maker.value("num_channels", "in_channels", "in_chans", default=3))
    if "image_grid_thw" in maker.parameters or "grid_thw" in maker.parameters:
        patch = int(maker.value("patch_size", default=14))
        steps = int(maker.value("temporal_patch_size", default=2))
        return maker.random(16, channels * steps * patch * patch).flatten(0, 1), 16
    name = type(maker.model).__name__
    if any(each in name for each in ("VideoMAE", "Timesformer", "Vivit", "VJEPA2", "VideoMae")):
        return maker.random(
            int(maker.value("num_frames", "frames_per_clip", default=2)), channels, height, width
        )
    if any(each in name for each in ("Idefics", "SmolVLM")):
        return maker.random(1, channels, height, width)
    return maker.random(channels, height, width)


def _grid(maker: Maker) -> torch.Tensor:
    return torch.tensor([[1, 4, 4]]).repeat(ROWS, 1)


def _features(maker: Maker) -> torch.Tensor:
    bins = int(
        maker.value(
            "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80
        )
    )
    length = 2 * int(maker.value("max_source_positions", default=32))
    if length > 1024:
        length = 64
    name = type(maker.model).__name__
    if any(each in name for each in ("SeamlessM4T", "Wav2Vec2Bert", "Speech2Text", "Clvp", "Univ")):
        bins = int(
            maker.value("feature_projection_input_dim", "input_feat_per_channel", default=bins)
        )
        return maker.random(64, bins)
    if "ASR" in name or "Granite" in name or "Parakeet" in name or "Lasr" in name:
        return maker.random(64, bins)
    return maker.random(bins, length)


def _sound(maker: Maker) -> torch.Tensor:
    name = type(maker.model).__name__
    if name.startswith("AST") or "SpeechT5ForTextToSpeech" in name:
        return maker.random(
            int(maker.value("max_length", default=64)), int(maker.value("num_mel_bins", default=80))
        )
    if any(each in name for each in ("Encodec", "Dac", "Mimi", "XCodec", "Xcodec")):
        return maker.random(int(maker.value("audio_channels", default=1)), 2048)
    return maker.random(2400)


def _boxes(maker: Maker) -> torch.Tensor:
    corners = maker.whole(400, maker.tokens, 4)
    corners[..., 2:] += corners[..., :2]
    return corners


def _past(maker: Maker) -> int:
    lags = maker.value("lags_sequence", default=[0])
    return int(maker.value("context_length", default=16)) + max(lags)


def _time(maker: Maker, steps: int) -> torch.Tensor:
    return maker.random(steps, int(maker.value("num_time_features", default=0) or 0))


def _ahead(maker: Maker) -> int:
    return int(maker.value("prediction_length", default=6) or 6)


def _series(maker: Maker) -> torch.Tensor:
    channels = maker.value("num_input_channels")
    if channels:
        return maker.random(int(maker.value("context_length", default=32)), int(channels))
    return maker.random(_past(maker)).abs()


def _points(maker: Maker) -> torch.Tensor:
    return maker.random(1, 2, 2).abs() * 10


def _hidden_patches(maker: Maker) -> torch.Tensor:
    height, width = maker.size
    patch = maker.value("patch_size", default=16)
    if not isinstance(patch, int):
        patch = patch[0]
    number = (height // patch) * (width // patch)
    name = type(maker.model).__name__
    if "VideoMAE" in name:
        number *= int(maker.value("num_frames", default=2)) // int(
            maker.value("tubelet_size", default=2)
        )
    mask = torch.zeros(ROWS, number, dtype=torch.bool)
    mask[:, : number // 2] = True
    return mask


_PROVIDERS: dict[str, Callable[[Maker], Any]] = {
    "input_ids": _ids,
    "attention_mask": _mask,
    "decoder_input_ids": _decoder_ids,
    "pixel_values": _pixels,
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "input_features": _features,
    "input_values": _sound,
    "audio_values": _sound,
    "bbox": _boxes,
    "token_type_ids": lambda maker: torch.zeros(ROWS, maker.tokens, dtype=torch.long),
    "mm_token_type_ids": lambda maker: (_ids(maker) == maker.media_token()).long(),
    "position_ids": lambda maker: torch.arange(maker.tokens).repeat(ROWS, 1),
    "inputs_embeds": lambda maker: maker.random(maker.tokens, maker.width),
    "hidden_states": lambda maker: (
        _pixels(maker)
        if "grid_thw" in maker.parameters
        else maker.random(maker.tokens, maker.width)
    ),
    "encoder_hidden_states": lambda maker: maker.random(8, maker.width),
    "encoder_outputs": lambda maker: (maker.random(8, maker.width), 1),
    "decoder_inputs_embeds": lambda maker: maker.random(8, maker.width),
    "decoder_input_values": lambda maker: maker.random(
        8, int(maker.value("num_mel_bins", default=80))
    ),
    "speaker_embeddings": lambda maker: maker.random(
        int(maker.value("speaker_embedding_dim", default=512))
    ),
    "speech_embeddings": lambda maker: maker.random(8, maker.width),
    "visual_feats": lambda maker: maker.random(
        5, int(maker.value("visual_feat_dim", default=2048))
    ),
    "visual_pos": lambda maker: maker.random(5, 4).abs(),
    "visual_embeds": lambda maker: maker.random(
        5, int(maker.value("visual_embedding_dim", default=512))
    ),
    "past_values": _series,
    "past_time_features": lambda maker: _time(maker, _past(maker)),
    "past_observed_mask": lambda maker: torch.ones_like(_series(maker)),
    "future_values": lambda maker: (
        maker.random(_ahead(maker), int(maker.value("num_input_channels")))
        if maker.value("num_input_channels")
        else maker.random(_ahead(maker)).abs()
    ),
    "future_time_features": lambda maker: _time(maker, _ahead(maker)),
    "static_categorical_features": lambda maker: maker.whole(1, 1),
    "states": lambda maker: maker.random(8, int(maker.value("state_dim", default=17))),
    "actions": lambda maker: maker.random(8, int(maker.value("act_dim", default=4))),
    "rewards": lambda maker: maker.random(8, 1),
    "returns_to_go": lambda maker: maker.random(8, 1),
    "timesteps": lambda maker: torch.arange(8).repeat(ROWS, 1),
    "bool_masked_pos": _hidden_patches,
    "input_points": _points,
    "spectrogram": lambda maker: maker.random(
        32, int(maker.value("model_in_dim", "num_mel_bins", default=80))
    ),
    "audio_codes": lambda maker: maker.whole(
        64, int(maker.value("num_quantizers", "num_codebooks", default=1)), 8
    ),
    "inputs": _ids,
    "prompt_pixel_values": _pixels,
    "conditional_pixel_values": _pixels,
    "prompt_masks": _pixels,
    "qformer_input_ids": lambda maker: maker.whole(500, 8, least=20),
    "text_inputs": lambda maker: maker.whole(60, 77, least=20),
    "task_inputs": lambda maker: maker.whole(
        60, int(maker.value("task_seq_len", default=77)), least=20
    ),
    "conditional_input_ids": lambda maker: maker.whole(60, 8, least=20),
    "classification_labels": lambda maker: maker.whole(2),
    "flattened_patches": lambda maker: torch.cat(
        [
            torch.arange(1, 17).repeat(ROWS, 1)[..., None].repeat(1, 1, 2).float(),
            maker.random(16, 768),
        ],
        -1,
    ),
    "entity_ids": lambda maker: maker.whole(100, 3, least=2),
    "entity_position_ids": lambda maker: torch.arange(4).repeat(ROWS, 3, 1),
    "entity_attention_mask": lambda maker: torch.ones(ROWS, 3, dtype=torch.long),
    "image_sizes": lambda maker: torch.tensor([list(maker.size)]).repeat(ROWS, 1),
    "aspect_ratio_ids": lambda maker: torch.ones(ROWS, 1, dtype=torch.long),
    "aspect_ratio_mask": lambda maker: torch.ones(ROWS, 1, 4, dtype=torch.long),
    "pixel_attention_mask": lambda maker: torch.ones(ROWS, 1, *maker.size, dtype=torch.long),
    "pixel_values_videos": lambda maker: maker.random(2, 3, *maker.size),
    "pixel_values_images": _pixels,
    "pixel_mask": lambda maker: torch.ones(ROWS, *maker.size, dtype=torch.long),
}
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "bbox")
_MEDIA = (
    "pixel_values",
    "pixel_values_images",
    "input_features",
    "input_values",
    "audio_values",
    "flattened_patches",
)
# Tried one after another where nothing that a model says names what it lacks.
_MORE = (
    "pixel_values",
    "bbox",
    "decoder_input_ids",
    "image_sizes",
    "token_type_ids",
    "speaker_embeddings",
    "future_values",
)
