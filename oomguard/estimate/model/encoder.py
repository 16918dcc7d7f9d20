"""An encoder of images or audio beside the language model: its widths, and the tokens of the
largest thing that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder's widths in elements, the tokens that its largest item becomes, and the patches
    behind each token.

    Attributes:
        width: elements of a patch between its layers.
        mlp_width: elements of a patch inside the MLP.
        mlp_tensors: tensors of that width that live at once: two, or three where the activation is
            gated or a product.
        patches_per_token: patches, or frames of audio, behind each token.
        tokens_per_item: tokens of the largest image, or of the longest audio.
        output_width: the width of its outputs, the language model's.
        takes_video: whether a prompt may have videos too.
        modality: what it reads, ``image`` or ``audio``, by vLLM's name in ``limit_mm_per_prompt``.
        most_per_prompt: how many of them a prompt may have; None: as many as the user permits.
        tokens_per_video: tokens of a video that is larger than any image; None where images are the
            largest.
        patches_per_video: patches behind those.
        in_prompt: whether its tokens are part of the prompt; a decoder that attends across keeps
            them apart.
        heads: its attention heads; ranks share them where they divide them. 0 where the file does
            not say.
        attention: what its attention makes beside queries, keys and values: ``rotary`` turns them
            in float32, ``by_torch`` does so without a kernel of its own, ``normed`` norms them so;
            empty for what is no more than its MLP makes.
        patch_elements: elements of one patch's pixels.
        formatted_video_tokens: tokens of the longest video, which some versions count many times; 0
            for others.
        framed_videos: whether each two frames of a video may be as large as an image.
        tiles: tiles of an image that is cut into a fixed number of them, each with
            ``patches_per_token`` patches.
        kept_layers: layers whose outputs are kept to the end.
        always_profiled: whether early versions profiled its images whatever a step held.
        pixels_per_token: pixels of an image behind each token, where an image is as large as the
            processor lets it be; else 0.
        tokens_per_tile: tokens of a tile, of an image that is cut into as many as the processor
            lets it be; else 0.
    """

    width: int
    mlp_width: int
    mlp_tensors: int
    patches_per_token: float
    tokens_per_item: int
    output_width: int
    takes_video: bool = False
    modality: str = "image"
    most_per_prompt: int | None = None
    in_prompt: bool = True
    tokens_per_video: int | None = None
    patches_per_video: int = 0
    heads: int = 0
    attention: str = ""
    patch_elements: int = 0
    formatted_video_tokens: int = 0
    framed_videos: bool = False
    tiles: int = 0
    kept_layers: int = 0
    always_profiled: bool = False
    pixels_per_token: int = 0
    tokens_per_tile: int = 0
