"""Tiny models with random weights and tokenizers made here; nothing is downloaded."""

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
WORDS = [a + b for a in ("ba", "ce", "di", "fo", "gu", "ha", "jo", "ke", "lu", "mi") for b in ("n", "ra", "tto", "st")]
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
VOCAB = 64


def words(count: int, length: int, ragged: bool = True, seed: int = 0) -> list[str]:
    """``count`` texts of ``length`` words; all but the first are up to a quarter shorter where
    ``ragged``.
    """
    rng = random.Random(seed)
    sizes = [length - (rng.randrange(length // 4 + 1) if ragged and i else 0) for i in range(count)]
    return [" ".join(rng.choice(WORDS) for _ in range(size)) for size in sizes]


def tokenizer(kind: str = "decoder", side: str = "left", **options: Any) -> PreTrainedTokenizerFast:
    """A word-level tokenizer; ``kind`` "bert" adds [CLS] and [SEP], "t5" the end token."""
    vocab = {word: i for i, word in enumerate(SPECIAL + WORDS + ["yes", "no", "this", "example", "is", "."])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "bert":
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    if kind == "t5":
        core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 6)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="<s>",
        eos_token="</s>",
        padding_side=side,
        model_max_length=4096,
        **options,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on words of this module."""
    from tokenizers import decoders, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["[PAD]", "<s>", "</s>"], initial_alphabet=alphabet)
    core.train_from_iterator(words(50, 40), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", bos_token="<s>", eos_token="</s>", padding_side="left")


def llama(eos: Any = None, eager: bool = False, seed: int = 0, **sizes: Any) -> Any:
    """A tiny Llama; ``eager`` attention makes the scores, not the results, the largest tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = dict(SIZES, vocab_size=VOCAB, max_position_embeddings=4096, num_key_value_heads=2) | sizes
    config = LlamaConfig(**settings, pad_token_id=0, bos_token_id=5, eos_token_id=eos)
    if eager:
        config._attn_implementation = "eager"
    else:
        config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def bert(head: str, labels: int = 3, **settings: Any) -> Any:
    """A tiny BERT with a head, ``"BertForMaskedLM"`` or the like, and eager attention."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(SIZES, vocab_size=VOCAB, max_position_embeddings=512, num_labels=labels, pad_token_id=0) | settings
    config = transformers.BertConfig(**sizes)
    config._attn_implementation = "eager"
    return getattr(transformers, head)(config).eval()


def t5() -> Any:
    """A tiny T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB)
    config = T5Config(**sizes, pad_token_id=0, eos_token_id=6, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


def prompts(rows: int, length: int = 64, side: str = "left") -> Any:
    """A padded batch of ``rows`` prompts of different lengths, as a tokenizer returns it."""
    return tokenizer(side=side)(words(rows, length), return_tensors="pt", padding=True, return_token_type_ids=False)


def long_prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """One row of ``tokens`` ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, VOCAB, (1, tokens), generator=generator)
