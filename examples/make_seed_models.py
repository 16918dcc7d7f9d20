"""Write the tiny models of the seed programs, offline and with random weights.

    python make_seed_models.py KIND FOLDER

The models are small except in the part that uses the memory in each seed: a vocabulary of 128,256
tokens, a long KV cache, or an encoder's MLP.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PaliGemmaConfig,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

WORDS = "describe this image the quick brown fox jumps over the lazy dog"
CHAT = (
    "{% for m in messages %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% "
    "endfor %}{% endfor %}"
)


def scored(folder: Path) -> None:
    """Write one small layer with the vocabulary of Llama 3.

    The large initializer range spreads the logits, so that the perplexity varies.
    """
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "scored")


def drafted(folder: Path) -> None:
    """Write a target of 8 layers and a draft of 4, with 32 and 16 KiB of KV cache per token.

    The draft is the lower half of the target, and the upper half adds nothing. So the target
    accepts every drafted token.
    """
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=32768,
        initializer_range=0.3,
    )
    target = LlamaForCausalLM(config)
    draft = LlamaForCausalLM(LlamaConfig(**config.to_dict() | {"num_hidden_layers": 4}))
    for layer in target.model.layers[4:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    draft.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")


def vision(folder: Path) -> None:
    """Write a PaliGemma without weights: 576 tokens per image, one encoder layer with a wide MLP."""
    target = folder / "vision"
    images = SiglipImageProcessorPil(size={"height": 336, "width": 336})
    images.image_seq_length = 576
    PaliGemmaProcessor(images, _tokenizer(), chat_template=CHAT).save_pretrained(target)
    encoder = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=16384,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=336,
        patch_size=14,
        projection_dim=128,
        vision_use_head=False,
    )
    text = GemmaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
    )
    architectures = ["PaliGemmaForConditionalGeneration"]
    PaliGemmaConfig(
        vision_config=encoder,
        text_config=text,
        image_token_index=3,
        projection_dim=128,
        architectures=architectures,
    ).save_pretrained(target)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<image>", "\n"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    {"scored": scored, "drafted": drafted, "vision": vision}[sys.argv[1]](Path(sys.argv[2]))
